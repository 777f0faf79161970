"""Kubeflow Trainer: a TrainJob sets PET_ environment variables, which torchrun uses as defaults for its flags."""

from collections.abc import Mapping
from typing import Any

from ddp_kit.env import MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT, NODE_RANK_DEFAULT, NODES_DEFAULT
from ddp_kit.launcher.clusters.jobset import job_set
from ddp_kit.launcher.clusters.kubernetes import (
    PENDING_SECONDS,
    REPLACEMENT_SECONDS,
    command,
    labels,
    manifest,
    resources,
)
from ddp_kit.launcher.clusters.request import JobPlace, Request, check_rank, number

RUNTIME = "ddpkit"
_API = "trainer.kubeflow.org/v1alpha1"
_NAME = "a TrainJob of Kubeflow"


def read(env: Mapping[str, str]) -> JobPlace | None:
    """Return this pod's node rank and the job's rendezvous settings, or None outside of a TrainJob."""
    wanted = (NODES_DEFAULT, NODE_RANK_DEFAULT, MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT)
    if not all(env.get(name) for name in wanted):
        return None
    nodes = env[NODES_DEFAULT].split(":")[-1]
    return check_rank(
        JobPlace(
            environment=_NAME,
            nodes=number({NODES_DEFAULT: nodes}, NODES_DEFAULT, _NAME, 1),
            node_rank=number(env, NODE_RANK_DEFAULT, _NAME),
            host=env[MASTER_ADDR_DEFAULT],
            port=number(env, MASTER_PORT_DEFAULT, _NAME),
            run_id=env[MASTER_ADDR_DEFAULT].split(".")[0],
            sources={
                "nodes": NODES_DEFAULT,
                "node rank": NODE_RANK_DEFAULT,
                "host": MASTER_ADDR_DEFAULT,
                "port": MASTER_PORT_DEFAULT,
            },
            join=PENDING_SECONDS,
            replacement=REPLACEMENT_SECONDS,
            waits_for="`kubectl get pods` shows which pods are not running, and why",
        )
    )


def job_file(request: Request) -> str:
    """The manifest of a TrainJob. It uses the runtime `ddpkit`, which launch/kubeflow/runtime.yaml defines."""
    trainer: dict[str, Any] = {
        "image": request.image,
        "command": command(request),
        "numNodes": request.nodes,
    }
    if resources(request):
        trainer["resourcesPerNode"] = resources(request)
    return manifest(
        request,
        {
            "apiVersion": _API,
            "kind": "TrainJob",
            "metadata": {"name": request.name, **labels(request)},
            "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": trainer},
        },
    )


def runtime(request: Request) -> str:
    """The manifest of the ClusterTrainingRuntime that TrainJobs refer to.

    Each TrainJob overrides the runtime's image, command and number of nodes.
    """
    spec = job_set(request, [], {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}})
    return manifest(
        request,
        {
            "apiVersion": _API,
            "kind": "ClusterTrainingRuntime",
            # Kubeflow's SDK only lists runtimes with this label.
            "metadata": {"name": RUNTIME, "labels": {"trainer.kubeflow.org/framework": "torch"}},
            "spec": {
                "mlPolicy": {"numNodes": request.nodes, "torch": {}},
                "template": {"spec": spec},
            },
        },
    )
