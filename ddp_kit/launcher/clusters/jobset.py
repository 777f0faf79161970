"""JobSet: an Indexed Job that is restarted as a whole. Source: JobSet 0.12, `jobset.x-k8s.io/v1alpha2`.

Its pods have the variables of an Indexed Job, which kubernetes.py reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_kit.launcher.clusters.kubernetes import JOBSET, job_spec, labels, manifest, node_count
from ddp_kit.launcher.clusters.request import Request

_NAME = {
    "name": JOBSET,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}},
}


def job_set(request: Request, env: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The specification of a JobSet, without its API version.

    `env`: variables of the container; `metadata`: metadata of the Job.
    """
    # The Job fails at the first pod failure that counts, because the JobSet counts the restarts.
    spec = {"backoffLimit": 0, **job_spec(request, env)}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": request.retries,
            "rules": [{"name": "ended", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {**metadata, "spec": spec}}],
    }


def job_file(request: Request) -> str:
    """A JobSet with one replicated job, `node`."""
    return manifest(
        request,
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": request.name, **labels(request)},
            "spec": job_set(request, [node_count(request), _NAME], {}),
        },
    )
