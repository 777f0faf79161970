"""The text of `--dry-run`: what would run where, in which environment, and the equivalent torchrun command line."""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_kit.clusters.request import JobPlace
from ddp_kit.env import (
    ERROR_FILE,
    FLAG_DEFAULT,
    GRACE_DEFAULT,
    GROUP_RANK,
    GROUP_WORLD_SIZE,
    LINE_PREFIX_DEFAULT,
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
from ddp_kit.launcher.plan import GRACE_SECONDS, Plan, WorkerResources
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.spec import OWN_FLAGS, TORCHRUN_FLAGS, torchrun_words
from ddp_kit.launcher.warm import imports, kept_client
from ddp_kit.masking import masked, masked_env, masked_words
from ddp_kit.texts import MIB, aligned, ranges

AT_THE_START = "chosen when the job starts"
AT_RENDEZVOUS = "assigned at the rendezvous"
_TEMPORARY = f"the directory for temporary files, {AT_THE_START}"

_BY_FLAG = {
    ROLE_NAME: "--role",
    MAX_RESTARTS: "--max-restarts",
    RUN_ID: "--rdzv-id",
    SIGNALS: "--signals-to-handle",
}
_SETTING_OF = {"backend": "rdzv_backend", "run_id": "rdzv_id", "min_nodes": "nnodes", "max_nodes": "nnodes"}
"""The settings that fields of the rendezvous and its limits are read from, where the names differ."""
_NO_SETTINGS = ("place", "limits", "endpoint_source", "served_by_ddpkit")
_FROM_CLUSTER = ("nnodes", "node_rank", "rdzv_id", "rdzv_backend")
_READ_BY_RENDEZVOUS = ("nnodes", "node_rank", "max_restarts", "standalone", "local_addr", "rdzv_", "master_")
_SHOWN_ELSEWHERE = {"training_script", "training_script_args", "dry_run", "print_completion"}
_FLAGS = {flag.dest: flag for flag in (*TORCHRUN_FLAGS, *OWN_FLAGS)}
_TORCHRUN_VARIABLES = {"shutdown_timeout": GRACE_DEFAULT, "log_line_prefix_template": LINE_PREFIX_DEFAULT}
_HANG_TIMEOUTS = {None: "300 s, but only in scripts with a Trainer", 0.0: "no limit"}
_RANKS = (RANK, LOCAL_RANK, ROLE_RANK)


def describe(plan: Plan, env: Mapping[str, str], host: str, defaults: Mapping[str, Any]) -> str:
    """Return the text of `--dry-run`, with secrets masked.

    `env`: the launcher's environment. `host`: this machine's name. `defaults`: the default settings of the installed
    torchrun.
    """
    known = plan.rendezvous.group_rank is not None and plan.rendezvous.limits.max_nodes > 1
    assumed = ", if every node has the same number of processes" if known else ""
    return "\n\n".join(
        [
            f"Nothing was started. This would run on {host}{assumed}:",
            _indented(_processes(plan, env, host)),
            f"Settings, and where each comes from:\n\n{_indented(_settings(plan, env))}",
            f"Rendezvous:\n\n{_indented(_rendezvous(plan, env))}",
            *_cluster(plan.rendezvous.place, env),
            *_environment(plan, env),
            *_memory(plan, env),
            f"The equivalent torchrun command{_differences(plan, defaults)}:\n\n  {_torchrun(plan, env, defaults)}",
        ]
    )


def _indented(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"  {line}" for line in aligned(rows))


# --- What runs --------------------------------------------------------------------------------------------------------


def _processes(plan: Plan, env: Mapping[str, str], host: str) -> list[list[str]]:
    workers = plan.workers or (WorkerResources(),)
    group_rank = plan.rendezvous.group_rank
    rows = [["rank", "host", "GPU", "cores", "program"]]
    for local_rank, worker in enumerate(workers):
        rank = f"first + {local_rank}"
        if group_rank == 0 or (group_rank and plan.workers):
            rank = str(group_rank * len(workers) + local_rank)
        if not plan.workers:
            rank += ", ..."
        gpus = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in worker.gpus) or "-"
        cores = ranges(sorted(worker.cpus)) or "any"
        if plan.numa_binding:
            cores = "set by --numa-binding"
        program = shlex.join(masked_words(plan.command_line(local_rank), {**env, **plan.env}))
        rows.append([rank, host, gpus, cores, program])
    return rows


# --- Settings ---------------------------------------------------------------------------------------------------------


def _settings(plan: Plan, env: Mapping[str, str]) -> list[list[str]]:
    """Rows of name, origin and value of the settings that are set, except those that the rendezvous is read from."""
    own = {flag.dest: getattr(plan.spec, flag.dest) for flag in OWN_FLAGS}
    settings = own | dict(plan.torchrun) | {"signals_to_handle": ",".join(plan.signals_to_handle) or "none"}
    settings["hang_timeout"] = _HANG_TIMEOUTS.get(plan.spec.hang_timeout, plan.spec.hang_timeout)
    if plan.torchrun_only:
        settings["hang_timeout"] = f"not watched: torchrun runs the job, for {plan.torchrun_only}"
    settings["log_dir"] = "not kept"
    if plan.logs.are_kept:
        settings["log_dir"] = f"a new folder in {plan.logs.log_dir or _TEMPORARY}"
    settings |= _imports(plan, env)
    return [
        [name, _origin_of(name, plan, env), masked(_value_text(name, value), env)]
        for name, value in settings.items()
        if not name.startswith(_READ_BY_RENDEZVOUS) and name not in _SHOWN_ELSEWHERE
        if value is not None and value is not False and value not in ("", "0", [])
    ]


def _imports(plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """The packages that are imported once for all processes, the package at which this ends, and the kept process."""
    unfit = imports.unfit(env)
    request = plan.imports(env, unfit)
    if request is None:
        return {}
    packages = [each.package for each in imports.statements(request)]
    texts = {"preload": f"once per node: {', '.join(dict.fromkeys(['torch', *packages]))}"}
    first = imports.left_out(request, unfit)
    if first:
        texts["preload"] += f"; in each process: {first}"
    if plan.spec.keep_warm is not None and sys.platform == "linux":
        kept = kept_client.state_of(request.program, request.packages)
        texts["keep_warm"] = f"{plan.spec.keep_warm:g} s; {kept}"
    return texts


def _rendezvous(plan: Plan, env: Mapping[str, str]) -> list[list[str]]:
    """Rows of name, origin and value of the fields of the rendezvous and its limits."""
    rendezvous = plan.rendezvous
    origin = rendezvous.endpoint_source or "default for a single node"
    values = {name: value for name, value in vars(rendezvous).items() if name not in _NO_SETTINGS}
    if not rendezvous.endpoint_source:
        values |= {"port": f"a free port, {AT_THE_START}", "run_id": AT_THE_START}
    if rendezvous.group_rank is None and rendezvous.node_rank is None:
        values["node_rank"] = AT_RENDEZVOUS
    rows = []
    for name, value in (values | vars(rendezvous.limits)).items():
        if name in ("host", "port"):
            rows.append([name, origin, str(value)])
        elif not name.endswith("_timeout"):
            setting = _SETTING_OF.get(name, name)
            rows.append([name, _origin_of(setting, plan, env), _value_text(setting, value)])
        elif rendezvous.limits.max_nodes > 1 and rendezvous.served_by_ddpkit:
            rows.append([name, _origin_of("rdzv_conf", plan, env), f"{value:g} s"])
    return [[name, source, masked(value, env)] for name, source, value in rows if value != "None"]


def _cluster(place: JobPlace | None, env: Mapping[str, str]) -> list[str]:
    """A table of the values of the cluster's environment variables, with the names of these variables."""
    if place is None:
        return []
    values = vars(place) | {"node rank": place.node_rank, "GPUs": place.gpus}
    if place.end_time is not None:
        values["end of the job"] = time.ctime(place.end_time)
    known = [name for name in place.sources if values.get(name) is not None]
    rows = [[name, place.sources[name], masked(str(values[name]), env)] for name in known]
    return [f"{place.environment}; command-line flags override these values:", *filter(None, [_indented(rows)])]


def _origin_of(setting: str, plan: Plan, env: Mapping[str, str]) -> str:
    """The flag, the variable or the cluster that set a setting."""
    if setting in plan.spec.flags:
        return f"--{setting.replace('_', '-')}"
    flag = _FLAGS.get(setting)
    if flag is not None and flag.has_variable:
        names = (flag.variable, FLAG_DEFAULT.format(name=setting.upper()), _TORCHRUN_VARIABLES.get(setting, ""))
        for name in names:
            if name in env:
                return name
    place = plan.spec.place
    if place is not None and setting in _FROM_CLUSTER and plan.rendezvous.endpoint_source:
        return place.environment
    if setting == "nproc_per_node":
        return plan.origin.get(VISIBLE_GPUS, "default")
    return "default"


def _value_text(setting: str, value: Any) -> str:
    flag = _FLAGS.get(setting)
    if flag is not None and flag.metavar == "SECONDS" and isinstance(value, int | float):
        return f"{value:g} s"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)


def _memory(plan: Plan, env: Mapping[str, str]) -> list[str]:
    """The command that estimates this job's memory. Running it here would run the script."""
    if plan.torchrun["module"] or plan.torchrun["no_python"]:
        return []
    nodes = plan.rendezvous.nodes or plan.rendezvous.limits.min_nodes
    words = ["--gpus", str(max(1, len(plan.workers)))]
    if nodes > 1:
        words += ["--nodes", str(nodes)]
    known = [gpu.memory_total for worker in plan.workers for gpu in worker.gpus if gpu.memory_total]
    size = f"{min(known) // MIB}MiB" if known else "80GiB"
    script = masked_words([plan.script, *plan.script_arguments], {**env, **plan.env})
    command = shlex.join(["ddpkit", "plan", *words, "--memory", size, *script])
    example = "" if known else " (80 GiB is an example)"
    return [f"To estimate the memory, run `{command}`{example}."]


# --- Environment ------------------------------------------------------------------------------------------------------


def _environment(plan: Plan, env: Mapping[str, str]) -> list[str]:
    """Three tables of variables: set by the launcher, from the user's environment, and different on each rank."""
    assignment = _assignment(plan)
    envs = [plan.environment(assignment, local_rank, env) for local_rank in range(max(1, len(plan.workers)))]
    known_later = _known_later(plan.rendezvous)
    origin = _origin(plan, env)
    differing = list(_RANKS)
    if plan.virtual_local_rank:
        differing.append(VISIBLE_GPUS)
    by_rank = [[known_later.get(name, env[name]) for name in differing] for env in envs]
    ours = []
    yours = []
    for name, value in sorted({**masked_env(envs[0]), **known_later}.items()):
        if name in differing:
            continue
        text = value if value.isprintable() else repr(value)
        if name in origin:
            ours.append([name, origin[name], text])
        else:
            yours.append([name, text])
    return [
        f"Variables that the launcher sets, with the same value on every rank:\n\n{_indented(ours)}",
        f"Variables from your environment:\n\n{_indented(yours)}",
        f"Variables that differ between the ranks:\n\n{_indented([differing, *by_rank])}",
    ]


def _assignment(plan: Plan) -> RankAssignment:
    """This node's rank assignment, assuming equally many processes on all nodes; unknown values get placeholders."""
    rendezvous = plan.rendezvous
    count = max(1, len(plan.workers))
    group_rank = rendezvous.group_rank or 0
    nodes = rendezvous.nodes or 1
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
    where = rendezvous.endpoint_source
    if not where:
        where = origin[RUN_ID] = "default for a single node"
    elif rendezvous.local_addr:
        where = "--local-addr"
    origin |= dict.fromkeys((MASTER_ADDR, MASTER_PORT), where)
    if NCCL_ERROR_HANDLING in env:
        del origin[NCCL_ERROR_HANDLING]
    if rendezvous.group_rank is not None and rendezvous.limits.max_nodes > 1:
        sources = {} if rendezvous.place is None else rendezvous.place.sources
        origin[GROUP_RANK] = sources.get("node rank", "--node-rank")
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
    text = ""
    if any(worker.cpus for worker in plan.workers):
        text = ", which does not bind processes to cores"
    for name in sorted(missing):
        text += f", which does not support --{name.replace('_', '-')} in this version"
    return text
