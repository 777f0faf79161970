"""The list of all cluster environments and engines. Everything else about one of them is in its own file."""

from collections.abc import Mapping

from ddp_kit.clusters.aws_batch import AwsBatch
from ddp_kit.clusters.azure_ml import AzureML
from ddp_kit.clusters.engine import Engine, Environment
from ddp_kit.clusters.jobset import JobSet
from ddp_kit.clusters.kubeflow import Kubeflow
from ddp_kit.clusters.kubernetes import Kubernetes
from ddp_kit.clusters.mpi import Mpi
from ddp_kit.clusters.pytorch_job import PyTorchJob
from ddp_kit.clusters.ray import Ray
from ddp_kit.clusters.request import JobPlace
from ddp_kit.clusters.skypilot import SkyPilot
from ddp_kit.clusters.slurm import Slurm
from ddp_kit.clusters.ssh import Ssh

ENVIRONMENTS: tuple[Environment, ...] = (
    # In the order in which they are tried. Environments that start processes come before the environments that
    # allocate nodes: mpirun before Slurm; Kubeflow, SkyPilot and JobSet before Kubernetes.
    Kubeflow(),
    SkyPilot(),
    AzureML(),
    AwsBatch(),
    Mpi(),
    Slurm(),
    JobSet(),
    Kubernetes(),
    PyTorchJob(),
    Ray(),
    Ssh(),
)
ENGINES = dict(sorted((engine.name, engine) for engine in ENVIRONMENTS if isinstance(engine, Engine)))
"""The engines that `ddpkit submit --on` accepts, by name."""


def recognise(env: Mapping[str, str]) -> JobPlace | None:
    """Return this node's rank and the job's rendezvous settings, or None outside of all supported clusters.

    Raises `UsageError` if variables are missing or contradict each other.
    """
    places = (environment.recognise(env) for environment in ENVIRONMENTS)
    return next((place for place in places if place is not None), None)
