"""Checks of Python, the clock, the network and the checkpoint folder."""

import os
import shlex
import socket
import tempfile
from collections.abc import Sequence

from ddp_kit.launcher.doctor.machine import Machine
from ddp_kit.launcher.doctor.result import CheckResult, fail, ok, warn
from ddp_kit.launcher.ports import holder
from ddp_kit.sizes import GIB, size_text

_OLDEST_PYTHON = (3, 11)
_ANOTHER_FOLDER = "ddpkit doctor --dir DIR  # use another folder"
_MIN_FREE_DISK = 5 * GIB
_TORCH_PORTS = (29400, 29500)
_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 5


def python(machine: Machine) -> CheckResult:
    """The interpreter's version."""
    found = f"Python {'.'.join(map(str, machine.python))}"
    if machine.python < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return fail("python", f"{found} is older than {oldest}", f"python{oldest} -m venv .venv")
    return ok("python", found)


def clock(machine: Machine) -> CheckResult:
    """Whether the clock is synchronised: certificates and logs of several nodes depend on it."""
    if machine.clock_synchronised is None:
        return ok("clock", "clock: unknown whether it is synchronised")
    if not machine.clock_synchronised:
        return warn("clock", "clock: not synchronised", "sudo timedatectl set-ntp true")
    return ok("clock", "clock: synchronised")


def host_name(machine: Machine) -> CheckResult:
    """Whether the host name resolves to this machine: gloo and other nodes use it."""
    name, result = machine.host, machine.probes.host()
    fix = f'echo "127.0.1.1 {name}" >> /etc/hosts'
    if result.error:
        return warn("host name", f"host name {name!r} does not resolve: {result.error}", fix)
    addresses = ", ".join(result.facts["addresses"])
    if not result.facts["own"]:
        found = f"host name {name!r} resolves to {addresses}, which is not this machine"
        return warn("host name", found, f"getent hosts {name}  # then correct it in /etc/hosts or in the DNS")
    return ok("host name", f"host name {name!r} resolves to {addresses}")


def loopback(_machine: Machine) -> CheckResult:
    """Whether processes of this machine can connect to each other over TCP."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            server.settimeout(_TIMEOUT_SECONDS)
            with socket.create_connection(server.getsockname(), _TIMEOUT_SECONDS):
                server.accept()[0].close()
    except OSError as error:
        return fail("loopback", f"{_LOOPBACK} does not work: {error}", "sudo ip link set lo up")
    return ok("loopback", f"loopback: {_LOOPBACK} works")


def ports(_machine: Machine, wanted: Sequence[int] = _TORCH_PORTS) -> CheckResult:
    """Whether torch's default ports are free, which the nodes of a job use to meet."""
    taken = [port for port in wanted if not _is_free(port)]
    if taken:
        found = "; ".join(f"port {port} is in use{holder(port)}" for port in taken)
        return warn("ports", found, f"ddpkit launch --master-port {max(wanted) + 1} ...  # or end that process")
    return ok("ports", f"ports {' and '.join(map(str, wanted))} are free")


def checkpoints(machine: Machine) -> CheckResult:
    """Whether the checkpoint folder is writable, and its free space."""
    folder = machine.checkpoints
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        _, free = machine.space(folder)
    except OSError as error:
        fix = _ANOTHER_FOLDER
        if isinstance(error, PermissionError) or not folder.exists():
            fix = f"{'sudo chown $USER' if folder.exists() else 'mkdir -p'} {shlex.quote(str(folder))}"
        return fail("checkpoint folder", f"checkpoint folder {folder} cannot be written to: {error.strerror}", fix)
    found = f"checkpoint folder {folder}: {size_text(free)} free"
    if free < _MIN_FREE_DISK:
        return warn("checkpoint folder", found, f"{_ANOTHER_FOLDER}; or free some space")
    return ok("checkpoint folder", found)


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that has just been closed is free
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
