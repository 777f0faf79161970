"""The text of `--dry-run`: what would run where, in which environment, and the equivalent torchrun command line."""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_kit.env import (
    ERROR_FILE,
    GROUP_RANK,
    GROUP_WORLD_SIZE,
    LOCAL_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    MAX_RESTARTS,
    NCCL_ERROR_HANDLING,
    RANK,
    ROLE_NAME,
    ROLE_RANK,
    ROLE_WORLD_SIZE,
    RUN_ID,
    SIGNALS,
    USE_AGENT_STORE,
    VISIBLE_GPUS,
    WORLD_SIZE,
)
from ddp_kit.launcher.job import RankAssignment
from ddp_kit.launcher.plan import GRACE_SECONDS, Logs, Plan, WorkerResources
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.spec import torchrun_words
from ddp_kit.launcher.warm import imports, kept_client
from ddp_kit.masking import masked, masked_env, masked_words

AT_THE_START = "chosen when the job starts"
AT_RENDEZVOUS = "assigned at the rendezvous"

_BY_FLAG = {
    ROLE_NAME: "--role",
    MAX_RESTARTS: "--max-restarts",
    RUN_ID: "--rdzv-id",
    SIGNALS: "--signals-to-handle",
}
_MIB = 1024**2
_RANKS = (RANK, LOCAL_RANK, ROLE_RANK)


def describe(plan: Plan, env: Mapping[str, str], host: str, defaults: Mapping[str, Any]) -> str:
    """Return the text of `--dry-run`, with secrets masked.

    `env`: the launcher's environment. `host`: this machine's name. `defaults`: the default settings of the installed
    torchrun.
    """
    return "\n\n".join(
        [
            f"Nothing was started. This would run on {host}:",
            _table(_processes(plan, env, host)),
            _table([*([name, masked(text, env)] for name, text in _settings(plan, env)), *_memory(plan, env)]),
            *_environment(plan, env),
            f"The equivalent torchrun command{_differences(plan, defaults)}:\n\n  {_torchrun(plan, env, defaults)}",
        ]
    )


# --- What runs --------------------------------------------------------------------------------------------------------


def _processes(plan: Plan, env: Mapping[str, str], host: str) -> list[list[str]]:
    workers = plan.workers or (WorkerResources(),)
    group_rank = plan.rendezvous.group_rank
    first = None if group_rank is None or (group_rank and not plan.workers) else group_rank * len(workers)
    rows = [["rank", "host", "GPU", "cores", "program"]]
    for local_rank, worker in enumerate(workers):
        rank = f"first + {local_rank}" if first is None else str(first + local_rank)
        gpus = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in worker.gpus) or "-"
        cores = "set by --numa-binding" if plan.numa_binding else _ranges(worker.cpus) or "any"
        program = shlex.join(masked_words(plan.command_line(local_rank), {**env, **plan.env}))
        rows.append([rank if plan.workers else f"{rank}, ...", host, gpus, cores, program])
    return rows


def _ranges(cpus: Sequence[int]) -> str:
    """Core numbers in a compact notation, such as `0-3,8` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _settings(plan: Plan, env: Mapping[str, str]) -> list[tuple[str, str]]:
    most = plan.rendezvous.limits.max_restarts
    started = (
        "forked from the warm server where possible" if plan.program(0) else "each started cold, in a new interpreter"
    )
    hangs, seconds = "not detected", plan.spec.hang_timeout
    if seconds is None:
        hangs = "a process that makes no progress for 300 s or more is killed, but only in scripts with a Trainer"
    elif seconds:
        hangs = f"a process that makes no progress for {seconds:g} s or more is killed"
    if plan.torchrun_only:
        started = f"started and watched by torchrun itself, for {plan.torchrun_only}"
        hangs = "not detected"
    return [
        ("processes", f"{len(plan.workers)}, {started}"),
        *_imports(plan, env),
        *_recognised(plan.rendezvous),
        ("nodes", _nodes(plan.rendezvous)),
        ("rendezvous", _endpoint(plan.rendezvous)),
        *_timeouts(plan.rendezvous),
        ("restarts", f"at most {most} consecutive restarts without progress" if most else "none"),
        ("signals", ", ".join(plan.signals_to_handle) or "none"),
        ("grace", f"{plan.shutdown_timeout} s from SIGTERM to SIGKILL"),
        ("hangs", hangs),
        ("logs", _logs(plan.logs)),
    ]


def _imports(plan: Plan, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """A row with the packages that are imported once for all processes, and with the package at which this ends."""
    unfit = imports.unfit(env)
    request = plan.imports(env, unfit)
    if request is None:
        return []
    packages = [each.package for each in imports.statements(request)]
    text = f"once per node: {', '.join(dict.fromkeys(['torch', *packages]))}"
    first = imports.left_out(request, unfit)
    if first:
        text += f"; in each process: {first}"
    if plan.spec.keep_warm is None or sys.platform != "linux":
        return [("imports", text)]
    return [("imports", text), ("kept", kept_client.state_of(request.program, request.packages))]


def _recognised(rendezvous: Rendezvous) -> list[tuple[str, str]]:
    """Rows with the name of the cluster, the values of its environment variables, and the names of these variables."""
    place = rendezvous.place
    if place is None:
        return []
    values = {
        "nodes": place.nodes,
        "node rank": place.node_rank,
        "host": place.host,
        "port": place.port,
        "GPUs": place.gpus,
        "end of the job": None if place.end_time is None else time.ctime(place.end_time),
    }
    known = {name: value for name, value in values.items() if value is not None and name in place.sources}
    rows = [("", f"{name} {value}, from {place.sources[name]}") for name, value in known.items()]
    return [("cluster", f"{place.environment}; command-line flags override these values:"), *rows]


def _nodes(rendezvous: Rendezvous) -> str:
    limits = rendezvous.limits
    many = str(rendezvous.nodes or f"{limits.min_nodes} to {limits.max_nodes}")
    if many == "1":
        return many
    if rendezvous.group_rank is None:
        return f"{many}; ranks are {AT_RENDEZVOUS}"
    same = "the ranks above assume the same number of processes on every node"
    return f"{many}, this is node {rendezvous.group_rank}; {same}"


def _endpoint(rendezvous: Rendezvous) -> str:
    if not rendezvous.endpoint_source:
        return f"{rendezvous.master_addr}, on a free port {AT_THE_START}"
    port = "" if rendezvous.port is None else f":{rendezvous.port}"
    host = {None: "", True: ", hosted on this node", False: ", hosted on another node"}[rendezvous.is_host]
    return f"{rendezvous.master_addr}{port} ({rendezvous.endpoint_source}){host}"


def _timeouts(rendezvous: Rendezvous) -> list[tuple[str, str]]:
    limits = rendezvous.limits
    if limits.max_nodes == 1 or not rendezvous.served_by_ddpkit:
        return []
    waits = f"wait up to {limits.join_timeout:g} s for enough nodes, then {limits.last_call_timeout:g} s for more nodes"
    lost = f"a node without a heartbeat for {limits.heartbeat_timeout:g} s counts as lost"
    return [("timeouts", f"{waits}; {lost}; wait up to {limits.replacement_timeout:g} s for a replacement")]


def _logs(logs: Logs) -> str:
    where = "not kept"
    if logs.are_kept:
        temporary = f"in the directory for temporary files, {AT_THE_START}"
        where = f"in a new folder {temporary if logs.log_dir is None else f'in {logs.log_dir}'}"
    settings = {name: value for name, value in vars(logs).items() if name != "log_dir"}
    set_values = {name: value for name, value in settings.items() if value and value != "0"}
    shown = (
        f"{name} {value if isinstance(value, str) else ','.join(map(str, value))}" for name, value in set_values.items()
    )
    return ", ".join([where, *shown])


def _memory(plan: Plan, env: Mapping[str, str]) -> list[list[str]]:
    """A row that suggests the command that estimates this job's memory. Running it here would run the script."""
    if plan.torchrun["module"] or plan.torchrun["no_python"]:
        return []
    rendezvous = plan.rendezvous
    nodes, per_node = rendezvous.nodes or rendezvous.limits.min_nodes, max(1, len(plan.workers))
    known = [gpu.memory_total for worker in plan.workers for gpu in worker.gpus if gpu.memory_total]
    size = f"{min(known) // _MIB}MiB" if known else "80GiB"
    command = f"ddpkit plan --gpus {per_node}{f' --nodes {nodes}' if nodes > 1 else ''} --memory {size}"
    command += f" {shlex.join(masked_words([plan.script, *plan.script_arguments], {**env, **plan.env}))}"
    return [["memory", f"run `{command}` to estimate it" + ("" if known else " (80 GiB is an example)")]]


# --- Environment ------------------------------------------------------------------------------------------------------


def _environment(plan: Plan, env: Mapping[str, str]) -> list[str]:
    """Three tables of variables: set by the launcher, from the user's environment, and different on each rank."""
    assignment = _assignment(plan)
    envs = [plan.environment(assignment, local_rank, env) for local_rank in range(max(1, len(plan.workers)))]
    known_later, origin = _known_later(plan.rendezvous), _origin(plan, env)
    differing = [*_RANKS, *([VISIBLE_GPUS] if plan.virtual_local_rank else [])]
    shown = {**masked_env(envs[0]), ERROR_FILE: ""}
    values = {
        name: known_later.get(name) or (value if value.isprintable() else repr(value))
        for name, value in sorted(shown.items())
        if name not in differing
    }
    ours = [[name, origin[name], value] for name, value in values.items() if name in origin]
    yours = [[name, value] for name, value in values.items() if name not in origin]
    by_rank = [[env[name] if name not in known_later else known_later[name] for name in differing] for env in envs]
    return [
        f"Variables that the launcher sets, with the same value on every rank:\n\n{_table(ours)}",
        f"Variables from your environment:\n\n{_table(yours)}",
        f"Variables that differ between the ranks:\n\n{_table([differing, *by_rank])}",
    ]


def _assignment(plan: Plan) -> RankAssignment:
    """This node's rank assignment, assuming equally many processes on all nodes; unknown values get placeholders."""
    rendezvous, count = plan.rendezvous, max(1, len(plan.workers))
    group_rank, nodes = rendezvous.group_rank or 0, rendezvous.nodes or 1
    return RankAssignment(
        round=0,
        restarts=0,
        group_rank=group_rank,
        group_world_size=nodes,
        first_rank=group_rank * count,
        world_size=nodes * count,
        first_role_rank=group_rank * count,
        role_world_size=nodes * count,
        master_addr=rendezvous.master_addr,
        master_port=rendezvous.port or 0,
    )


def _known_later(rendezvous: Rendezvous) -> dict[str, str]:
    """The variables whose values are not known yet; the text for each says when its value will be known."""
    known_later = {ERROR_FILE: f"{AT_THE_START}, one for each rank"}
    if not rendezvous.endpoint_source:
        known_later |= {MASTER_PORT: AT_THE_START, RUN_ID: AT_THE_START}
    if rendezvous.port == 0:
        known_later[MASTER_PORT] = AT_THE_START
    if rendezvous.group_rank is None:
        known_later |= dict.fromkeys((RANK, ROLE_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT), AT_RENDEZVOUS)
    if rendezvous.nodes is None:
        known_later |= dict.fromkeys((WORLD_SIZE, ROLE_WORLD_SIZE, GROUP_WORLD_SIZE), AT_RENDEZVOUS)
    if not rendezvous.served_by_ddpkit:
        known_later |= dict.fromkeys((MASTER_ADDR, MASTER_PORT, USE_AGENT_STORE), AT_RENDEZVOUS)
    return known_later


def _origin(plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """The origin of each variable that the launcher sets; all other variables come from the user's environment."""
    rendezvous = plan.rendezvous
    set_by_launcher = plan.environment(_assignment(plan), 0, plan.env)
    origin = dict.fromkeys([*set_by_launcher, ERROR_FILE], "as in torchrun") | _BY_FLAG
    where = "--local-addr" if rendezvous.local_addr and rendezvous.endpoint_source else rendezvous.endpoint_source
    origin |= dict.fromkeys((MASTER_ADDR, MASTER_PORT), where or "default for a single node")
    if not rendezvous.endpoint_source:
        origin[RUN_ID] = origin[MASTER_ADDR]
    if NCCL_ERROR_HANDLING in env:
        del origin[NCCL_ERROR_HANDLING]
    if rendezvous.group_rank is not None and rendezvous.limits.max_nodes > 1:
        place = rendezvous.place
        origin[GROUP_RANK] = "--node-rank" if place is None else place.sources.get("node rank", "--node-rank")
    return origin | dict(plan.origin)


# --- torchrun command -------------------------------------------------------------------------------------------------


def _torchrun(plan: Plan, env: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    """The equivalent torchrun command line, preceded by the variables that the launcher adds to the environment."""
    words = ["torchrun", *torchrun_words(plan.torchrun, defaults, plan.read_by_torchrun)]
    command = masked_words(words, {**env, **plan.env})
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in plan.env.items()), shlex.join(command)])


def _differences(plan: Plan, defaults: Mapping[str, Any]) -> str:
    """Describe how the torchrun command behaves differently from this launch."""
    ours = {"shutdown_timeout": GRACE_SECONDS}
    settings = {name for name, value in plan.torchrun.items() if value not in (None, "", ours.get(name))}
    missing = settings - plan.read_by_torchrun - defaults.keys()
    but = ["which does not bind processes to cores"] if any(worker.cpus for worker in plan.workers) else []
    but += [f"which does not support --{name.replace('_', '-')} in this version" for name in sorted(missing)]
    return "".join(f", {text}" for text in but)


# --- Layout -----------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as lines with aligned columns. The last column is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return "\n".join(
        "  " + "  ".join([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )
