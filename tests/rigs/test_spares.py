"""Spares on several hosts: a lost host costs what was trained since the last copy, and the end is as without the loss.

Each host has memory of its own, and a disk that all of them share or one of its own.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hosts import Host, Tree, user_environment
from tests.support.launching import DDPKIT, PROGRAMS, seconds, wait_until

pytestmark = pytest.mark.slow

Hosts = Callable[..., list[Host]]
SECONDS = 90.0
SILENCE = f"keep_alive_interval={seconds(1):g},keep_alive_max_attempt=3"
RANKS_PER_HOST = 2
AS_ONE_MACHINE = ("sh", "-c", 'mount -t tmpfs none /dev/shm && mkdir -p "$1" "$2" && mount --bind "$1" "$2" && '
                  'shift 2 && exec "$@"', "sh")  # fmt: skip
"""In front of a command on a host, with two folders: shared memory of its own, and the first folder as the second."""


@dataclass
class SparedJob:
    """A job of two hosts and some spares, in the folder that their disks and notes are in."""

    folder: Path
    own_disks: bool
    losses: list[tuple[int, str]]
    host: str = "h1"
    """The host of the rendezvous."""
    trees: dict[str, Tree] = field(default_factory=dict)

    def start(self, *hosts: Host) -> None:
        endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.host}:29400", "--rdzv-id", "j")
        flags = ("--nnodes", 2, "--spares", 1, "--nproc-per-node", RANKS_PER_HOST, *endpoint, "--rdzv-conf", SILENCE)
        for host in hosts:
            disk = self.folder / "disks" / (host.name if self.own_disks else "shared")
            words = (self.folder / "run", self.folder, json.dumps(self.losses))
            command = (DDPKIT, "launch", *flags, PROGRAMS / "spared.py", *words)
            self.trees[host.name] = host.start(
                *AS_ONE_MACHINE, disk, self.folder / "run", *command, env=user_environment()
            )

    def lost(self, number: int) -> tuple[str, int]:
        """Wait for the loss with this number. Returns the host's name, and the step of its newest copy."""
        file = self.folder / "losses"
        wait_until(lambda: file.exists() and len(file.read_text().splitlines()) > number, self.said, SECONDS)
        name, step = file.read_text().splitlines()[number].split()
        return name, int(step)

    def lost_with_spare(self, spare: Host) -> tuple[str, int]:
        """As `lost`, for the first loss, once a spare waits."""
        lost = self.lost(0)
        self.start(spare)
        self.says(spare.name, "this node is a spare: it takes the place of a node that is lost")
        return lost

    def says(self, name: str, text: str) -> None:
        wait_until(lambda: text in self.trees[name].output, self.said, SECONDS)

    def ended(self) -> list[int]:
        """The exit codes of the launchers, which leave nothing behind."""
        codes = [tree.wait(SECONDS) for tree in self.trees.values()]
        assert not any(left := [tree.left for tree in self.trees.values()]), f"left behind: {left}"
        return codes

    @property
    def output(self) -> str:
        return "".join(tree.output for tree in self.trees.values())

    def resumed(self) -> list[int]:
        """The steps after which it has resumed from copies, in order."""
        return [int(step) for step in re.findall(r"resumed from the copy in memory after step (\d+)", self.output)]

    def said(self) -> str:
        return "\n".join(f"--- {name}\n{tree.output[-3000:]}" for name, tree in self.trees.items())


def ended_with(output: str) -> list[str]:
    return sorted(re.findall(r"ended \d .*", output))


UNDISTURBED: list[str] = []


@pytest.fixture
def undisturbed(tmp_path: Path, ddpkit: Any) -> list[str]:
    """What the four ranks end with on one machine."""
    if not UNDISTURBED:
        folder = tmp_path / "undisturbed"
        ended = ddpkit("launch", "--nproc-per-node", 4, PROGRAMS / "spared.py", folder, tmp_path, "[]")
        assert ended.returncode == 0, ended.stderr
        UNDISTURBED[:] = ended_with(ended.stdout)
    return UNDISTURBED


@pytest.mark.parametrize("how", ["killed", "cut off", "suspended"])
@pytest.mark.parametrize("own_disks", [False, True], ids=["shared disk", "own disks"])
def test_spare_takes_the_place_of_a_lost_host(
    hosts: Hosts, tmp_path: Path, undisturbed: list[str], own_disks: bool, how: str
) -> None:
    h1, h2, h3 = hosts(3)
    job = SparedJob(tmp_path, own_disks, [(1, "training")])
    job.start(h1, h2)
    name, newest = job.lost_with_spare(h3)
    assert name == "h2"
    lost = job.trees.pop("h2")
    suspended = psutil.Process(lost.process.pid).children(recursive=True) if how == "suspended" else []
    if how == "cut off":
        h2.unplug()
        assert lost.wait(SECONDS) != 0
    elif how == "killed":
        lost.die()
    for process in suspended:
        process.suspend()
    assert job.ended() == [0, 0], job.said()
    for process in suspended:
        process.resume()
    assert lost.wait(SECONDS) != 0
    assert ended_with(job.output) == undisturbed
    (resumed,) = job.resumed()
    assert resumed >= newest


def test_spares_take_the_places_of_hosts_that_are_lost_in_turn(
    hosts: Hosts, tmp_path: Path, undisturbed: list[str]
) -> None:
    h1, h2, h3, h4 = hosts(4)
    job = SparedJob(tmp_path, True, [(1, "training"), (1, "resume"), (1, "training")])
    job.start(h1, h2)
    newest = []
    for spare in (h3, h4, h2):  # the first host is back as a spare
        name, step = job.lost(len(newest))
        newest.append(step)
        lost = job.trees.pop(name)
        job.start(spare)
        job.says(spare.name, "this node is a spare")
        lost.die()
    assert job.ended() == [0, 0], job.said()
    assert ended_with(job.output) == undisturbed
    first, second = job.resumed()
    assert first >= newest[0], "the host that was lost in between had not loaded it"
    assert second >= newest[2]


def test_spares_that_are_lost_while_they_wait_or_are_not_used_are_not_missed(
    hosts: Hosts, tmp_path: Path, undisturbed: list[str]
) -> None:
    h1, h2, h3, h4 = hosts(4)
    job = SparedJob(tmp_path, False, [(0, "training")])
    job.start(h1, h2)
    job.lost(0)
    job.start(h3, h4)
    for name in ("h3", "h4"):
        job.says(name, "this node is a spare")
    job.trees.pop("h3").die()
    (tmp_path / "go").touch()
    assert job.ended() == [0, 0, 0], job.said()
    assert ended_with(job.output) == undisturbed
    assert job.resumed() == []


@pytest.mark.parametrize("own_disks", [False, True], ids=["shared disk", "own disks"])
def test_job_continues_from_the_last_copy_if_the_host_of_the_rendezvous_is_lost(
    hosts: Hosts, tmp_path: Path, undisturbed: list[str], own_disks: bool
) -> None:
    h1, h2, h3 = hosts(3)
    job = SparedJob(tmp_path, own_disks, [(0, "training")])
    job.start(h1, h2)
    name, newest = job.lost_with_spare(h3)
    assert name == "h1"
    job.trees.pop("h1").die()
    assert job.ended() == [4, 4], job.said()
    (saved,) = map(int, re.findall(r"the state after step (\d+) was saved to .*/run; the same", job.output))
    assert saved >= newest
    job.host = "h2"
    job.trees.clear()
    job.start(h2, h3)
    assert job.ended() == [0, 0], job.said()
    assert f"after step {saved}" in job.output
    assert ended_with(job.output) == undisturbed
