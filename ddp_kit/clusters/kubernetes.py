"""Kubernetes: an Indexed Job, which needs no operator."""

from collections.abc import Mapping

from ddp_kit.clusters.pods import PodEngine, job_spec, labels, manifest, node_count, pod_place
from ddp_kit.clusters.request import JobPlace, Request


class Kubernetes(PodEngine):
    """An Indexed Job, and a headless Service that gives the pods host names."""

    name = "kubernetes"
    help = "a Service and an Indexed Job for kubectl"
    examples = ("--nodes 4 --gpus 8 --image registry.example.com/me/train:1 train.py",)
    memory_setting = "resources.limits.memory"
    cpus_setting = "resources.limits.cpu"

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this pod's node rank and the job's rendezvous settings, or None outside of an Indexed Job.

        Also returns None if PET_NNODES is not set, because the pods of such a Job are independent of each other.
        """
        return pod_place(env, "an Indexed Job of Kubernetes")

    def text(self, request: Request) -> str:
        """The manifest of an Indexed Job, and of a headless Service that gives the pods host names."""
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": request.name},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": request.name},
            },
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": request.name, **labels(request)},
            "spec": {
                "backoffLimit": request.retries * request.nodes,  # when the job fails, every pod fails
                **job_spec(request, [node_count(request)], subdomain=request.name),
            },
        }
        return manifest(request, service, job)
