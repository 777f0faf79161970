"""The task of `ddpkit submit --on skypilot`, carried out: nodes that come and go, and what becomes of the job."""

from collections.abc import Callable
from pathlib import Path

import cluster_training
import pytest
from hosts import Host, user_environment
from launching import seconds
from managed_job import ManagedJob

from ddp_kit.cli.submit import run as submit_job
from ddp_kit.terminal import Terminal

pytestmark = pytest.mark.slow


@pytest.fixture
def submit(
    hosts: Callable[..., list[Host]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ManagedJob]:
    """Submit a script with its arguments on two nodes."""
    monkeypatch.chdir(tmp_path)
    env = user_environment(HOME=str(tmp_path))
    nodes = hosts(2)

    def run(*words: str) -> ManagedJob:
        printed: list[str] = []
        flags = ["--on", "skypilot", "--nodes", "2", "--dry-run", "--nproc-per-node", "1"]
        submit_job([*flags, *words], Terminal({}, printed.append))
        job = ManagedJob(printed[0], nodes, tmp_path, env)
        job.start()
        return job

    return run


@pytest.mark.timeout(seconds(600))
def test_digits_with_lost_nodes_ends_as_on_one_machine(submit: Callable[..., ManagedJob], tmp_path: Path) -> None:
    cluster_training.write(tmp_path)
    job = submit("train.py", "saved")
    job.until(cluster_training.goes_on(tmp_path, "saved"))
    job.lose(1)
    job.until(cluster_training.goes_on(tmp_path, "saved"))
    job.lose(0)  # which hosts the rendezvous
    job.until(cluster_training.goes_on(tmp_path, "saved"))
    assert (job.recoveries, job.codes) == (2, []), "SkyPilot knew of both losses by itself"
    cut_off = job.host(0)
    cut_off.unplug()  # from the other node: SkyPilot still finds both
    job.until(lambda: bool(job.codes))
    cut_off.plug_in()
    cluster_training.hurry(tmp_path, "saved")
    assert job.run(), job
    assert (job.recoveries, len(job.codes)) == (3, 1), job
    assert 4 in job.codes[0], "the other node's, while SkyPilot stops this one"
    assert cluster_training.result(job.nodes[0].output) == cluster_training.on_one_machine(tmp_path, ranks=2)
    assert not cluster_training.repeated_too_often(tmp_path, "saved", losses=3)


def test_exit_codes_decide_whether_the_job_restarts(submit: Callable[..., ManagedJob], tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(cluster_training.EXITS)
    own = submit("--cold", "exits.py", "own", "75", "7")
    assert not own.run()
    assert (tmp_path / "own").read_text().split() == ["75", "7"], own
    assert [7 in codes for codes in own.codes] == [False, True], own
    assert (tmp_path / "uploads").read_text().split(), "what SkyPilot does after `run` is reached"
    killed = submit("--cold", "exits.py", "killed", "137")
    assert not killed.run()
    assert (tmp_path / "killed").read_text().split() == ["137"], killed
    assert 1 in killed.codes[0], "SkyPilot itself uses 137"
