"""Slurm: read the environment variables of a job step, and write batch scripts.

Source: sbatch(1), srun(1) and scontrol(1) of Slurm 22.05 to 26.05.
"""

import re
import shlex
from collections.abc import Mapping

from ddp_kit.env import END_TIME, MASTER_ADDR
from ddp_kit.errors import UsageError
from ddp_kit.launcher.clusters.request import (
    AGAIN,
    COUNTED,
    SIGNALLED,
    JobPlace,
    Request,
    clock,
    derived_port,
    number,
    optional_number,
)

_NAME = "Slurm"
_JOB, _JOB_NODES = "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"
_STEP, _NODES, _LIST = "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"
_NODE, _TASK, _TASKS = "SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
_HETEROGENEOUS = "SLURM_HET_SIZE"
_SEVERAL_TASKS = (
    "srun started {tasks} tasks on {nodes} nodes, but `ddpkit launch` starts the workers itself: run it once per node"
)


def read(env: Mapping[str, str]) -> JobPlace | None:
    """Return this node's rank and the job's rendezvous settings, or None outside of Slurm."""
    if _JOB not in env:
        return None
    if optional_number(env, _HETEROGENEOUS):
        raise UsageError(
            "this is a heterogeneous Slurm job, for which ddpkit cannot determine node ranks",
            "use --nnodes, --node-rank, --master-addr and --master-port",
        )
    if _STEP not in env or _LIST not in env:
        return _outside_steps(env)
    nodes, tasks = number(env, _NODES, _NAME, 1), number(env, _TASKS, _NAME, 1)
    if tasks != nodes:
        if number(env, _TASK, _NAME):
            raise SystemExit(2)  # only task 0 reports the error
        raise UsageError(
            _SEVERAL_TASKS.format(tasks=tasks, nodes=nodes), "add --ntasks-per-node=1 to the srun (or sbatch) command"
        )
    run_id = f"{env[_JOB]}.{env[_STEP]}"
    return JobPlace(
        environment=_NAME,
        nodes=nodes,
        node_rank=number(env, _NODE, _NAME),
        # Where the names of nodes do not resolve, users set MASTER_ADDR to an address of the first node.
        host=env.get(MASTER_ADDR) or first_host(env[_LIST]),
        port=derived_port(str(number(env, _JOB, _NAME) + number(env, _STEP, _NAME))),
        run_id=run_id,
        sources={
            "nodes": _NODES, "node rank": _NODE, "host": MASTER_ADDR if env.get(MASTER_ADDR) else _LIST,
            "port": f"{_JOB} + {_STEP}", "end of the job": END_TIME, "GPUs": "SLURM_GPUS_ON_NODE",
        },
        gpus=optional_number(env, "SLURM_GPUS_ON_NODE"),
        end_time=optional_number(env, END_TIME),
        waits_for=f"`squeue --steps --jobs {env[_JOB]}` shows where the step runs",
    )  # fmt: skip


def _outside_steps(env: Mapping[str, str]) -> JobPlace:
    """The `JobPlace` for a batch script or an salloc shell, which run on only one node.

    Raises `UsageError` if the Slurm job has several nodes.
    """
    nodes = number(env, _JOB_NODES, _NAME, 1) if _JOB_NODES in env else 1
    if nodes > 1:
        raise UsageError(
            f"this Slurm job has {nodes} nodes, but this command runs on only one of them",
            "run `srun --ntasks-per-node=1 ddpkit launch ...` to use all nodes, or `ddpkit launch --nnodes 1 ...` to "
            "use only this node",
        )
    sources = {"end of the job": END_TIME, "GPUs": "SLURM_GPUS_ON_NODE"}
    gpus, end_time = optional_number(env, "SLURM_GPUS_ON_NODE"), optional_number(env, END_TIME)
    return JobPlace(_NAME, 1, 0, "localhost", 0, env[_JOB], sources, gpus, end_time)


def first_host(node_list: str) -> str:
    """The first host name in a Slurm node list such as `gpu-[003-005,9],login`.

    Raises `UsageError` if the text is not a node list.
    """
    found = re.match(r"(?:[^\[\],]+|\[[^\]]+\])+", node_list)
    if found is None:
        raise UsageError(f"{_LIST}={node_list!r} is not a valid list of hosts", "do not set this variable: Slurm does")
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", found[0])


# --- Job file ---------------------------------------------------------------------------------------------------------

_WARNING_SECONDS = 120
_CPUS = {
    False: "for all processes of a node together",
    True: "8 per GPU, for all processes of a node; if the nodes have fewer cores, sbatch refuses the job: use --cpus",
}


def job_file(request: Request) -> str:
    """A batch script for sbatch.

    If the request names no script, the batch script passes its own arguments to `ddpkit launch`.
    """
    log = "%x-%A_%a.log" if request.array else "%x-%j.log"
    directives = {
        "job-name": shlex.quote(request.name),
        "partition": request.queue and shlex.quote(request.queue),
        "nodes": request.nodes,
        "ntasks-per-node": "1   # one launcher per node, which starts one process per GPU",
        "gpus-per-node": shlex.quote(f"{request.gpu_type}:{request.gpus}") if request.gpu_type else request.gpus,
        "cpus-per-task": request.cpus_per_node and f"{request.cpus_per_node}   # {_CPUS[request.cpus is None]}",
        "time": None if request.seconds is None else clock(request.seconds),
        "array": request.array and shlex.quote(request.array),
        "signal": f"USR2@{_WARNING_SECONDS}   # seconds before the time limit; a Trainer then saves",
        "open-mode": "append   # a job that is requeued continues its log",
        "output": log,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
    lines += ["#SBATCH --requeue   # after a preemption or the loss of a node"] if request.requeue else []
    container = f' --container-image={shlex.quote(request.image)} --container-mounts="$PWD"' if request.image else ""
    workdir = ' --container-workdir="$PWD"' if request.image else ""
    words = shlex.join(request.launch) if request.words else 'ddpkit launch "$@"'
    return f"""\
#!/usr/bin/env bash
# Made by: {request.command}
{_HOW_TO[bool(request.words)]}
{chr(10).join(lines)}
set -u

# srun does not inherit --cpus-per-task from the job (Slurm 22.05 and later).
code=0
srun ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}}{container}{workdir} {words} || code=$?

# A task of a job array is named ARRAY_TASK: with the array's id alone, Slurm would requeue every task.
job="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_}}${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}"
again() {{ scontrol requeue "$job"; }}
again_counted() {{  # the count is in the job's comment, because Slurm's own count includes preemptions
    retries=$(scontrol show job "$job" | sed -n 's/^ *Comment=ddpkit-retries-\\([0-9]*\\).*/\\1/p')
    [ "${{retries:-0}}" -lt {request.retries} ] &&
        scontrol update JobId="$job" Comment="ddpkit-retries-$((${{retries:-0}} + 1))" && again
}}

case $code in
{_cases()}
esac
exit "$code"
"""


_HOW_TO = {
    True: """\
# Submit this file from the environment (venv, conda, modules) in which ddpkit is installed: Slurm passes the
# environment on to the nodes.""",
    False: """\
# Train on several nodes:  sbatch train.sbatch train.py --lr 0.1
# `ddpkit launch` gets the arguments after the name of this file: its flags, the script, the script's arguments.
# Submit this file from the environment (venv, conda, modules) in which ddpkit is installed: Slurm passes the
# environment on to the nodes.""",
}


def _cases() -> str:
    """Branches of a `case` statement in the batch script that requeue the job after certain exit codes."""
    again, counted = "|".join(map(str, AGAIN)), "|".join(map(str, COUNTED))
    return f"""\
    {again}) again ;;  # a node was lost, or the workers have saved
    {counted}) again_counted ;;  # not started, or hung
    *) [ "$code" -lt {SIGNALLED} ] || again_counted ;;  # ended by a signal"""


def submission(request: Request, path: str) -> tuple[str, ...]:  # noqa: ARG001
    """The command that submits the job file at `path`."""
    return "sbatch", path
