"""Several hosts on this machine, made of namespaces: a network, a host name and processes of its own for each.

    with network(folder, 2) as (h1, h2):
        tree = h1.start("ddpkit", "launch", ..., env=env)
        tree.die()     # everything that runs there, at once: the kernel still closes its connections
        h2.unplug()    # or not even that

The hosts are h1, h2, ... at 10.77.0.11, .12, ..., joined by a switch. They share the file system, so that one
folder shows what all of them do. No namespace has a name and every process is tied to the one that made the rig:
rigs of several test runs do not meet, and nothing outlasts the test run, killed or not. Times are those of a quiet
machine: see launching.py.
"""

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.launching import BIN, seconds

_PROGRAMS = ("ip", "tc", "nsenter", "unshare", "setpriv", "bash")
TIED = ("setpriv", "--pdeathsig", "KILL")
"""In front of a command: it is killed as soon as the process that starts it has ended."""
OWN_PROCESSES = ("unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
ALONE = (*TIED, *OWN_PROCESSES)
"""In front of a command: what it mounts is its own, and all that comes of it ends with it, and with its starter."""
WITH_OWN_RUN = ("sh", "-c", 'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$@"', "sh")
"""In front of a command on a host: /run is its own, is empty but for what sshd needs, and goes with it."""
# Its arguments: hosts file, resolver file, file for what is left, tenths of a second that this has to end, host name,
# command. Runs as the first process of the host, which adopts what others leave.
_INIT = """\
mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/resolv.conf && echo "$5" >/proc/sys/kernel/hostname || exit 125
file=$3
tries=$4
shift 5
"$@"
code=$?
while [ "$((tries -= 1))" -ge 0 ]; do
  left=
  for each in /proc/[0-9]*; do
    [ "$each" = /proc/1 ] || { read -r name && left="$left $name"; } <"$each/comm"
  done
  [ -z "$left" ] && break
  sleep 0.1
done 2>/dev/null
echo "$left" >"$file"
exit $code
"""


def missing() -> str:
    """Why there can be no hosts here; empty where there can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"hosts are made with programs that are not installed: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    attempt = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return f"no namespaces can be made here: {attempt.stderr.strip()}" if attempt.returncode else ""


@dataclass(frozen=True)
class Tree:
    """A command on a host, and all that came of it; what it says, on both outputs, goes to one file."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def die(self) -> None:
        """End all its processes at once, as when the host goes down."""
        self.process.kill()
        self.process.wait()

    @property
    def command(self) -> psutil.Process:
        """The command itself, not what it has started."""
        (first,) = psutil.Process(self.process.pid).children()
        (command,) = first.children()
        return command

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command alone."""
        self.command.send_signal(number)

    def wait(self, within: float) -> int:
        """The exit code of the command. Raises `TimeoutExpired` if it takes longer."""
        return self.process.wait(timeout=seconds(within))

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def commands(self) -> str:
        """The command lines of its processes, one per line."""
        lines = []
        for process in psutil.Process(self.process.pid).children(recursive=True) if not self.ended else ():
            with suppress(psutil.NoSuchProcess):
                lines.append(" ".join(process.cmdline()))
        return "\n".join(lines)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def left(self) -> str:
        """The names of the processes that were still there a second of a quiet machine after the command had ended."""
        return self.log.with_suffix(".left").read_text().strip()

    @property
    def last_line(self) -> str:
        return ([line for line in self.output.splitlines() if line.strip()] or [""])[-1]


@dataclass(frozen=True)
class Host:
    """A host that is up; what is started on it ends with the network."""

    name: str
    address: str
    folder: Path
    stack: ExitStack = field(repr=False)
    keeper: int
    """The process that holds its network."""
    switch: int
    """The process that holds the network between the hosts."""
    numbers: "itertools.count[int]" = field(default_factory=itertools.count, repr=False)

    def start(self, *command: object, env: Mapping[str, str]) -> Tree:
        log = self.folder / f"{self.name}-{next(self.numbers)}.log"
        # This process's death is unshare's, which is the first process's, which is that of the whole tree.
        files = [str(self.folder / "hosts"), str(self.folder / "resolv.conf"), str(log.with_suffix(".left"))]
        init = ["bash", "-c", _INIT, "init", *files, str(round(10 * seconds(1))), self.name]
        enter = ["nsenter", f"--net=/proc/{self.keeper}/ns/net"]
        words = [*TIED, *enter, *OWN_PROCESSES, "--uts", *init, *map(str, command)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        tree = Tree(process, log)
        self.stack.callback(tree.die)
        return tree

    def unplug(self) -> None:
        """Pull its cable: nothing arrives and nothing is answered, and nobody is told."""
        _ip(self.switch, "link", "set", self.name, "down")

    def plug_in(self) -> None:
        _ip(self.switch, "link", "set", self.name, "up")

    def slow_down(self, rate: str) -> None:
        """From now on it sends at `rate`, such as 2mbit; what does not fit waits for a second at most."""
        limit = ("tbf", "rate", rate, "burst", "32kbit", "latency", "1s")
        run_command("nsenter", f"--net=/proc/{self.keeper}/ns/net", "tc", "qdisc", "add", "dev", "eth0", "root", *limit)


@contextmanager
def network(folder: Path, count: int, *, resolves: bool = True) -> Iterator[list[Host]]:
    """`count` hosts whose logs go to `folder`; with `resolves` each finds the address of every name in its hosts file.

    A host that does not find even its own name is common: a container, a laptop, a fresh cloud machine.
    """
    addresses = {f"h{number}": f"10.77.0.{10 + number}" for number in range(1, count + 1)}
    folder.mkdir(parents=True, exist_ok=True)
    known = {"localhost": "127.0.0.1"} | (addresses if resolves else {})
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # where nobody answers, and says so at once
    with ExitStack() as stack:  # undone from the last to the first
        switch = _namespace(stack)
        _ip(switch, "link", "set", "lo", "up")
        _ip(switch, "link", "add", "switch", "type", "bridge")
        _ip(switch, "link", "set", "switch", "up")
        hosts = []
        for name, address in addresses.items():
            keeper = _namespace(stack)
            _ip(switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(keeper))
            _ip(switch, "link", "set", name, "master", "switch", "up")
            _ip(keeper, "link", "set", "lo", "up")
            _ip(keeper, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip(keeper, "link", "set", "eth0", "up")
            hosts.append(Host(name, address, folder, stack, keeper, switch))
        yield hosts


def user_environment(**more: str) -> dict[str, str]:
    """The environment of a user on a host: ddpkit is in PATH, and a program has one thread, as hosts share cores."""
    given = {name: os.environ[name] for name in ("PYTHONPATH", "HOME", "LANG") if name in os.environ}
    return given | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"} | more


def _namespace(stack: ExitStack) -> int:
    """A process in a network namespace of its own, which ends when its input does: with this process at the latest."""
    process = subprocess.Popen(
        [*TIED, "unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    stack.enter_context(process.stdout)
    stack.enter_context(process.stdin)
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"\n", "unshare --net failed"  # the answer comes from the namespace
    return process.pid


def _ip(namespace: int, *words: str) -> None:
    run_command("nsenter", f"--net=/proc/{namespace}/ns/net", "ip", *words)


def run_command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(20))
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
