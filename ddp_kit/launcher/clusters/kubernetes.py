"""What the manifests of Kubernetes, JobSet and Kubeflow have in common: containers, exit codes, YAML."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ddp_kit.env import GRACE, MASTER_ADDR, NODES_DEFAULT
from ddp_kit.errors import UsageError
from ddp_kit.launcher.clusters.request import AGAIN, COUNTED, PORT, SIGNALLED, JobPlace, Request, check_rank, number

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


# --- Kubernetes: an Indexed Job, or one in a JobSet; both number their pods by JOB_COMPLETION_INDEX -------------------
# Kubernetes says neither how many pods there are nor the name of the first. The manifests of `ddpkit submit` set
# PET_NNODES, and a headless service with the job's name makes pod 0 known as `<job>-0.<job>`. For other manifests
# MASTER_ADDR is the name of pod 0.
# Source: Kubernetes documentation, "Indexed Job" and "Job with Pod-to-Pod Communication"; JobSet 0.12.


_INDEX = "JOB_COMPLETION_INDEX"
_POD = "HOSTNAME"
_REPLACEMENT_SECONDS = 300.0
"""For a pod that the Job creates in place of a lost one: to notice, schedule, pull and start."""
JOBSET = "JOBSET_NAME"
"""Set by the manifest, from the label of the same meaning."""


def read(env: Mapping[str, str]) -> JobPlace | None:
    """This pod's place; None outside of an Indexed Job, and in one without PET_NNODES, as one of independent pods."""
    if _INDEX not in env or NODES_DEFAULT not in env:
        return None
    name = "a JobSet of Kubernetes" if JOBSET in env else "an Indexed Job of Kubernetes"
    nodes, rank = env[NODES_DEFAULT].split(":")[-1], number(env, _INDEX, name)
    if not nodes.isdecimal():
        raise UsageError(f"{NODES_DEFAULT}={env[NODES_DEFAULT]} is neither a number nor MIN:MAX", "set it to 2 or 2:4")
    host, source = _host(env, name, rank)
    return check_rank(
        JobPlace(
            environment=name,
            nodes=int(nodes),
            node_rank=rank,
            host=host,
            port=PORT,
            run_id=env.get(JOBSET) or host.split(".")[0],
            sources={"nodes": NODES_DEFAULT, "node rank": _INDEX, "host": source},
            replacement=_REPLACEMENT_SECONDS,
            waits_for="`kubectl get pods` says which pods are not running, and why",
        )
    )


def _host(env: Mapping[str, str], name: str, rank: int) -> tuple[str, str]:
    """The name of pod 0, and the variable it comes from."""
    if env.get(MASTER_ADDR):
        return env[MASTER_ADDR], MASTER_ADDR
    found = re.fullmatch(rf"(.+)-{rank}", env.get(_POD, ""))
    if found is None:
        raise UsageError(
            f"this looks like {name}, but {_POD}={env.get(_POD, '')!r} does not end in -{rank}, the pod's index, so "
            "the name of pod 0 is not known",
            f"set {MASTER_ADDR} to it in the manifest",
        )
    if JOBSET in env:  # <jobset>-<replicated job>-<job>-<pod>.<jobset>
        return f"{found[1]}-0.{env[JOBSET]}", f"{_POD} and {JOBSET}"
    return f"{found[1]}-0.{found[1]}", _POD


def job_file(request: Request) -> str:
    """A headless Service, by which pods find each other, and an Indexed Job."""
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
            "backoffLimit": request.retries * request.nodes,  # each failure of the job is one of every pod
            **job_spec(request, [node_count(request)], subdomain=request.name),
        },
    }
    return manifest(request, service, job)


def submission(request: Request, path: str) -> tuple[str, ...]:  # noqa: ARG001
    """The command that submits the manifest at `path`."""
    return "kubectl", "apply", "--filename", path
