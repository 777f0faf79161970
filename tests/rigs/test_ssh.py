"""`ddpkit submit --on ssh` from one host to two others, each with an sshd of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGINT, SIGKILL

import pytest

from tests.support import cluster_training
from tests.support.hosts import WITH_OWN_RUN, Host, Tree
from tests.support.launching import DDPKIT, seconds, wait_until

_missing = [name for name in ("sshd", "ssh", "ssh-keygen") if shutil.which(name, path="/usr/sbin:/usr/bin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing), reason=f"OpenSSH is not installed: no {', '.join(_missing)}"),
]

SECONDS = 240.0
SSHD = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
"""
CLIENT = """\
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
ConnectTimeout {connect}
"""


@dataclass
class Cluster:
    """A client, and hosts to which it has keys."""

    client: Host
    hosts: list[Host]
    folder: Path
    daemons: dict[str, Tree]
    env: dict[str, str]

    def serve(self, host: Host) -> None:
        """Start its sshd."""
        bare = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": self.env["HOME"]}  # nothing of the client's
        config = str(self.folder / "sshd_config")
        self.daemons[host.name] = host.start(*WITH_OWN_RUN, "/usr/sbin/sshd", "-D", "-e", "-f", config, env=bare)

    def submit(self, *words: str) -> Tree:
        """Start `ddpkit submit` on the client."""
        names = ",".join(host.name for host in self.hosts)
        command = (DDPKIT, "submit", "--on", "ssh", "--hosts", names, *words)
        return self.client.start("env", "-C", self.folder, *command, env=self.env)

    def top(self) -> str:
        """What `ddpkit top` prints on the client about the jobs on the hosts."""
        names = ",".join(host.name for host in self.hosts)
        asked = self.client.start(DDPKIT, "top", "--hosts", names, "--once", "--json", env=self.env)
        assert asked.wait(SECONDS) == 0, asked.output
        return asked.output

    def processes(self) -> str:
        """The command lines of what runs on the hosts."""
        return "\n".join(daemon.commands() for daemon in self.daemons.values())


@pytest.fixture
def cluster(hosts: Callable[..., list[Host]], tmp_path: Path) -> Cluster:
    client, *others = hosts(3)
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    key = (tmp_path / "host_key.pub").read_text()
    (tmp_path / "known_hosts").write_text("".join(f"{host.name} {key}" for host in others))
    (tmp_path / "sshd_config").write_text(SSHD.format(folder=tmp_path))
    (tmp_path / "ssh_config").write_text(CLIENT.format(folder=tmp_path, connect=round(seconds(5))))
    wrapper = tmp_path / "bin" / "ssh"  # ssh finds its configuration by the user's entry in passwd, not by HOME
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    env = {"PATH": f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "OMP_NUM_THREADS": "1"}
    cluster = Cluster(client, others, tmp_path, {}, env)
    for host in others:
        cluster.serve(host)
    _wait(lambda: all("listening" in daemon.output for daemon in cluster.daemons.values()))
    cluster_training.write(tmp_path)
    return cluster


def _wait(enough: Callable[[], bool], tree: Tree | None = None) -> None:
    wait_until(enough, lambda: tree and tree.output, SECONDS)


@pytest.mark.timeout(seconds(600))
def test_digits_with_lost_nodes_ends_as_on_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("--nodes", "2", "train.py", "saved")
    _wait(cluster_training.goes_on(tmp_path, "saved"), job)
    (reading,) = json.loads(cluster.top())
    assert [(rank["rank"], rank["step"] > 0) for rank in reading["ranks"]] == [(0, True), (1, True)]
    first, second = cluster.hosts  # the first hosts the rendezvous
    for host in (second, first):
        cluster.daemons[host.name].die()
        seen = f"restarting the job: {host.name} could not be reached"
        _wait(lambda seen=seen: seen in job.output, job)  # type: ignore[misc]
        cluster.serve(host)
        _wait(cluster_training.goes_on(tmp_path, "saved"), job)
    cluster_training.hurry(tmp_path, "saved")
    assert job.wait(SECONDS) == 0, job.output
    assert cluster_training.result(job.output) == cluster_training.on_one_machine(tmp_path, ranks=2)
    assert not cluster_training.repeated_too_often(tmp_path, "saved", losses=2)
    assert re.search(r"^h2: final loss", job.output, re.MULTILINE), "output carries the host's name"
    assert "ddpkit" not in cluster.processes()


def test_ssh_client_that_is_stopped_or_dies_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("train.py", "saved")
    _wait(cluster_training.goes_on(tmp_path, "saved"), job)
    job.send(SIGINT)
    assert job.wait(SECONDS) == 75, job.output
    assert job.output.count("ddpkit: the job saved a checkpoint; start it again") == 1
    assert "restarting the job" not in job.output
    assert "ddpkit" not in cluster.processes()
    job = cluster.submit("train.py", "saved")
    _wait(cluster_training.goes_on(tmp_path, "saved"), job)
    job.send(SIGKILL)
    _wait(lambda: "ddpkit" not in cluster.processes())
    steps = cluster_training.steps(tmp_path, "saved")
    assert len(steps) == steps[-1] < cluster_training.STEPS, "it has saved, both times"


def test_exit_codes_decide_whether_the_job_restarts(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(cluster_training.EXITS)
    job = cluster.submit("--cold", "exits.py", "own", "7")
    assert job.wait(SECONDS) == 7, job.output
    assert job.output.count("ddpkit: rank 1 failed first: exit code 7") == 1
    assert (tmp_path / "own").read_text().split() == ["7"]
    codes = cluster_training.COUNTED
    job = cluster.submit("--retries", "1", "--cold", "exits.py", "attempts", *codes)
    assert job.wait(SECONDS) == 137, job.output
    assert (tmp_path / "attempts").read_text().split() == codes, job.output
    for code in codes[:-1]:
        assert f"restarting the job: it ended with exit code {code}" in job.output


def test_ssh_hosts_that_do_not_answer_or_lack_ddpkit_are_named(cluster: Cluster) -> None:
    lost = cluster.hosts[1]
    cluster.daemons[lost.name].die()
    job = cluster.submit("--retries", "0", "train.py", "saved")
    assert job.wait(SECONDS) == 4, job.output
    assert f"ssh could not reach {lost.name}" in job.output
    cluster.serve(lost)
    _wait(lambda: "listening" in cluster.daemons[lost.name].output)
    words = ["submit", "--on", "ssh", "--hosts", "h2,h3", "train.py", "saved"]
    moved = "import sys; from ddp_kit.cli.main import main; sys.executable = '/nowhere/python'; "
    moved += f"sys.exit(main({words}))"
    job = cluster.client.start("env", "-C", cluster.folder, sys.executable, "-c", moved, env=cluster.env)
    assert job.wait(SECONDS) == 127, job.output
    assert re.search("there is no ddpkit on h[23]", job.output)  # of the first that answers
