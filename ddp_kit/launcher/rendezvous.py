"""Rendezvous settings of a job, read from torchrun's flags: the endpoint, the node that hosts it, and limits."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil

from ddp_kit.clusters.engines import recognise
from ddp_kit.clusters.request import JobPlace, without_spares
from ddp_kit.errors import UsageError
from ddp_kit.launcher.job import Limits
from ddp_kit.launcher.spec import LaunchSpec, rendezvous_settings
from ddp_kit.masking import masked

# --- Process on a port ------------------------------------------------------------------------------------------------


def holder(port: int) -> str:
    """Text such as ` by pid N (COMMAND)` that names the process listening on a port; empty if it cannot be found."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.pid and connection.laddr and connection.laddr.port == port:
                command = masked(" ".join(psutil.Process(connection.pid).cmdline()[:6]))
                return f" by pid {connection.pid} ({command})"
    return ""


# --- Rendezvous settings ----------------------------------------------------------------------------------------------


C10D_PORT = 29400  # torch's default for the c10d rendezvous
STATIC_PORT = 29500  # torch's default for the static rendezvous
_LOOPBACK = "127.0.0.1"
_STATIC_TIMEOUT = 900.0
_TIMEOUTS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout")
_KEEP_ALIVE = ("keep_alive_interval", "keep_alive_max_attempt")
_REPLACEMENT = "replacement_timeout"  # a setting that only ddpkit has
_CONF_NUMBERS = ("timeout", *_TIMEOUTS, *_KEEP_ALIVE, _REPLACEMENT)
# Settings that torchrun rejects if they are not numbers, and settings that it rejects if they are not greater than 0.
# torchrun never reads other settings. Source (torch 2.13): dynamic_rendezvous.py, c10d_rendezvous_backend.py and
# static_tcp_rendezvous.py.
_NUMBERS_OF = {"c10d": (*_TIMEOUTS, *_KEEP_ALIVE, _REPLACEMENT), "static": ("timeout", _REPLACEMENT)}
_MAX_SECONDS = 1e9  # 30 years; system calls do not accept much larger values
_YES = ("1", "true", "t", "yes", "y")
_NO = ("0", "false", "f", "no", "n")


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous settings of a job."""

    backend: str
    served_by_ddpkit: bool
    """Whether ddpkit serves the rendezvous (static, or c10d with a TCP store); if not, torchrun runs the job."""
    run_id: str
    """The value of --rdzv-id."""
    host: str
    port: int | None
    """The port of the endpoint; None: not known, because ddpkit does not serve the rendezvous."""
    endpoint_source: str
    """The flags, or the variable of the cluster, that set the endpoint; empty: the launcher chose it."""
    limits: Limits
    node_rank: int | None = None
    """The value of --node-rank; None: any rank."""
    is_host: bool | None = None
    """Whether this node hosts the rendezvous; None: it does if `host` is an address of this machine."""
    local_addr: str | None = None
    """The value of --local-addr: the address at which other nodes reach this node."""
    place: JobPlace | None = None
    """This node's place in the job, if a cluster's variables set the number of nodes, the node rank or the endpoint."""

    @property
    def nodes(self) -> int | None:
        """The number of nodes if it is fixed, or None if it is between `min_nodes` and `max_nodes`."""
        if self.limits.min_nodes < self.limits.max_nodes:
            return None
        return self.limits.max_nodes

    @property
    def group_rank(self) -> int | None:
        """This node's group rank, or None if it is not known before the rendezvous."""
        if self.limits.max_nodes == 1:
            return 0
        if self.nodes is None or self.node_rank is None or self.node_rank >= self.nodes:  # else, it is a spare
            return None
        return self.node_rank

    @property
    def master_addr(self) -> str:
        """MASTER_ADDR, as far as it is known before the rendezvous."""
        if self.group_rank == 0 and self.local_addr:
            return self.local_addr
        return self.host


def read(torchrun: Mapping[str, Any], place: JobPlace | None = None) -> Rendezvous:
    """Read the rendezvous settings from torchrun's flags and `place`. Raises `UsageError` for invalid settings."""
    conf = rendezvous_settings(torchrun["rdzv_conf"])
    backend = torchrun["rdzv_backend"]
    static = backend == "static"
    served_by_ddpkit = static or (backend == "c10d" and conf.get("store_type", "tcp").lower() == "tcp")
    host, port, endpoint_source = _endpoint(torchrun, served_by_ddpkit)
    node_rank = None
    is_host = None
    if static:
        node_rank = torchrun["node_rank"]
        is_host = node_rank == 0
    elif served_by_ddpkit:
        value = conf.get("is_host", "").lower()
        if "is_host" in conf and value not in (*_YES, *_NO):
            raise UsageError(f"--rdzv-conf is_host={value} is neither yes nor no", "write is_host=1 or is_host=0")
        if value:
            is_host = value in _YES
    if place is not None and place.host == host and endpoint_source:
        endpoint_source = f"{place.sources.get('host', place.environment)} of {place.environment}"
    return Rendezvous(
        backend=backend,
        served_by_ddpkit=served_by_ddpkit,
        run_id=torchrun["rdzv_id"],
        host=host,
        port=port,
        endpoint_source=endpoint_source,
        limits=_limits(torchrun, conf, place),
        node_rank=node_rank,
        is_host=is_host,
        local_addr=torchrun["local_addr"],
        place=place,
    )


def single_node_settings(torchrun: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """The settings of a single-node job without an endpoint: a free port and a unique id, as in torchrun.

    The job's workers use the loopback address, so that the host name does not have to resolve. For other jobs, the
    result is empty.
    """
    named = torchrun["rdzv_backend"] != "static" or torchrun["rdzv_endpoint"] or torchrun["master_port"] is not None
    several_nodes = str(torchrun["nnodes"]).split(":")[-1] != "1"
    if not torchrun["standalone"] and (named or several_nodes):
        return {}
    return {
        "standalone": True,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "rdzv_id": run_id,
        "local_addr": torchrun["local_addr"] or _LOOPBACK,
    }


def overridden_flags(torchrun: Mapping[str, Any]) -> tuple[str, ...]:
    """A notice for each flag that another flag overrides; torchrun ignores overridden flags silently."""
    if torchrun["standalone"]:
        winner = "--standalone"
        losers = ["rdzv_endpoint", "master_port"]
    elif torchrun["rdzv_backend"] != "static":
        winner = f"--rdzv-backend {torchrun['rdzv_backend']}"
        losers = ["node_rank", "master_port"]
    elif torchrun["rdzv_endpoint"]:
        winner = "--rdzv-endpoint"
        losers = ["master_port"]
    else:
        return ()
    return tuple(
        f"{winner} overrides --{name.replace('_', '-')} {torchrun[name]}, which is ignored"
        for name in losers
        if torchrun[name]
    )


def ignored_settings(torchrun: Mapping[str, Any]) -> tuple[str, ...]:
    """A notice for each number in --rdzv-conf that has no effect, although torchrun accepts it."""
    if torchrun["rdzv_backend"] not in _NUMBERS_OF:
        return ()
    conf = rendezvous_settings(torchrun["rdzv_conf"])
    return tuple(
        f"--rdzv-conf {name}={conf[name]} is not a number greater than 0, and is ignored"
        for name in _CONF_NUMBERS
        if name in conf and not _is_usable(name, _number(conf[name]))
    )


def _endpoint(torchrun: Mapping[str, Any], served_by_ddpkit: bool) -> tuple[str, int | None, str]:
    """Host and port of the endpoint, and the flags that set it."""
    endpoint = torchrun["rdzv_endpoint"]
    if torchrun["standalone"]:
        return "localhost", 0, ""
    if not served_by_ddpkit:
        return endpoint, None, "--rdzv-endpoint"
    if torchrun["rdzv_backend"] == "c10d":
        host, port = _host_and_port(endpoint, C10D_PORT)
        return host, port, "--rdzv-endpoint" if endpoint else "torch's default"
    if not endpoint:
        port = STATIC_PORT if torchrun["master_port"] is None else torchrun["master_port"]
        return torchrun["master_addr"].strip("[]"), port, "--master-addr and --master-port"
    host, port = _host_and_port(endpoint)
    if port is None:
        raise UsageError(
            f"--rdzv-endpoint {endpoint} has no port, and the static rendezvous has no default port",
            f"use --rdzv-endpoint {endpoint}:{STATIC_PORT}, or --master-addr and --master-port",
        )
    return host, port, "--rdzv-endpoint"


def _host_and_port(endpoint: str, default_port: int | None = None) -> tuple[str, int | None]:
    """Split `host`, `host:port` or `[IPv6 address]:port` into host and port."""
    host, colon, port = endpoint.strip().rpartition(":")
    if not colon or port.endswith("]") or (host.count(":") and not host.startswith("[")):
        return endpoint.strip().strip("[]") or "localhost", default_port
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise UsageError(
            f"{endpoint!r} is not a valid endpoint: {port!r} is not a port number", "write it as HOST:PORT"
        )
    return host.strip("[]") or "localhost", int(port)


def _limits(torchrun: Mapping[str, Any], conf: Mapping[str, str], place: JobPlace | None) -> Limits:
    """Read the limits on nodes and restarts from torchrun's flags, and the timeouts from --rdzv-conf."""
    numbers = _numbers(conf, torchrun["rdzv_backend"])
    min_nodes, max_nodes = _nnodes(str(torchrun["nnodes"]))
    max_restarts = torchrun["max_restarts"]
    if max_restarts < 0:
        raise UsageError(f"--max-restarts {max_restarts} is less than 0", "use 0 to disable restarts")
    default = Limits(min_nodes, max_nodes, max_restarts)
    static = torchrun["rdzv_backend"] == "static"
    join = _STATIC_TIMEOUT if static else default.join_timeout
    heartbeat = default.heartbeat_timeout
    replacement = default.replacement_timeout
    if place is not None:
        join = place.join or join
        replacement = place.replacement or replacement
    if static:
        join = numbers.get("timeout", join)
    if "keep_alive_interval" in numbers or "keep_alive_max_attempt" in numbers:
        heartbeat = numbers.get("keep_alive_interval", 5.0) * numbers.get("keep_alive_max_attempt", 3.0)
    return Limits(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=max_restarts,
        join_timeout=numbers.get("join_timeout", join),
        last_call_timeout=numbers.get("last_call_timeout", default.last_call_timeout),
        heartbeat_timeout=heartbeat,
        replacement_timeout=numbers.get("replacement_timeout", replacement),
    )


def _nnodes(nnodes: str) -> tuple[int, int]:
    bounds = nnodes.split(":", 1)
    try:
        min_nodes = int(bounds[0])
        max_nodes = int(bounds[-1])
    except ValueError:
        raise UsageError(
            f"--nnodes {nnodes} is neither a number nor MIN:MAX", "for example: --nnodes 2, or --nnodes 2:4"
        ) from None
    if not 0 < min_nodes <= max_nodes:
        raise UsageError(
            f"--nnodes {nnodes}: MIN must be at least 1, and MAX must be at least MIN",
            "for example: --nnodes 2, or --nnodes 2:4",
        )
    return min_nodes, max_nodes


def _numbers(conf: Mapping[str, str], backend: str) -> dict[str, float]:
    """The usable numbers in --rdzv-conf. Raises `UsageError` for values that torchrun rejects.

    Unusable values that torchrun accepts are left out; `ignored_settings` reports them.
    """
    numbers = {}
    for name in filter(conf.__contains__, _CONF_NUMBERS):
        number = _number(conf[name])
        if _is_usable(name, number):
            numbers[name] = number
        elif name in _NUMBERS_OF.get(backend, ()) and (math.isnan(number) or name in (*_TIMEOUTS, _REPLACEMENT)):
            raise UsageError(
                f"--rdzv-conf {name}={conf[name]} is not a number greater than 0", f"for example: {name}=30"
            )
    return numbers


def _number(value: str) -> float:
    """The value as a number; NaN if it is not a number."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def _is_usable(name: str, number: float) -> bool:
    return 0 < number <= _MAX_SECONDS or (number == 0 and name == _REPLACEMENT)


# --- Cluster ----------------------------------------------------------------------------------------------------------


def complete_from_cluster(spec: LaunchSpec, env: Mapping[str, str]) -> LaunchSpec:
    """Complete the launch settings with this node's rank and the rendezvous settings from the cluster's variables.

    Values given by flags are kept. Returns `spec` unchanged outside of a cluster, and if the flags are complete or
    restrict the job to this machine. Raises `UsageError` if variables are missing or contradict each other.
    """
    if spec.torchrun["standalone"] or ("nnodes" in spec.flags and _is_one_node(spec.torchrun)):
        return spec
    if "nnodes" in spec.flags and spec.flags.keys() & {"rdzv_endpoint", "node_rank"}:
        return spec  # the command line is complete
    place = recognise(env)
    if place is None:
        return spec
    settings = dict(spec.torchrun)
    if "nnodes" not in spec.given:
        settings["nnodes"] = str(place.nodes)
    if "nnodes" not in spec.flags:
        settings["nnodes"] = _without_spares(str(settings["nnodes"]), spec.spares)
    if _is_one_node(settings) or {"rdzv_backend", "rdzv_endpoint"} & spec.given:
        if "node_rank" not in spec.given and not _is_one_node(settings):
            settings["node_rank"] = place.node_rank
        return spec._replace(torchrun=MappingProxyType(settings), place=place)
    if "rdzv_id" not in spec.given:
        settings["rdzv_id"] = place.run_id
    host = settings["master_addr"] if "master_addr" in spec.given else place.host
    port = settings["master_port"] if "master_port" in spec.given else place.port
    if ":" in str(settings["nnodes"]):  # any number of nodes, in any order
        is_host = f"is_host={int(place.node_rank == 0)}"
        conf = ",".join(filter(None, [settings["rdzv_conf"], is_host]))
        settings |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"{host}:{port}", "rdzv_conf": conf}
    else:
        settings |= {"rdzv_backend": "static", "rdzv_endpoint": "", "master_addr": host, "master_port": port}
        if "node_rank" not in spec.given:
            settings["node_rank"] = place.node_rank
    return spec._replace(torchrun=MappingProxyType(settings), place=place)


def _without_spares(nnodes: str, spares: int) -> str:
    """The value of --nnodes without the spares. `nnodes`: the nodes of a cluster's job, as a number or MIN:MAX."""
    if not spares:
        return nnodes
    min_nodes, max_nodes = _nnodes(nnodes)
    most = without_spares(max_nodes, spares)
    if ":" not in nnodes:
        return str(most)
    return f"{min(min_nodes, most)}:{most}"


def _is_one_node(settings: Mapping[str, Any]) -> bool:
    return str(settings["nnodes"]) in ("1", "1:1")
