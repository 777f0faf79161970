"""Kubeflow Trainer: a TrainJob sets PET_ environment variables, which torchrun uses as defaults for its flags."""

from collections.abc import Mapping
from typing import Any

from ddp_kit.clusters.pods import (
    PENDING_SECONDS,
    REPLACEMENT_SECONDS,
    WAITS_FOR,
    PodEngine,
    container_command,
    job_set,
    labels,
    manifest,
    resources,
)
from ddp_kit.clusters.request import JobPlace, Request, number
from ddp_kit.env import MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT, NODE_RANK_DEFAULT, NODES_DEFAULT

_API = "trainer.kubeflow.org/v1alpha1"
_RUNTIME = "ddpkit"
_NAME = "a TrainJob of Kubeflow"


class Kubeflow(PodEngine):
    """A TrainJob. It uses the runtime `ddpkit`, which launch/kubeflow/runtime.yaml defines."""

    name = "kubeflow"
    help = "a TrainJob for kubectl"
    flags = frozenset({"cpus", "image", "queue"})  # the runtime fixes the time limit, retries and grace period

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this pod's node rank and the job's rendezvous settings, or None outside of a TrainJob."""
        wanted = (NODES_DEFAULT, NODE_RANK_DEFAULT, MASTER_ADDR_DEFAULT, MASTER_PORT_DEFAULT)
        if not all(env.get(name) for name in wanted):
            return None
        nodes = env[NODES_DEFAULT].split(":")[-1]
        return JobPlace(
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
            waits_for=WAITS_FOR,
        )

    def text(self, request: Request) -> str:
        """The manifest of a TrainJob. It uses the runtime `ddpkit`, which launch/kubeflow/runtime.yaml defines."""
        trainer: dict[str, Any] = {
            "image": request.image,
            "command": container_command(request),
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
                "spec": {"runtimeRef": {"name": _RUNTIME}, "trainer": trainer},
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
            "metadata": {"name": _RUNTIME, "labels": {"trainer.kubeflow.org/framework": "torch"}},
            "spec": {
                "mlPolicy": {"numNodes": request.nodes, "torch": {}},
                "template": {"spec": spec},
            },
        },
    )
