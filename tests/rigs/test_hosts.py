"""`ddpkit launch` on several hosts: what becomes of a job when processes, hosts, cables and clocks fail."""

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.hosts import Host, Tree, user_environment
from tests.support.launching import DDPKIT, PROGRAMS, seconds, wait_until

pytestmark = pytest.mark.slow

Hosts = Callable[..., list[Host]]
SILENCE = f"keep_alive_interval={seconds(1):g},keep_alive_max_attempt=3"
"""The launcher's own 3 s without a heartbeat, after which a host is lost, as this machine needs them."""
PLACE = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "h1:29400", "--rdzv-id", "j", "--rdzv-conf")
RENDEZVOUS = (*PLACE, f"{SILENCE},last_call_timeout={seconds(30):g},replacement_timeout={seconds(12):g}")
NO_WAIT = (*PLACE, f"{SILENCE},replacement_timeout={seconds(1):g}")
REPLACEMENT = f"{seconds(50):g}"
SECONDS = 60.0
"""How long to wait for what must come; benchmarks measure how soon it does."""
STEP_SECONDS = 0.05


@dataclass(frozen=True)
class Row:
    """One step, as one rank saw it."""

    attempt: int
    world_size: int
    step: int
    rank: int


@dataclass
class HostsJob:
    """The script on some hosts, watched through the lines that its ranks write.

    job = HostsJob(folder)
    job.start(h1, "--nnodes", "2"); job.start(h2, "--nnodes", "2")
    job.trains(h1, h2, world_size=4)
    job.stop()
    """

    folder: Path
    processes: int = 2
    """Per host."""
    script: str = "trains_until_stopped.py"
    """In tests/programs."""
    agents: dict[str, Tree] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "train.py").write_text((PROGRAMS / self.script).read_text())

    def start(self, host: Host, *flags: str, env: dict[str, str] | None = None) -> Tree:
        """Start this host's agent; the next one on the same host takes its place."""
        command = ("env", "-C", self.folder, DDPKIT, "launch", "--nproc-per-node", self.processes)
        self.agents[host.name] = host.start(
            *command, *flags, "train.py", STEP_SECONDS, seconds(60), env=user_environment(**(env or {}))
        )
        return self.agents[host.name]

    def rows(self, host: Host) -> list[list[Row]]:
        """What each rank of this host has written so far, line by line."""
        paths = [self.folder / f"{host.name}-{local_rank}.rows" for local_rank in range(self.processes)]
        texts = [path.read_text() if path.exists() else "" for path in paths]
        whole = [text[: text.rfind("\n") + 1].splitlines() for text in texts]
        return [[Row(*map(int, line.split())) for line in lines] for lines in whole]

    def trains(
        self, *hosts: Host, world_size: int, attempt: int | None = None, steps: int = 2, within: float = SECONDS
    ) -> list[Row]:
        """Wait until every rank of these hosts makes `steps` more steps in a world of this size; the last of each.

        With `attempt` only the steps of that one count.
        """
        skip = [[len(rows) for rows in self.rows(host)] for host in hosts]
        new: list[list[Row]] = []

        def enough() -> bool:
            ended = [host.name for host in hosts if self.agents[host.name].ended]
            new[:] = [
                [row for row in rows[seen:] if row.world_size == world_size and attempt in (None, row.attempt)]
                for host, counts in zip(hosts, skip, strict=True)
                for rows, seen in zip(self.rows(host), counts, strict=True)
            ]
            train = all(len(rows) >= steps for rows in new)
            assert train or not ended, f"agents have ended: {ended}"
            return train

        wait_until(enough, lambda: f"no world of {world_size} on all of them\n{self}", within)
        return [rows[-1] for rows in new]

    def fail(self, host: Host, code: int, local_rank: int = 0) -> int:
        """Have a rank exit with this code, or, below 0, end by this signal; its number."""
        rank = self.rows(host)[local_rank][-1].rank
        new = self.folder / "new.fault"
        new.write_text(str(code))
        new.rename(self.folder / f"{host.name}-{local_rank}.fault")  # read whole or not at all
        return rank

    def stop(self) -> None:
        """Have all ranks end after the same step, and expect that all is well."""
        (self.folder / "stop").touch()
        assert self.ends(*self.agents) == [0] * len(self.agents), str(self)

    def ends(self, *names: str) -> list[int]:
        """The exit codes of these hosts' agents, which have to end, and to leave no process behind."""
        wait_until(lambda: all(self.agents[name].ended for name in names), lambda: f"still there\n{self}", SECONDS)
        assert not any(left := [self.agents[name].left for name in names]), f"left behind: {left}"
        return [self.agents[name].wait(0) for name in names]

    def says(self, name: str, text: str) -> None:
        """Wait until this host's agent has said so."""
        wait_until(lambda: text in self.agents[name].output, lambda: f"it has not said {text!r}\n{self}", SECONDS)

    def verdicts(self, *names: str) -> set[str]:
        """The different last lines of these agents."""
        return {self.agents[name].last_line for name in names}

    def __str__(self) -> str:
        """What all hosts have said and done last, for whoever looks at a failed test."""
        paths = sorted(self.folder.glob("*.rows"))
        rows = [f"{path.stem}: {', '.join(path.read_text().splitlines()[-3:])}" for path in paths]
        said = [f"--- {name}\n{tree.output[-3000:]}" for name, tree in self.agents.items()]
        return "\n".join([*rows, *said])


@pytest.fixture
def job(tmp_path: Path) -> HostsJob:
    return HostsJob(tmp_path)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_hosts_train_as_one_world(hosts: Hosts, job: HostsJob, rendezvous: str) -> None:
    h1, h2 = hosts(2)
    static = ("--master-addr", "h1", "--master-port", "29500", "--node-rank")
    for number, host in enumerate((h1, h2)):
        place = RENDEZVOUS if rendezvous == "c10d" else (*static, str(number), "--rdzv-conf", SILENCE)
        job.start(host, "--nnodes", "2", *place)
    last = job.trains(h1, h2, world_size=4)
    assert sorted(row.rank for row in last) == [0, 1, 2, 3]
    if rendezvous == "static":
        assert [row.rank for row in last] == [0, 1, 2, 3], "ranks follow --node-rank"
    job.stop()


@pytest.mark.parametrize("how", ["processes killed", "power cut"])
def test_survivors_of_a_dead_host_continue_and_admit_its_replacement(hosts: Hosts, job: HostsJob, how: str) -> None:
    h1, h2 = hosts(2)
    for host in (h1, h2):
        job.start(host, "--nnodes", "1:2", *RENDEZVOUS)
    job.trains(h1, h2, world_size=4)
    if how == "power cut":
        h2.unplug()  # no connection is closed: nobody is told
    job.agents["h2"].die()
    job.trains(h1, world_size=2)
    h2.plug_in()
    job.start(h2, "--nnodes", "1:2", *RENDEZVOUS)
    job.trains(h1, h2, world_size=4)
    job.stop()


def test_job_that_needs_a_dead_host_waits_for_its_replacement(hosts: Hosts, job: HostsJob) -> None:
    h1, h2 = hosts(2)
    for host in (h1, h2):
        job.start(host, "--nnodes", "2", *PLACE, f"{SILENCE},replacement_timeout={REPLACEMENT}")
    job.trains(h1, h2, world_size=4)
    job.agents["h2"].die()
    job.says("h1", f"waiting {REPLACEMENT} s for a replacement")
    job.start(h2, "--nnodes", "2", *RENDEZVOUS)
    job.trains(h1, h2, world_size=4)
    job.stop()


@pytest.mark.parametrize("victim", ["h2", "h1"])
def test_job_that_needs_every_host_ends_when_one_dies(hosts: Hosts, job: HostsJob, victim: str) -> None:
    for host in (both := hosts(2)):
        job.start(host, "--nnodes", "2", *NO_WAIT)
    job.trains(*both, world_size=4)
    job.agents.pop(victim).die()
    assert job.ends(*job.agents) != [0], str(job)
    (verdict,) = job.verdicts(*job.agents)
    assert_blames(victim, verdict)


@pytest.mark.parametrize("victim", ["h3", "h1"])
def test_survivors_of_a_dead_host_end_with_one_verdict(hosts: Hosts, job: HostsJob, victim: str) -> None:
    job.processes = 1
    for host in (three := hosts(3)):
        job.start(host, "--nnodes", "3", *NO_WAIT)
    job.trains(*three, world_size=3)
    job.agents.pop(victim).die()
    codes = job.ends(*job.agents)
    assert codes[0] != 0, str(job)
    assert len(set(codes)) == 1, str(job)
    assert len(job.verdicts(*job.agents)) == 1, str(job)
    assert_blames(victim, job.verdicts(*job.agents).pop())


def assert_blames(host: str, verdict: str) -> None:
    """The line is the launcher's, and names this host by name or address: not a worker that was only its peer."""
    assert verdict.startswith("ddpkit: ")
    assert re.search(rf"\b(?:{host}|10\.77\.0\.1{host[1:]})\b", verdict), f"{verdict!r} does not name {host}"


def test_agents_exit_with_the_code_of_the_failed_worker_and_name_it(hosts: Hosts, job: HostsJob) -> None:
    h1, h2 = hosts(2)
    for host in (h1, h2):
        job.start(host, "--nnodes", "2", *RENDEZVOUS)
    job.trains(h1, h2, world_size=4)
    rank = job.fail(h2, 7)
    assert job.ends("h1", "h2") == [7, 7], str(job)
    (verdict,) = job.verdicts("h1", "h2")
    assert f"rank {rank} failed first: exit code 7" in verdict


def test_killed_worker_restarts_the_ranks_of_all_hosts(hosts: Hosts, job: HostsJob) -> None:
    h1, h2 = hosts(2)
    for host in (h1, h2):
        job.start(host, "--nnodes", "2", "--max-restarts", "1", *RENDEZVOUS)
    job.trains(h1, h2, world_size=4, attempt=0)
    job.fail(h2, -signal.SIGKILL, local_rank=1)
    job.trains(h1, h2, world_size=4, attempt=1)
    job.stop()


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_clocks_of_hosts_an_hour_apart_do_not_matter(
    hosts: Hosts, job: HostsJob, clock_off_by: Callable[[int], dict[str, str]], ahead: int
) -> None:
    h1, h2 = hosts(2)
    off = clock_off_by(ahead)
    date = h2.start("date", "+%s", env={"PATH": os.environ["PATH"]} | off)
    assert date.wait(20) == 0
    assert int(date.output) - time.time() == pytest.approx(ahead, abs=seconds(60)), "the rig's clock is not off"
    job.start(h1, "--nnodes", "1:2", *RENDEZVOUS)
    job.start(h2, "--nnodes", "1:2", *RENDEZVOUS, env=off)
    steps = round(seconds(10) / STEP_SECONDS)  # three times the silence of a dead one
    job.trains(h1, h2, world_size=4, steps=steps, within=120)
    worlds = {(row.attempt, row.world_size) for host in (h1, h2) for rows in job.rows(host) for row in rows}
    assert worlds == {(0, 4)}, "nobody was dropped on the way"
    job.stop()


def test_first_failure_is_determined_without_the_clocks(
    hosts: Hosts, job: HostsJob, clock_off_by: Callable[[int], dict[str, str]]
) -> None:
    h1, h2 = hosts(2)
    flags = ("--nnodes", "2", "--max-restarts", "1", *RENDEZVOUS)
    job.start(h1, *flags)
    job.start(h2, *flags, env=clock_off_by(3600))  # so h1's workers seem to have failed an hour earlier
    job.trains(h1, h2, world_size=4)
    job.fail(h2, 7)
    job.trains(h1, h2, world_size=4, attempt=1)
    rank = job.fail(h2, 7)
    assert job.ends("h1", "h2") == [7, 7], str(job)
    (verdict,) = job.verdicts("h1", "h2")
    assert f"rank {rank} failed first: exit code 7" in verdict


def test_host_that_is_cut_off_stops_itself_and_the_majority_continues(hosts: Hosts, job: HostsJob) -> None:
    job.processes = 1
    h1, h2, h3 = hosts(3)
    for host in (h1, h2, h3):
        job.start(host, "--nnodes", "2:3", *RENDEZVOUS)
    job.trains(h1, h2, h3, world_size=3)
    h3.unplug()
    job.trains(h1, h2, world_size=2)
    alone = job.agents["h3"]
    assert job.ends("h3") != [0], str(job)
    assert_blames("h1", alone.last_line)  # whom it cannot reach
    del job.agents["h3"]
    job.stop()


def test_slow_network_is_not_taken_for_a_dead_host(hosts: Hosts, tmp_path: Path) -> None:
    h1, h2 = hosts(2)
    job = HostsJob(tmp_path, processes=1, script="trains_on_hosts.py")
    for host in (h1, h2):
        job.start(host, "--nnodes", "2", *RENDEZVOUS)
    job.trains(h1, h2, world_size=2, steps=5)
    h2.slow_down("2mbit")  # the gradients of a step take some four seconds, and the agents' words wait behind them
    (tmp_path / "continue").touch()
    assert job.ends("h1", "h2") == [0, 0], str(job)
    for host in (h1, h2):
        (rows,) = job.rows(host)
        assert [(row.attempt, row.step) for row in rows] == [(0, step) for step in range(1, 9)]


def test_single_host_needs_no_resolvable_name(hosts: Hosts, job: HostsJob) -> None:
    (h1,) = hosts(1, resolves=False)
    lookup = h1.start("getent", "hosts", "h1", env={"PATH": os.environ["PATH"]})
    assert lookup.wait(20) != 0, "the rig's name resolves"
    job.start(h1)
    job.trains(h1, world_size=2)
    job.stop()


def test_rendezvous_host_that_does_not_resolve_is_named(hosts: Hosts, job: HostsJob) -> None:
    (h1,) = hosts(1, resolves=False)
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-id", "j", "--rdzv-endpoint", "nowhere:29400")
    agent = job.start(h1, "--nnodes", "2", *endpoint)
    assert job.ends("h1") == [3], str(job)
    assert "nowhere" in agent.output
    assert "hint: " in agent.output
    assert "Traceback" not in agent.output


def test_agent_asked_to_stop_leaves_and_the_other_continues(hosts: Hosts, job: HostsJob) -> None:
    h1, h2 = hosts(2)
    for host in (h1, h2):
        job.start(host, "--nnodes", "1:2", *RENDEZVOUS)
    job.trains(h1, h2, world_size=4)
    job.agents["h2"].send(signal.SIGTERM)
    assert job.ends("h2") == [128 + signal.SIGTERM], str(job)
    job.trains(h1, world_size=2)
    del job.agents["h2"]
    job.stop()
