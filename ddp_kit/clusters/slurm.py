"""Slurm: read the environment variables of a job step, and write batch scripts.

Source: sbatch(1), srun(1) and scontrol(1) of Slurm 22.05 to 26.05.
"""

import re
import shlex
from collections.abc import Mapping

from ddp_kit.clusters.engine import Engine
from ddp_kit.clusters.request import AGAIN, SIGNALLED, JobPlace, Request, derived_port, number, optional_number
from ddp_kit.env import END_TIME, MASTER_ADDR
from ddp_kit.errors import UsageError

_NAME = "Slurm"
_JOB = "SLURM_JOB_ID"
_JOB_NODES = "SLURM_JOB_NUM_NODES"
_STEP = "SLURM_STEP_ID"
_NODES = "SLURM_STEP_NUM_NODES"
_LIST = "SLURM_STEP_NODELIST"
_NODE = "SLURM_NODEID"
_TASK = "SLURM_PROCID"
_TASKS = "SLURM_STEP_NUM_TASKS"
_HETEROGENEOUS = "SLURM_HET_SIZE"
_GPUS = "SLURM_GPUS_ON_NODE"
_WARNING_SECONDS = 120
_CPUS = {
    False: "for all processes of a node together",
    True: "8 per GPU, for all processes of a node; if the nodes have fewer cores, sbatch refuses the job: use --cpus",
}
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

_SCRIPT = """\
#!/usr/bin/env bash
# Made by: {command}
{how_to}
{directives}
set -u

# srun does not inherit --cpus-per-task from the job (Slurm 22.05 and later).
code=0
srun{no_kill} ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}}{container} {launch} || code=$?

# A task of a job array is named ARRAY_TASK: with the array's id alone, Slurm would requeue every task.
job="${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_}}${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}}"
again() {{ scontrol requeue "$job"; }}
again_counted() {{  # the count is in the job's comment, because Slurm's own count includes preemptions
    retries=$(scontrol show job "$job" | sed -n 's/^ *Comment=ddpkit-retries-\\([0-9]*\\).*/\\1/p')
    [ "${{retries:-0}}" -lt {retries} ] &&
        scontrol update JobId="$job" Comment="ddpkit-retries-$((${{retries:-0}} + 1))" && again
}}

case $code in
    {again}) again ;;  # a node was lost, or the workers have saved
    {counted}) again_counted ;;  # not started, or hung
    *) [ "$code" -lt {signalled} ] || again_counted ;;  # ended by a signal
esac
exit "$code"
"""


class Slurm(Engine):
    """A Slurm cluster: a batch script for sbatch, which runs one launcher per node with srun."""

    name = "slurm"
    help = "a batch script for sbatch"
    examples = (
        "--nodes 4 --gpus 8 --time 24h --requeue train.py --lr 0.1",
        "--nodes 2 --gpus 8 --array 0-9 sweep.py",
    )
    flags = frozenset({"cpus", "time", "image", "queue", "array", "requeue", "retries", "gpu_type"})
    suffix = ".sbatch"
    program = "sbatch"
    install = "log in to a host of the cluster that has sbatch"
    script_needed = False
    memory_setting = "--mem=16G"
    cpus_setting = "--cpus-per-task=4"

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
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
        nodes = number(env, _NODES, _NAME, 1)
        tasks = number(env, _TASKS, _NAME, 1)
        if tasks != nodes:
            if number(env, _TASK, _NAME):
                raise SystemExit(2)  # only task 0 reports the error
            raise UsageError(
                f"srun started {tasks} tasks on {nodes} nodes, but `ddpkit launch` starts the workers itself: run it "
                "once per node",
                "add --ntasks-per-node=1 to the srun (or sbatch) command",
            )
        return JobPlace(
            environment=_NAME,
            nodes=nodes,
            node_rank=number(env, _NODE, _NAME),
            # Where the names of nodes do not resolve, users set MASTER_ADDR to an address of the first node.
            host=env.get(MASTER_ADDR) or first_host(env[_LIST]),
            port=derived_port(str(number(env, _JOB, _NAME) + number(env, _STEP, _NAME))),
            run_id=f"{env[_JOB]}.{env[_STEP]}",
            sources={
                "nodes": _NODES,
                "node rank": _NODE,
                "host": MASTER_ADDR if env.get(MASTER_ADDR) else _LIST,
                "port": f"{_JOB} + {_STEP}",
                "end of the job": END_TIME,
                "GPUs": _GPUS,
            },
            gpus=optional_number(env, _GPUS),
            end_time=optional_number(env, END_TIME),
            waits_for=f"`squeue --steps --jobs {env[_JOB]}` shows where the step runs",
        )

    def text(self, request: Request) -> str:
        """A batch script for sbatch.

        If the request names no script, the batch script passes its own arguments to `ddpkit launch`.
        """
        gpus: str | int | None = request.gpus
        if request.gpu_type:
            gpus = shlex.quote(f"{request.gpu_type}:{request.gpus}")
        directives = {
            "job-name": shlex.quote(request.name),
            "partition": request.queue and shlex.quote(request.queue),
            "nodes": request.nodes,
            "ntasks-per-node": "1   # one launcher per node, which starts one process per GPU",
            "gpus-per-node": gpus,
            "cpus-per-task": request.cpus_per_node and f"{request.cpus_per_node}   # {_CPUS[request.cpus is None]}",
            "time": request.seconds and clock(request.seconds),
            "array": request.array and shlex.quote(request.array),
            "signal": f"USR2@{_WARNING_SECONDS}   # seconds before the time limit; a Trainer then saves",
            "open-mode": "append   # a job that is requeued continues its log",
            "output": "%x-%A_%a.log" if request.array else "%x-%j.log",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
        if request.requeue:
            lines.append("#SBATCH --requeue   # after a preemption or the loss of a node")
        if request.spares:
            lines.append("#SBATCH --no-kill   # the job continues without a lost node, whose place a spare takes")
        launch = 'ddpkit launch "$@"'
        if request.words:
            launch = shlex.join(request.launch)
        container = ""
        if request.image:
            container = f' --container-image={shlex.quote(request.image)} --container-mounts="$PWD"'
            container += ' --container-workdir="$PWD"'
        return _SCRIPT.format(
            command=request.command,
            how_to=_HOW_TO[bool(request.words)],
            directives="\n".join(lines),
            no_kill=" --no-kill" * bool(request.spares),
            container=container,
            launch=launch,
            retries=request.retries,
            again="|".join(map(str, AGAIN)),
            counted="|".join(map(str, request.counted)),
            signalled=SIGNALLED,
        )

    def submit_command(self, request: Request, path: str) -> tuple[str, ...]:  # noqa: ARG002
        """The sbatch command."""
        return self.program, path


def _outside_steps(env: Mapping[str, str]) -> JobPlace:
    """The `JobPlace` for a batch script or an salloc shell, which run on only one node.

    Raises `UsageError` if the Slurm job has several nodes.
    """
    nodes = number({_JOB_NODES: "1"} | dict(env), _JOB_NODES, _NAME, 1)
    if nodes > 1:
        raise UsageError(
            f"this Slurm job has {nodes} nodes, but this command runs on only one of them",
            "run `srun --ntasks-per-node=1 ddpkit launch ...` to use all nodes, or `ddpkit launch --nnodes 1 ...` to "
            "use only this node",
        )
    sources = {"end of the job": END_TIME, "GPUs": _GPUS}
    gpus = optional_number(env, _GPUS)
    return JobPlace(_NAME, 1, 0, "localhost", 0, env[_JOB], sources, gpus, optional_number(env, END_TIME))


def first_host(node_list: str) -> str:
    """The first host name in a Slurm node list such as `gpu-[003-005,9],login`.

    Raises `UsageError` if the text is not a node list.
    """
    hosts = re.match(r"(?:[^\[\],]+|\[[^\]]+\])+", node_list)
    if hosts is None:
        raise UsageError(f"{_LIST}={node_list!r} is not a valid list of hosts", "do not set this variable: Slurm does")
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", hosts[0])


def clock(seconds: int) -> str:
    """A duration in Slurm's format: `1-12:00:00` for a day and a half."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    text = f"{hour:02}:{minute:02}:{second:02}"
    return f"{days}-{text}" if days else text
