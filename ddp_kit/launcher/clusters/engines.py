"""The engines (Slurm, Kubernetes, Ray, ...) that `ddpkit submit --on` accepts."""

from collections.abc import Callable
from dataclasses import dataclass

from ddp_kit.launcher.clusters import jobset, kubeflow, kubernetes, ray, skypilot, slurm, ssh
from ddp_kit.launcher.clusters.request import Request


@dataclass(frozen=True)
class Engine:
    """A system that runs jobs on a cluster, and what `ddpkit submit` needs to submit a job to it."""

    job_file: Callable[[Request], str]
    """A pure function that turns a `Request` into the text of a job file."""
    submission: Callable[[Request, str], tuple[str, ...]]
    """A function that takes the path of a job file and returns the command to submit it, such as `sbatch PATH`."""
    flags: frozenset[str]
    """The flags of `ddpkit submit` that the engine supports, in addition to --nodes, --gpus and --name."""
    suffix: str
    """File name suffix of the job file."""
    install: str
    """Hint to show if the program that submits the job is not installed."""
    script_needed: bool = True
    """Whether a job needs a training script on the command line of `ddpkit submit`."""
    image_needed: bool = False
    run: Callable[[Request, Callable[[str], None]], int] | None = None
    """A function that runs the job and returns its exit code. If None, the command from `submission` is run instead."""


_OF_PODS = frozenset({"cpus", "image", "queue", "retries", "grace"})
_KUBECTL = "install kubectl, and configure it for your cluster"

ENGINES = {
    "slurm": Engine(
        slurm.job_file,
        slurm.submission,
        frozenset({"cpus", "time", "image", "queue", "array", "requeue", "retries", "gpu_type"}),
        ".sbatch",
        "log in to a host of the cluster that has sbatch",
        script_needed=False,
    ),
    "kubernetes": Engine(
        kubernetes.job_file, kubernetes.submission, _OF_PODS | {"time"}, ".yaml", _KUBECTL, image_needed=True
    ),
    "jobset": Engine(jobset.job_file, kubernetes.submission, _OF_PODS | {"time"}, ".yaml", _KUBECTL, image_needed=True),
    "kubeflow": Engine(
        kubeflow.job_file,
        kubernetes.submission,
        _OF_PODS - {"retries", "grace"},  # fixed by the runtime, launch/kubeflow/runtime.yaml
        ".yaml",
        _KUBECTL,
        image_needed=True,
    ),
    "skypilot": Engine(
        skypilot.job_file,
        skypilot.submission,
        frozenset({"cpus", "image", "gpu_type"}),
        ".yaml",
        "install SkyPilot with support for your cloud, such as pip install skypilot[kubernetes]",
    ),
    "ray": Engine(
        ray.job_file,
        lambda request, _: ray.command(request),
        frozenset({"cpus", "retries"}),
        ".sh",
        "install Ray (pip install ray[default]), and set RAY_ADDRESS to the address of your cluster",
    ),
    "ssh": Engine(
        ssh.job_file,
        lambda *_: ("ssh",),
        frozenset({"hosts", "retries"}),
        ".sh",
        "install OpenSSH's client (the package openssh-client)",
        run=lambda request, write: ssh.run(ssh.commands(request), request.retries, write),
    ),
}
