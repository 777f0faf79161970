"""JobSet: an Indexed Job that is restarted as a whole. Source: JobSet 0.12, `jobset.x-k8s.io/v1alpha2`.

The pods have the same environment variables as the pods of an Indexed Job, so `kubernetes.read` handles both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_kit.launcher.clusters.kubernetes import JOBSET, job_spec, labels, manifest, node_count
from ddp_kit.launcher.clusters.request import Request

_FINAL = ["PodFailurePolicy", "DeadlineExceeded"]  # otherwise, the JobSet would restart the job after its time limit
_NAME = {
    "name": JOBSET,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}},
}


def job_set(request: Request, env: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `spec` of a JobSet.

    `env`: environment variables of the container. `metadata`: {"metadata": {...}}, to add to the Job template, or {}.
    """
    # The Job fails at the first pod failure that counts, because the JobSet counts the restarts.
    spec = {"backoffLimit": 0, **job_spec(request, env)}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": request.retries,
            "rules": [{"name": "ended", "action": "FailJobSet", "onJobFailureReasons": _FINAL}],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {**metadata, "spec": spec}}],
    }


def job_file(request: Request) -> str:
    """The manifest of a JobSet with one replicated job, named `node`."""
    return manifest(
        request,
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": request.name, **labels(request)},
            "spec": job_set(request, [node_count(request), _NAME], {}),
        },
    )
