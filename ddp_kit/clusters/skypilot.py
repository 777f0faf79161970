"""SkyPilot: read the environment variables of a task, and write the task file of a managed job.

Source: SkyPilot 0.14 documentation, "Secrets and environment variables", "Managed jobs" and "YAML".
"""

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from ddp_kit.clusters.engine import Engine
from ddp_kit.clusters.request import AGAIN, PORT, SIGNALLED, JobPlace, Request, number, optional_number
from ddp_kit.errors import UsageError

_NAME = "SkyPilot"
_NODES = "SKYPILOT_NUM_NODES"
_RANK = "SKYPILOT_NODE_RANK"
_ADDRESSES = "SKYPILOT_NODE_IPS"
_GPUS = "SKYPILOT_NUM_GPUS_PER_NODE"
_TASK = "SKYPILOT_TASK_ID"

_EXPLAINED = """\
# Made by: {command}
# Checkpoints have to be in storage that outlives the nodes: set checkpoint.dir to a URL such as s3://BUCKET/RUN, or
# mount a bucket or a volume with file_mounts.
# After exit codes 75 (saved) and 4 (a node was lost), SkyPilot recovers the job as after a preemption. All other exit
# codes end the job.
"""
_SETUP = "command -v ddpkit >/dev/null || python -m pip install --quiet 'ddpkit[cloud]'\n"
_RUN = """\
code=0
{launch} || code=$?
if [ "$code" -ge {signalled} ]; then code=1; fi  # SkyPilot uses 137 itself
(exit "$code")  # in a subshell: this shell then runs commands that SkyPilot appends to upload cached files
"""


class SkyPilot(Engine):
    """A managed job of SkyPilot, which starts machines in a cloud and replaces them."""

    name = "skypilot"
    help = "a task for `sky jobs launch`"
    examples = ("--nodes 4 --gpus H100:8 train.py",)
    flags = frozenset({"cpus", "image", "gpu_type"})
    suffix = ".yaml"
    program = "sky"
    install = "install SkyPilot with support for your cloud, such as pip install skypilot[kubernetes]"
    copies_folder = True

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this node's rank and the job's rendezvous settings, or None outside of a SkyPilot task."""
        if _ADDRESSES not in env:
            return None
        addresses = env[_ADDRESSES].split() or ["localhost"]
        nodes = len(addresses)
        source = _ADDRESSES
        if _NODES in env:
            nodes = number(env, _NODES, _NAME, 1)
            source = _NODES
        return JobPlace(
            environment=_NAME,
            nodes=nodes,
            node_rank=number(env, _RANK, _NAME),
            host=addresses[0],
            port=PORT,
            run_id=env.get(_TASK, "skypilot"),
            sources={"nodes": source, "node rank": _RANK, "host": _ADDRESSES, "GPUs": _GPUS},
            gpus=optional_number(env, _GPUS),
            waits_for="`sky logs` shows what the other nodes are doing",
        )

    def check(self, request: Request) -> None:
        """Check that the type of the GPUs is given."""
        if request.gpus is not None and request.gpu_type is None:
            raise UsageError("SkyPilot needs the type of the GPUs", f"use --gpus H100:{request.gpus}, or another type")

    def text(self, request: Request) -> str:
        """The YAML file of a task that runs as a managed job."""
        resources: dict[str, Any] = {
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": list(AGAIN)},
        }
        if request.gpus is not None:
            resources["accelerators"] = {request.gpu_type: request.gpus}
        if request.cpus is not None:
            resources["cpus"] = f"{request.cpus}+"
        if request.image is not None:
            resources["image_id"] = f"docker:{request.image}"
        task = {
            "name": request.name,
            "num_nodes": request.nodes,
            "workdir": ".",
            "resources": resources,
            "setup": _SETUP,
            "run": _RUN.format(launch=shlex.join(request.launch), signalled=SIGNALLED),
        }
        yaml.add_representer(str, _block, Dumper=_Dumper)
        return _EXPLAINED.format(command=request.command) + yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=120)

    def submit_command(self, request: Request, path: str) -> tuple[str, ...]:
        """The command that launches the managed job."""
        return self.program, "jobs", "launch", "--name", request.name, "--yes", path


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line strings as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
