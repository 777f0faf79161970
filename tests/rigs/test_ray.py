"""`ddpkit submit --on ray` on a Ray cluster of a head and four nodes, each on a host of its own."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import cluster_training
from tests.support.hosts import WITH_OWN_RUN, Host, Tree, missing, network, user_environment
from tests.support.launching import BIN, DDPKIT, PROGRAMS, seconds, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BIN / "ray").exists(), reason="Ray is not installed: pip install 'ray[default]'"),
]

SECONDS = 270.0
PORT, DASHBOARD = 6379, 8265  # of the host's own network
RAY = (sys.executable, PROGRAMS / "ray_that_waits.py", seconds(120))
STAYING = ("sh", "-c", '"$@" && exec sleep infinity', "sh")
"""In front of `ray start`, in place of its --block, which ends a node together with any of its processes: one that
nobody needs here, the server of Ray Client, gives up 30 s after its start, too."""


@dataclass
class Cluster:
    """A head without cores, and nodes with one core each: a job of three nodes has one to spare."""

    hosts: list[Host]
    folder: Path
    env: dict[str, str]
    nodes: dict[str, Tree] = field(default_factory=dict)

    def start(self, host: Host, *words: str) -> None:
        # The folder of its sessions goes with the node; and a short name, as the path of a socket has 107 letters.
        flags = ("--node-ip-address", host.address, "--temp-dir", "/run/ray")
        more = ("--disable-usage-stats", "--object-store-memory", "100000000")
        command = (*WITH_OWN_RUN, *STAYING, *RAY, "start", *words, *flags, *more)
        self.nodes[host.name] = host.start(*command, env=self.env)

    def start_node(self, host: Host) -> None:
        self.start(host, "--address", f"{self.hosts[0].address}:{PORT}", "--num-cpus", "1")

    def wait_until_started(self, host: Host) -> None:
        node = self.nodes[host.name]
        _wait(lambda: "Ray runtime started" in node.output, node)

    def submit(self, *words: str) -> Tree:
        """Submit a job on three nodes, and show its output."""
        env = {**self.env, "RAY_ADDRESS": f"http://{self.hosts[0].address}:{DASHBOARD}"}
        command = (DDPKIT, "submit", "--on", "ray", "--cpus", "1", *words)
        return self.hosts[0].start("env", "-C", self.folder, *command, env=env)

    def on(self, word: str) -> list[str]:
        """The names of the hosts where a launcher with this word on its command line runs."""
        return [name for name, tree in self.nodes.items() if word in tree.commands()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := missing():
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("ray")
    env = user_environment(HOME=str(folder)) | {
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{seconds(60):.0f}",
        "RAY_agent_register_timeout_ms": f"{seconds(100_000):.0f}",
        "RAY_worker_register_timeout_seconds": f"{seconds(60):.0f}",
        "RAY_health_check_initial_delay_ms": "0",  # so that the loss of a node is noticed in seconds
        "RAY_health_check_period_ms": f"{seconds(500):.0f}",
        "RAY_health_check_timeout_ms": f"{seconds(1000):.0f}",
    }
    with network(folder / "hosts", 5) as hosts:
        made = Cluster(hosts, folder, env)
        head, *others = hosts
        made.start(head, "--head", "--port", str(PORT), "--num-cpus", "0", "--dashboard-host", head.address)
        made.wait_until_started(head)
        for host in others:  # one by one, which takes no longer
            made.start_node(host)
            made.wait_until_started(host)
        yield made


def _wait(enough: Callable[[], bool], tree: Tree) -> None:
    def is_enough() -> bool:
        found = enough()
        assert found or not tree.ended, "it has ended"
        return found

    wait_until(is_enough, lambda: tree.output, SECONDS)


def test_exit_codes_decide_whether_the_job_restarts(cluster: Cluster) -> None:
    folder = cluster.folder
    (folder / "exits.py").write_text(cluster_training.EXITS)
    job = cluster.submit("--nodes", "2", "--cold", "exits.py", str(folder / "own"), "7")
    assert job.wait(SECONDS) != 0, job.output
    assert "rank 1 failed first: exit code 7" in job.output
    assert "failed with exit code 7" in job.output, "of the job"
    assert (folder / "own").read_text().split() == ["7"]
    codes = cluster_training.COUNTED
    job = cluster.submit("--nodes", "2", "--retries", "1", "--cold", "exits.py", str(folder / "attempts"), *codes)
    assert job.wait(SECONDS) != 0, job.output
    assert (folder / "attempts").read_text().split() == codes, job.output
    for code in codes[:-1]:
        assert f"restarting the job: it ended with exit code {code}" in job.output
    assert "failed with exit code 137" in job.output


@pytest.mark.timeout(seconds(600))
def test_digits_with_lost_nodes_ends_as_on_one_machine(cluster: Cluster) -> None:
    folder = cluster.folder
    cluster_training.write(folder)
    job = cluster.submit("--nodes", "3", "train.py", str(folder / "saved"))
    _wait(cluster_training.goes_on(folder, "saved"), job)
    (first,), (last,) = cluster.on("--node-rank 0"), cluster.on("--node-rank 2")
    cluster.nodes[last].die()
    _wait(lambda: "replace" in job.output, job)
    _wait(cluster_training.goes_on(folder, "saved"), job)
    assert cluster.on("--node-rank 0") == [first], "it runs on where it was"
    cluster.nodes[first].die()  # which hosts the rendezvous
    for host in cluster.hosts:
        if host.name in (first, last):
            cluster.start_node(host)
    _wait(lambda: "restarting the job: it ended with exit code 4" in job.output, job)
    cluster_training.hurry(folder, "saved")
    assert job.wait(SECONDS) == 0, job.output
    assert cluster_training.result(job.output) == cluster_training.on_one_machine(folder, ranks=3)
    assert not cluster_training.repeated_too_often(folder, "saved", losses=2)
