"""The manifests of `ddpkit submit`, carried out: pods that come and go, and what becomes of the job."""

from collections.abc import Callable
from pathlib import Path

import cluster_training
import pytest
from hosts import Host, user_environment
from kubelet import Kubelet
from launching import seconds

from ddp_kit.cli.submit import run as submit_job
from ddp_kit.terminal import Terminal

pytestmark = pytest.mark.slow

Hosts = Callable[..., list[Host]]
KINDS = ["kubernetes", "jobset", "kubeflow"]
GRACE = round(seconds(20))


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kubelet]:
    """Submit a script with its arguments on two nodes."""
    monkeypatch.chdir(tmp_path)

    def submit(*words: str, kind: str = "kubernetes", retries: int = 1) -> Kubelet:
        printed: list[str] = []
        flags = ["--on", kind, "--nodes", "2", "--image", "any"]
        if kind != "kubeflow":  # its runtime sets both
            flags += ["--grace", str(GRACE), "--retries", str(retries)]
        submit_job([*flags, "--dry-run", "--nproc-per-node", "1", *words], Terminal({}, printed.append))
        return Kubelet(printed[0], hosts(2), tmp_path, user_environment())

    return submit


@pytest.mark.timeout(seconds(600))
@pytest.mark.parametrize("kind", KINDS)
def test_digits_with_lost_nodes_ends_as_on_one_machine(
    kind: str, cluster: Callable[..., Kubelet], tmp_path: Path
) -> None:
    cluster_training.write(tmp_path)
    job = cluster("train.py", "saved", kind=kind)
    job.start()
    job.until(lambda: "does not resolve yet" in job.pods[1].output)
    job.resolve()
    job.until(cluster_training.goes_on(tmp_path, "saved"))
    grace = {"kubeflow": 120}.get(kind, GRACE)  # its runtime is made once for all jobs
    left = f"s, which fits into the {grace - 5} s between SIGTERM and SIGKILL"
    assert left in job.pods[0].output, "5 s of the grace are for the verdict"
    survivor = job.launcher(0)
    job.lose(1)
    job.until(lambda: "replace" in job.pods[0].output)  # it has noticed the loss
    job.until(cluster_training.goes_on(tmp_path, "saved"))
    assert job.launcher(0) == survivor, "its pod is still the same"
    codes = [137]
    if kind == "kubernetes":  # the others have the same rules for it
        job.evict(1)
        codes += [75, 75]
        job.until(lambda: job.codes == codes)
        job.until(cluster_training.goes_on(tmp_path, "saved"))
    job.lose(0)  # which hosts the rendezvous
    codes += [137, 4]
    job.until(lambda: job.codes == codes)
    assert "ddpkit: the job cannot continue: the host of the rendezvous" in job.said[-1]
    assert "Exception raised from" not in job.said[-1], "nor do torch's C++ stacks hide that line"
    cluster_training.hurry(tmp_path, "saved")
    assert job.run(), job
    assert job.codes == [*codes, 0, 0], job
    assert job.counted == 0
    assert cluster_training.result("".join(job.said[-2:])) == cluster_training.on_one_machine(tmp_path, ranks=2)
    assert not cluster_training.repeated_too_often(tmp_path, "saved", losses=2)


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes_decide_whether_the_job_restarts(kind: str, cluster: Callable[..., Kubelet], tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(cluster_training.EXITS)
    own = cluster("--cold", "exits.py", "own", "7", kind=kind)
    own.resolve()
    own.start()
    assert not own.run()
    assert (tmp_path / "own").read_text().split() == ["7"], own
    assert (set(own.codes), own.counted) == ({7}, 0), own
    codes = cluster_training.COUNTED
    codes += ["137", "137"] if kind == "kubeflow" else []  # its runtime has --retries 3
    counted = cluster("--cold", "exits.py", "attempts", *codes, kind=kind, retries=1)
    counted.resolve()
    counted.start()
    assert not counted.run()
    assert (tmp_path / "attempts").read_text().split() == codes, counted
    assert counted.codes[:2] == [75, 75], counted
