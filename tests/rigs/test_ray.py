"""`ddpkit submit --on ray` on a Ray cluster of a head and four nodes, each on a host of its own."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import cluster_training
import pytest
from hosts import Host, Tree, missing, network

BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BIN / "ray").exists(), reason="Ray is not installed: pip install 'ray[default]'"),
]

SECONDS = 270.0
PORT, DASHBOARD = 6379, 8265


@dataclass
class Cluster:
    """A head without cores, and nodes with one core each: a job of three nodes has one to spare."""

    hosts: list[Host]
    folder: Path
    sockets: Path
    """A folder with a short name: the path of a socket has 107 letters at most."""
    env: dict[str, str]
    nodes: dict[str, Tree] = field(default_factory=dict)

    def start(self, host: Host, *words: str) -> None:
        flags = ("--node-ip-address", host.address, "--temp-dir", str(self.sockets / host.name))
        more = ("--block", "--disable-usage-stats", "--object-store-memory", "100000000")
        self.nodes[host.name] = host.start(BIN / "ray", "start", *words, *flags, *more, env=self.env)

    def start_node(self, host: Host) -> None:
        self.start(host, "--address", f"{self.hosts[0].address}:{PORT}", "--num-cpus", "1")

    def submit(self, *words: str) -> Tree:
        """Submit a job on three nodes, and show its output."""
        env = {**self.env, "RAY_ADDRESS": f"http://{self.hosts[0].address}:{DASHBOARD}"}
        command = (BIN / "ddpkit", "submit", "--on", "ray", "--cpus", "1", *words)
        return self.hosts[0].start("env", "-C", self.folder, *command, env=env)

    def on(self, word: str) -> list[str]:
        """The names of the hosts where a launcher with this word on its command line runs."""
        return [name for name, tree in self.nodes.items() if word in tree.commands()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := missing():
        pytest.skip(lacking)
    folder = tmp_path_factory.mktemp("ray")
    sockets = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    env = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_health_check_initial_delay_ms": "0",  # so that the loss of a node is noticed in seconds
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
    }
    with network(folder / "hosts", 5) as hosts:
        made = Cluster(hosts, folder, sockets, env)
        head, *others = hosts
        made.start(head, "--head", "--port", str(PORT), "--num-cpus", "0", "--dashboard-host", head.address)
        _wait(lambda: "Ray runtime started" in made.nodes[head.name].output, made.nodes[head.name])
        for host in others:
            made.start_node(host)
        _wait(lambda: all("runtime started" in tree.output for tree in made.nodes.values()), made.nodes[head.name])
        yield made
    shutil.rmtree(sockets, ignore_errors=True)


def _wait(enough: Callable[[], bool], tree: Tree) -> None:
    deadline = time.monotonic() + SECONDS
    while not enough():
        assert time.monotonic() < deadline, tree.output
        assert not tree.ended, tree.output
        time.sleep(0.05)


def test_exit_codes_decide_what_starts_again(cluster: Cluster) -> None:
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
        assert f"starting the job again, as it ended with {code}" in job.output
    assert "failed with exit code 137" in job.output


@pytest.mark.timeout(600)
def test_digits_loses_nodes_and_ends_as_on_one_machine(cluster: Cluster) -> None:
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
    _wait(lambda: "starting the job again, as it ended with 4" in job.output, job)
    cluster_training.hurry(folder, "saved")
    assert job.wait(SECONDS) == 0, job.output
    assert cluster_training.result(job.output) == cluster_training.on_one_machine(folder, ranks=3)
    assert not cluster_training.repeated_too_often(folder, "saved", losses=2)
