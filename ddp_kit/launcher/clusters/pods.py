"""What the manifests of Kubernetes, JobSet and Kubeflow have in common: containers, exit codes, YAML."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ddp_kit.env import GRACE, NODES_DEFAULT
from ddp_kit.launcher.clusters.request import AGAIN, COUNTED, SIGNALLED, Request

_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_CODES = 256
_EXPLAINED = """\
# Made by: {command}
# Exit codes: 75 (saved) and 4 (a node was lost) start pods again, uncounted, as does the loss of a pod; 3, 124 and
# those above 128 are counted; all others end the job, because ddpkit has restarted the workers already.
"""


def manifest(request: Request, *objects: Mapping[str, Any]) -> str:
    """The objects as YAML, after the command that made them."""
    texts = [yaml.safe_dump(each, sort_keys=False, default_flow_style=None, width=120) for each in objects]
    return _EXPLAINED.format(command=request.command) + "---\n".join(texts)


def labels(request: Request) -> dict[str, Any]:
    """Metadata: the label by which Kueue finds its queue."""
    return {"labels": {_KUEUE_QUEUE: request.queue}} if request.queue else {}


def container(request: Request, env: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The container that runs the launcher."""
    found: dict[str, Any] = {
        "name": request.name,
        "image": request.image,
        "command": list(request.launch),
        "env": [{"name": GRACE, "value": str(request.grace)}, *env],
    }
    if resources(request):
        found["resources"] = resources(request)
    # DataLoader workers and NCCL share memory there; the default of 64 MiB is soon too little.
    found["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    return found


def resources(request: Request) -> dict[str, Any]:
    """GPUs are limits, which are requests too; cores are requests alone, so that a pod may use what is free."""
    found: dict[str, Any] = {}
    if request.cpus_per_node is not None:
        found["requests"] = {"cpu": str(request.cpus_per_node)}
    if request.gpus is not None:
        found["limits"] = {"nvidia.com/gpu": str(request.gpus)}
    return found


def node_count(request: Request) -> dict[str, str]:
    """The variable that says how many pods there are: Kubernetes has none for it."""
    return {"name": NODES_DEFAULT, "value": str(request.nodes)}


def job_spec(request: Request, env: Sequence[Mapping[str, Any]] = (), **pod: Any) -> dict[str, Any]:
    """The specification of an Indexed Job; `pod`: further fields of its pods."""
    limit = {} if request.seconds is None else {"activeDeadlineSeconds": request.seconds}
    return {
        "completions": request.nodes,
        "parallelism": request.nodes,
        "completionMode": "Indexed",
        **limit,
        "podFailurePolicy": {"rules": _rules()},
        "template": {
            "spec": {
                **pod,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": request.grace,
                "containers": [container(request, env)],
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
            }
        },
    }


def _rules() -> list[dict[str, Any]]:
    """The first rule that matches decides."""

    def on_codes(action: str, operator: str, codes: Sequence[int]) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"operator": operator, "values": list(codes)}}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        on_codes("Ignore", "In", AGAIN),
        on_codes("Count", "In", [*COUNTED, *range(SIGNALLED, _CODES)]),
        on_codes("FailJob", "NotIn", [0]),
    ]
