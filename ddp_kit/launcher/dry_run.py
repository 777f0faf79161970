"""What `--dry-run` prints: who would run where, with which environment, and how torchrun would be told the same."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from ddp_kit.env import (
    ERROR_FILE,
    GRACE_DEFAULT,
    GROUP_RANK,
    GROUP_WORLD_SIZE,
    LOCAL_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    MAX_RESTARTS,
    NCCL_ERROR_HANDLING,
    PYTHON,
    RANK,
    ROLE_NAME,
    ROLE_RANK,
    ROLE_WORLD_SIZE,
    RUN_ID,
    SIGNALS,
    USE_AGENT_STORE,
    VISIBLE_GPUS,
    WORLD_SIZE,
    JobEnv,
    WorkerEnv,
    agent_serves_store,
    to_env,
)
from ddp_kit.errors import UsageError
from ddp_kit.launcher.masking import masked, masked_env, masked_words
from ddp_kit.launcher.plan import GRACE_SECONDS, Place, Plan
from ddp_kit.launcher.spec import LaunchSpec

AT_THE_START = "chosen at the start"
WHEN_THEY_MEET = "given when the nodes meet"

_OWN = ("static", "c10d")  # the rendezvous that need no service of their own
_PORTS = {"static": "29500", "c10d": "29400"}
_BY_FLAG = {
    ROLE_NAME: "--role",
    MAX_RESTARTS: "--max-restarts",
    RUN_ID: "--rdzv-id",
    SIGNALS: "--signals-to-handle",
}
_RANKS = (RANK, LOCAL_RANK, ROLE_RANK)


@dataclass(frozen=True)
class _Nodes:
    """What is known of the job's nodes before they have met."""

    alone: bool
    number: int | None
    """None: as many as come."""
    rank: int | None
    """This node's; None: given when they meet."""
    address: str
    port: str
    named_by: str
    """The flags that say where they meet; empty where the launcher chooses."""


def describe(spec: LaunchSpec, plan: Plan, env: Mapping[str, str], host: str, defaults: Mapping[str, Any]) -> str:
    """The whole text, secrets masked.

    `env`: the launcher's own environment. `host`: this machine's name. `defaults`: the settings of the installed
    torchrun where no flag is given.

    Raises `UsageError` where --virtual-local-rank has no GPU left for a rank.
    """
    nodes = _nodes(spec, plan)
    whole = {**env, **plan.env}
    return "\n\n".join(
        [
            f"Nothing was started. This would run on {host}:",
            _table(_processes(plan, nodes, whole, host)),
            _table(_circumstances(spec, plan, nodes, env)),
            *_environment(plan, nodes, env),
            f"The same with torchrun{_but(spec, plan, defaults)}:\n\n  {_torchrun(spec, plan, whole, defaults)}",
        ]
    )


def _nodes(spec: LaunchSpec, plan: Plan) -> _Nodes:
    settings = plan.torchrun
    backend = str(settings["rdzv_backend"])
    least, _, most = str(settings["nnodes"]).partition(":")
    number = int(least) if least.isdecimal() and most in ("", least) else None
    alone = (most or least) == "1"
    rank = 0 if alone else int(settings["node_rank"]) if backend == "static" and number else None
    if settings["rdzv_endpoint"]:
        host, colon, port = str(settings["rdzv_endpoint"]).rpartition(":")
        host, port = (host, port) if colon else (port, _PORTS.get(backend, ""))
        named_by = "--rdzv-endpoint"
    elif backend == "static":
        host, port = settings["master_addr"], str(settings["master_port"] or _PORTS[backend])
        named_by = "--master-addr and --master-port"
    else:
        host, port, named_by = "localhost", _PORTS.get(backend, ""), "torch's default"
    if settings["rdzv_id"] != spec.torchrun["rdzv_id"]:  # the plan's own choice
        named_by = ""
    address = str(settings["local_addr"] or host.strip("[]")) if rank == 0 else host.strip("[]")
    return _Nodes(alone, number, rank, address, port, named_by)


# What runs ---------------------------------------------------------------------------------------------------------


def _processes(plan: Plan, nodes: _Nodes, env: Mapping[str, str], host: str) -> list[list[str]]:
    places = plan.places or (Place(),)
    first = None if nodes.rank is None or (nodes.rank and not plan.places) else nodes.rank * len(places)
    rows = [["rank", "host", "GPU", "cores", "program"]]
    for local_rank, place in enumerate(places):
        rank = f"first + {local_rank}" if first is None else str(first + local_rank)
        gpu = f"{place.gpu.index}: {place.gpu.name}" if place.gpu else "-"
        cores = "by --numa-binding" if plan.torchrun.get("numa_binding") else _ranges(place.cpus) or "any"
        program = shlex.join(masked_words(_program(plan, local_rank, env), env))
        rows.append([rank if plan.places else f"{rank}, ...", host, gpu, cores, program])
    return rows


def _program(plan: Plan, local_rank: int, env: Mapping[str, str]) -> list[str]:
    settings = plan.torchrun
    words = [str(settings["training_script"]), *map(str, settings["training_script_args"])]
    if not settings["no_python"]:
        module = ["-m"] if settings["module"] else []
        words = [env.get(PYTHON, sys.executable), "-u", *module, *words]
    return [Template(word).safe_substitute(local_rank=local_rank) for word in words]  # as torch does


def _ranges(cpus: Sequence[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _circumstances(spec: LaunchSpec, plan: Plan, nodes: _Nodes, env: Mapping[str, str]) -> list[list[str]]:
    settings = plan.torchrun
    many = str(settings["nnodes"]).replace(":", " to ")
    if nodes.alone:
        many = "1"
    elif nodes.rank is None:
        many += "; ranks are given when the nodes meet"
    else:
        many += f", this one is node {nodes.rank}; the ranks above are right if all have as many processes"
    where = f"{nodes.address}:{nodes.port} ({nodes.named_by})"
    grace = settings.get("shutdown_timeout")
    grace = env.get(GRACE_DEFAULT, GRACE_SECONDS) if grace is None else grace
    most = settings["max_restarts"]
    rows = [
        ["processes", str(len(plan.places))],
        ["nodes", many],
        ["meet at", where if nodes.named_by else f"{nodes.address}, at a free port chosen at the start"],
        ["restarts", f"at most {most} in a row without progress" if most else "none"],
        ["grace", f"{grace} s from SIGTERM to SIGKILL"],
        ["hangs", _hangs(spec.hang_timeout)],
        ["logs", _logs(settings)],
    ]
    return [[name, masked(text, env)] for name, text in rows]


def _hangs(seconds: float | None) -> str:
    if seconds is None:
        return "in a Trainer's run, a process that does nothing for 300 s or more is ended"
    return f"a process that does nothing for {seconds:g} s or more is ended" if seconds else "nobody looks for them"


def _logs(settings: Mapping[str, Any]) -> str:
    if settings["log_dir"] is not None:
        return f"in a new folder in {settings['log_dir']}"
    if str(settings["redirects"]) == "0":
        return "none is kept"
    return f"in a new folder for temporary files, {AT_THE_START}"


# The environment ---------------------------------------------------------------------------------------------------


def _environment(plan: Plan, nodes: _Nodes, env: Mapping[str, str]) -> list[str]:
    """The variables that all ranks share, each with its origin; then those that differ."""
    worker = [_worker_env(plan, nodes, env, local_rank) for local_rank in range(max(1, len(plan.places)))]
    later, origin = _later(plan, nodes), _origin(plan, nodes, env)
    differing = [*_RANKS, *([VISIBLE_GPUS] if plan.torchrun["virtual_local_rank"] else [])]
    shown = {**masked_env(worker[0]), ERROR_FILE: ""}
    rows = {
        name: [name, origin.get(name, "your environment"), later.get(name) or _one_line(value)]
        for name, value in sorted(shown.items())
        if name not in differing
    }
    ours = [row for name, row in rows.items() if name in origin]
    yours = [row for name, row in rows.items() if name not in origin]
    by_rank = [[env[name] if name not in later else later[name] for name in differing] for env in worker]
    return [
        f"The environment of every rank, first what is set for it:\n\n{_table(ours)}",
        f"then what you have exported:\n\n{_table(yours)}",
        f"and what differs from rank to rank:\n\n{_table([differing, *by_rank])}",
    ]


def _worker_env(plan: Plan, nodes: _Nodes, env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """What a worker would find; something in the place of what is only known later."""
    settings, count = plan.torchrun, max(1, len(plan.places))
    rank = (nodes.rank or 0) * count + local_rank
    world_size = (nodes.number or 1) * count
    place = WorkerEnv(rank, local_rank, world_size, count, nodes.rank or 0)
    job = JobEnv(
        nodes=nodes.number or 1,
        role=settings["role"],
        role_rank=rank,
        role_world_size=world_size,
        master_addr=nodes.address,
        master_port=int(nodes.port) if nodes.port.isdecimal() else 0,
        restarts=0,
        max_restarts=settings["max_restarts"],
        run_id=settings["rdzv_id"],
        agent_serves_store=settings["rdzv_backend"] == "static" or agent_serves_store(),
    )
    found = {**env, **plan.env, **to_env(place, job)}
    if "signals_to_handle" in settings:
        found[SIGNALS] = settings["signals_to_handle"]
    if settings["virtual_local_rank"]:
        found |= {LOCAL_RANK: "0", VISIBLE_GPUS: _only_gpu(found, local_rank)}
    return found


def _only_gpu(env: Mapping[str, str], local_rank: int) -> str:
    """The one GPU that a rank sees with --virtual-local-rank. Source: LocalElasticAgent._set_local_rank_env."""
    words = env.get(VISIBLE_GPUS)
    if words is None:
        return str(local_rank)
    if local_rank >= len(words.split(",")):
        raise UsageError(
            f"--virtual-local-rank: there is no GPU for local rank {local_rank} in {VISIBLE_GPUS}={words}",
            "ask for no more processes than GPUs are visible",
        )
    return words.split(",")[local_rank].strip()


def _later(plan: Plan, nodes: _Nodes) -> dict[str, str]:
    """The variables whose values are not known yet, and when they will be."""
    backend = plan.torchrun["rdzv_backend"]
    sizes = (WORLD_SIZE, ROLE_WORLD_SIZE)
    meeting = (MASTER_ADDR, MASTER_PORT)
    later = {ERROR_FILE: f"{AT_THE_START}, one for each rank"}
    if not nodes.named_by:
        later |= {MASTER_PORT: AT_THE_START, RUN_ID: AT_THE_START}
    if nodes.port == "0":
        later[MASTER_PORT] = AT_THE_START
    if nodes.rank is None:
        later |= dict.fromkeys((RANK, ROLE_RANK, GROUP_RANK, *meeting), WHEN_THEY_MEET)
    if nodes.number is None:
        later |= dict.fromkeys((*sizes, GROUP_WORLD_SIZE), WHEN_THEY_MEET)
    if backend not in _OWN:
        later |= dict.fromkeys((*meeting, USE_AGENT_STORE), WHEN_THEY_MEET)
    return later


def _origin(plan: Plan, nodes: _Nodes, env: Mapping[str, str]) -> dict[str, str]:
    """Where each variable that is set for the workers has its value from; the rest is the user's own."""
    contracted = to_env(WorkerEnv(), JobEnv(1, "", 0, 1, "", 0, 0, 0, ""))
    origin = dict.fromkeys([*contracted, ERROR_FILE], "torchrun's contract")
    origin |= _BY_FLAG
    where = "--local-addr" if plan.torchrun["local_addr"] and nodes.named_by else nodes.named_by
    origin |= dict.fromkeys((MASTER_ADDR, MASTER_PORT), where or "ddpkit's default for one node")
    if not nodes.named_by:
        origin[RUN_ID] = origin[MASTER_ADDR]
    if NCCL_ERROR_HANDLING in env:
        del origin[NCCL_ERROR_HANDLING]
    if nodes.rank is not None and not nodes.alone:
        origin[GROUP_RANK] = "--node-rank"
    return origin | dict(plan.origin)


# torchrun ----------------------------------------------------------------------------------------------------------


def _torchrun(spec: LaunchSpec, plan: Plan, env: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    """The command line: settings that are not torchrun's own defaults, after what the launcher adds to the environment.

    PET_ variables are defaults, too, as they are in the environment where it is typed. A flag of a later torch is left
    out.
    """
    wanted = {name: value for name, value in spec.torchrun.items() if name in defaults}
    wanted["nproc_per_node"] = plan.torchrun["nproc_per_node"]
    if "shutdown_timeout" in wanted:
        wanted["shutdown_timeout"] = plan.torchrun["shutdown_timeout"]
    if plan.torchrun["rdzv_id"] != spec.torchrun["rdzv_id"]:
        wanted |= {"standalone": True, "local_addr": plan.torchrun["local_addr"]}
    script, arguments = str(wanted.pop("training_script")), list(map(str, wanted.pop("training_script_args")))
    flags = [_flag(name, value) for name, value in wanted.items() if value is not None and value != defaults.get(name)]
    dashes = ["--"] if _taken_for_flags(arguments, wanted) else []
    words = masked_words(["torchrun", *flags, *dashes, script, *arguments], env)
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in plan.env.items()), shlex.join(words)])


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if isinstance(value, list):
        value = ",".join(str(item).replace(",", ",,") for item in value)
    return f"{flag}={value}"


def _taken_for_flags(arguments: Sequence[str], names: Mapping[str, Any]) -> bool:
    """Whether torchrun would take an argument of the script for an abbreviation of a flag of its own."""
    flags = [f"--{spelled}" for name in names for spelled in (name, name.replace("_", "-"))]
    words = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    return any(flag.startswith(word) and flag != word for word in words for flag in flags)


def _but(spec: LaunchSpec, plan: Plan, defaults: Mapping[str, Any]) -> str:
    """How the torchrun command line differs."""
    given = {name for name, value in spec.torchrun.items() if value not in (None, "")}
    but = ["which binds no process to cores"] if any(place.cpus for place in plan.places) else []
    but += [f"which has no --{name.replace('_', '-')} in this version" for name in sorted(given - defaults.keys())]
    return "".join(f", {words}" for words in but)


# Layout ------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns; the last one is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "\n".join(
        "  " + "  ".join([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )


def _one_line(value: str) -> str:
    """A value as it is, where a terminal shows it as it is."""
    return value if value.isprintable() else repr(value)
