"""What the --rdzv flags mean: the endpoint, who hosts it, and the limits of the job."""

import math
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from ddp_kit.errors import UsageError
from ddp_kit.launcher.job import Limits

C10D_PORT = 29400  # torch's default for this rendezvous
STATIC_PORT = 29500  # and for the static one
_NUMBERS = (
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "replacement_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
)
_MAY_BE_ZERO = ("replacement_timeout",)
_MOST_SECONDS = 1e9  # 30 years; a time further away cannot be handed to the system
_YES = ("1", "true", "t", "yes", "y")
_NO = ("0", "false", "f", "no", "n")


def endpoint(config: LaunchConfig) -> tuple[str, int]:
    """Host and port. Raises `UsageError`."""
    if config.rdzv_backend != "static":
        return _host_and_port(config.rdzv_endpoint, C10D_PORT)
    host, port = _host_and_port(config.rdzv_endpoint, -1)
    if port < 0:
        raise UsageError(
            f"--rdzv-endpoint {config.rdzv_endpoint} has no port, and the static rendezvous has no default for it",
            f"type --rdzv-endpoint {config.rdzv_endpoint}:{STATIC_PORT}, or --master-addr and --master-port",
        )
    return host, port


def is_named_host(config: LaunchConfig) -> bool | None:
    """Whether --rdzv-conf is_host says that this node hosts the rendezvous; None where it says nothing."""
    words = str(config.rdzv_configs.get("is_host", "")).lower()
    if "is_host" in config.rdzv_configs and words not in (*_YES, *_NO):
        raise UsageError(f"--rdzv-conf is_host={words} is neither yes nor no", "write is_host=1 or is_host=0")
    return words in _YES if words else None


def limits(config: LaunchConfig) -> Limits:
    """How many nodes and restarts, and how long to wait: torch's own names in --rdzv-conf. Raises `UsageError`."""
    conf = {name: _number(name, config.rdzv_configs[name]) for name in _NUMBERS if name in config.rdzv_configs}
    named = "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf
    default = Limits(config.min_nodes, config.max_nodes, config.max_restarts)
    return Limits(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        join=conf.get("join_timeout", conf["timeout"] if config.rdzv_backend == "static" else default.join),
        last_call=conf.get("last_call_timeout", default.last_call),
        silence=conf.get("keep_alive_interval", 5.0) * conf.get("keep_alive_max_attempt", 3.0)
        if named
        else default.silence,
        replacement=conf.get("replacement_timeout", default.replacement),
    )


def _number(name: str, words: Any) -> float:
    try:
        found = float(words)
    except ValueError:
        found = math.nan
    if not (0 < found <= _MOST_SECONDS or (found == 0 and name in _MAY_BE_ZERO)):
        raise UsageError(f"--rdzv-conf {name}={words} is not a number above 0", f"write it as {name}=30")
    return found


def _host_and_port(words: str, default_port: int) -> tuple[str, int]:
    """Host and port of `host`, `host:port` or `[v6 address]:port`."""
    host, colon, port = words.strip().rpartition(":")
    if not colon or port.endswith("]") or (host.count(":") and not host.startswith("[")):
        return words.strip().strip("[]") or "localhost", default_port
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise UsageError(f"{words!r} is not an endpoint: {port!r} is not a port", "write it as HOST:PORT")
    return host.strip("[]") or "localhost", int(port)
