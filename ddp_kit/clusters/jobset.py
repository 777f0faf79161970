"""JobSet: an Indexed Job that is restarted as a whole. Source: JobSet 0.12, `jobset.x-k8s.io/v1alpha2`."""

from collections.abc import Mapping

from ddp_kit.clusters.pods import PodEngine, job_set, labels, manifest, node_count, pod_place
from ddp_kit.clusters.request import JobPlace, Request

_NAME = "JOBSET_NAME"
"""Name of the JobSet; the manifest sets it from a label."""
_LABEL = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"


class JobSet(PodEngine):
    """A JobSet with one replicated job, named `node`."""

    name = "jobset"
    help = "a JobSet for kubectl"

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this pod's node rank and the job's rendezvous settings, or None outside of a JobSet."""
        if not env.get(_NAME):
            return None
        return pod_place(env, "a JobSet of Kubernetes", _NAME)  # a pod is <jobset>-<replicated job>-<job>-<pod>

    def text(self, request: Request) -> str:
        """The manifest of a JobSet with one replicated job, named `node`."""
        name = {"name": _NAME, "valueFrom": {"fieldRef": {"fieldPath": _LABEL}}}
        return manifest(
            request,
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": {"name": request.name, **labels(request)},
                "spec": job_set(request, [node_count(request), name], {}),
            },
        )
