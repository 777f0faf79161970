"""Every torchrun command line of torch's documentation runs unchanged with `ddpkit launch` in torchrun's place."""

import re
import shlex
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.distributed import run as torchrun

from tests.support.labels import unlabelled
from tests.support.launching import DDPKIT, PROGRAMS, free_port, seconds, started

pytestmark = pytest.mark.slow


OF_TUTORIALS = [
    # Elastic quickstart
    "torchrun --nnodes=NUM_NODES --nproc-per-node=TRAINERS_PER_NODE --max-restarts=NUM_ALLOWED_FAILURES"
    " --rdzv-id=JOB_ID --rdzv-backend=c10d --rdzv-endpoint=HOST_NODE_ADDR"
    " YOUR_TRAINING_SCRIPT.py (--arg1 ... train script args...)",
    "torchrun --nnodes=MIN_SIZE:MAX_SIZE --nproc-per-node=TRAINERS_PER_NODE"
    " --max-restarts=NUM_ALLOWED_FAILURES_OR_MEMBERSHIP_CHANGES"
    " --rdzv-id=JOB_ID --rdzv-backend=c10d --rdzv-endpoint=HOST_NODE_ADDR"
    " YOUR_TRAINING_SCRIPT.py (--arg1 ... train script args...)",
    # Getting started with distributed data parallel
    "torchrun --nnodes=2 --nproc_per_node=8 --rdzv_id=100 --rdzv_backend=c10d"
    " --rdzv_endpoint=$MASTER_ADDR:29400 elastic_ddp.py",
    # Fault-tolerant training with torchrun; the same page in its repository of examples
    "torchrun --standalone --nproc_per_node=4 multigpu_torchrun.py 50 10",
    "torchrun --standalone --nproc_per_node=gpu multigpu_torchrun.py 50 10",
    # Multinode training, on a Slurm cluster
    "torchrun --nnodes 4 --nproc_per_node 1 --rdzv_id $RANDOM --rdzv_backend c10d --rdzv_endpoint $head_node_ip:29500"
    " multinode_torchrun.py 50 10",
    # Device mesh
    "torchrun --nproc_per_node=8 --rdzv_id=100 --rdzv_endpoint=localhost:29400 2d_setup.py",
    # Pipeline parallelism, fully sharded data parallel, DTensor, hangs
    "torchrun --nnodes 1 --nproc_per_node 2 pipelining_tutorial.py",
    "torchrun --nnodes 1 --nproc_per_node 4  T5_training.py",
    "torchrun --standalone --nnodes=1 --nproc-per-node=4 dtensor_example.py",
    "torchrun --nproc_per_node=2 verify_flight_recorder.py",
]


def of_the_docstring() -> list[str]:
    """Each block that starts with torchrun, its indented lines joined."""
    blocks = re.findall(r"^    torchrun\b.*\n(?:^     *\S.*\n)*", str(torchrun.__doc__), re.MULTILINE)
    return [" ".join(block.split()) for block in blocks]


def written(line: str, port: int) -> tuple[list[str], int, int]:
    """The words behind torchrun, how many agents they ask for and how many workers of each.

    What a reader fills in is filled in. 8 processes on a node, and 4 nodes, become 2: each imports torch, and not every
    machine that runs the tests carries 16.
    """
    for name, value in {
        r"\(--arg1 \.\.\. train script args\.\.\.\)": "--arg1 x",
        r"\$?(NUM_NODES|NUM_TRAINERS|TRAINERS_PER_NODE)": "2",
        r"MIN_SIZE:MAX_SIZE": "1:2",
        r"NUM_ALLOWED_FAILURES(_OR_MEMBERSHIP_CHANGES)?": "3",
        r"\$?JOB_ID|\$RANDOM": "job",
        r"\$?HOST_NODE_ADDR|(\$MASTER_ADDR|\$head_node_ip|localhost):[1-9]\d*": f"127.0.0.1:{port}",
        r"(nproc.per.node)[= ]8\b": r"\1=2",
        r"(nnodes[= ](?:1:)?)4\b": r"\g<1>2",
        r"\S+\.py": "train.py",
    }.items():
        line = re.sub(name, value, line)
    assert not re.search(r"\$|[A-Z]{4}", line), f"something is left to fill in: {line}"
    nodes = re.search(r"nnodes[= ](?:\d+:)?(\d+)", line)
    workers = re.search(r"nproc.per.node[= ](\d+)", line)
    return shlex.split(line)[1:], int(nodes[1]) if nodes else 1, int(workers[1]) if workers else 1


def test_docstring_of_torchrun_has_command_lines() -> None:
    lines = of_the_docstring()
    assert len(lines) >= 4
    assert all(re.search(r"\.py\b", line) for line in lines)


@pytest.mark.parametrize("line", [*of_the_docstring(), *OF_TUTORIALS])
def test_documented_torchrun_command_line_runs_unchanged(line: str, tmp_path: Path) -> None:
    if "--numa-binding" in line and not (torch.cuda.is_available() and shutil.which("numactl")):
        pytest.skip("binding to NUMA nodes needs GPUs and numactl")
    if "=gpu" in line and not torch.cuda.is_available():
        pytest.skip("one process per GPU needs a GPU")
    (tmp_path / "train.py").write_text((PROGRAMS / "reduces_and_prints.py").read_text())
    words, nodes, workers = written(line, free_port())
    environment = {"OMP_NUM_THREADS": None}
    if any(word.endswith("1:2") for word in words):  # the first node waits no longer than that for the other one
        environment |= {"PET_RDZV_CONF": f"last_call_timeout={seconds(240):.0f}"}
    with ExitStack() as running:
        agents = [
            running.enter_context(
                started(DDPKIT, "launch", *words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL)
            )
            for _ in range(nodes)
        ]
        outcomes = [(*agent.communicate(timeout=seconds(120)), agent.returncode) for agent in agents]
    assert [code for _, _, code in outcomes] == [0] * nodes, outcomes
    world = torch.cuda.device_count() if "=gpu" in line else nodes * workers
    said = sorted(words for output, _, _ in outcomes for words in unlabelled(output).splitlines())
    arguments = words[words.index("train.py") + 1 :]
    assert said == sorted(f"{rank} of {world}: {world} {arguments}" for rank in range(world))
