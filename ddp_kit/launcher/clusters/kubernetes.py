"""Kubernetes: Indexed Jobs, and the parts of manifests that JobSet and Kubeflow also use."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ddp_kit.env import GRACE, MASTER_ADDR, NODES_DEFAULT
from ddp_kit.errors import UsageError
from ddp_kit.launcher.clusters.request import AGAIN, COUNTED, PORT, SIGNALLED, JobPlace, Request, check_rank, number

# --- Shared parts of manifests ----------------------------------------------------------------------------------------
# Containers, exit codes, YAML.

_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_CODES = 256
_EXPLAINED = """\
# Made by: {command}
# After exit codes 75 (saved) and 4 (a node was lost), and after the loss of a pod, pods are restarted any number of
# times; after exit codes 3, 124 and above 128, a limited number of times. All other exit codes end the job, because
# ddpkit has already restarted the workers.
"""


def manifest(request: Request, *objects: Mapping[str, Any]) -> str:
    """The YAML text of Kubernetes objects, after comments that show the submit command and explain the exit codes."""
    texts = [yaml.safe_dump(each, sort_keys=False, default_flow_style=None, width=120) for each in objects]
    return _EXPLAINED.format(command=request.command) + "---\n".join(texts)


def labels(request: Request) -> dict[str, Any]:
    """Metadata with a label that names the job's queue, for Kueue; an empty dict if the request names no queue."""
    return {"labels": {_KUEUE_QUEUE: request.queue}} if request.queue else {}


def container(request: Request, env: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The container that runs the launcher."""
    found: dict[str, Any] = {
        "name": request.name,
        "image": request.image,
        "command": command(request),
        "env": [{"name": GRACE, "value": str(request.grace)}, *env],
    }
    if resources(request):
        found["resources"] = resources(request)
    # DataLoader workers and NCCL share memory in /dev/shm; the default of 64 MiB is too small.
    found["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    return found


def command(request: Request) -> list[str]:
    """The launcher's command line for a container: Kubernetes replaces `$(NAME)` by a variable, and `$$` by `$`."""
    return [word.replace("$", "$$") for word in request.launch]


def resources(request: Request) -> dict[str, Any]:
    """Resources of a pod.

    The number of GPUs is a limit, which Kubernetes also uses as the request. The number of CPU cores is only a request,
    so that a pod may also use idle cores.
    """
    found: dict[str, Any] = {}
    if request.cpus_per_node is not None:
        found["requests"] = {"cpu": str(request.cpus_per_node)}
    if request.gpus is not None:
        found["limits"] = {"nvidia.com/gpu": str(request.gpus)}
    return found


def node_count(request: Request) -> dict[str, str]:
    """The environment variable PET_NNODES, set to the number of pods. Kubernetes itself sets no such variable."""
    return {"name": NODES_DEFAULT, "value": str(request.nodes)}


def job_spec(request: Request, env: Sequence[Mapping[str, Any]] = (), **pod: Any) -> dict[str, Any]:
    """The `spec` of an Indexed Job. `pod`: further fields for the `spec` of the pods."""
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
    """Rules of the pod failure policy. Kubernetes applies the first rule that matches."""

    def on_codes(action: str, operator: str, codes: Sequence[int]) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"operator": operator, "values": list(codes)}}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        on_codes("Ignore", "In", AGAIN),
        on_codes("Count", "In", [*COUNTED, *range(SIGNALLED, _CODES)]),
        on_codes("FailJob", "NotIn", [0]),
    ]


# --- Indexed Job ------------------------------------------------------------------------------------------------------
# A Job may be standalone or part of a JobSet; in both, JOB_COMPLETION_INDEX numbers the pods.
# Kubernetes sets no variable for the number of pods or the name of the first one. The manifests of `ddpkit submit` set
# PET_NNODES, and a headless service with the job's name makes pod 0 known as `<job>-0.<job>`. Other manifests may set
# MASTER_ADDR to the name of pod 0.
# Source: Kubernetes documentation, "Indexed Job" and "Job with Pod-to-Pod Communication"; JobSet 0.12.


_INDEX = "JOB_COMPLETION_INDEX"
_POD = "HOSTNAME"
PENDING_SECONDS = 86400.0
"""Time for all pods to start: the cluster may have no free node for hours. The job's time limit can end it earlier."""
REPLACEMENT_SECONDS = 300.0
"""Time for the Job to replace a lost pod: to notice the loss, schedule a pod, pull its image and start it."""
JOBSET = "JOBSET_NAME"
"""Name of the JobSet; the manifest sets it from a label."""


def read(env: Mapping[str, str]) -> JobPlace | None:
    """Return this pod's node rank and the job's rendezvous settings, or None outside of an Indexed Job.

    Also returns None if PET_NNODES is not set, because the pods of such a Job are independent of each other.
    """
    if _INDEX not in env or NODES_DEFAULT not in env:
        return None
    name = "a JobSet of Kubernetes" if JOBSET in env else "an Indexed Job of Kubernetes"
    nodes, rank = env[NODES_DEFAULT].split(":")[-1], number(env, _INDEX, name)
    if not nodes.isdecimal():
        raise UsageError(
            f"{NODES_DEFAULT}={env[NODES_DEFAULT]} is neither a number nor MIN:MAX",
            "set it to a number of nodes such as 2, or to a range such as 2:4",
        )
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
            join=PENDING_SECONDS,
            replacement=REPLACEMENT_SECONDS,
            waits_for="`kubectl get pods` shows which pods are not running, and why",
        )
    )


def _host(env: Mapping[str, str], name: str, rank: int) -> tuple[str, str]:
    """Return the host name of pod 0 and, as text, the environment variables that it was derived from."""
    if env.get(MASTER_ADDR):
        return env[MASTER_ADDR], MASTER_ADDR
    found = re.fullmatch(rf"(.+)-{rank}", env.get(_POD, ""))
    if found is None:
        raise UsageError(
            f"this looks like {name}, but {_POD}={env.get(_POD, '')!r} does not end in -{rank}, the pod's index, so "
            "the host name of pod 0 cannot be derived from it",
            f"in the manifest, set {MASTER_ADDR} to the host name of pod 0",
        )
    if JOBSET in env:  # <jobset>-<replicated job>-<job>-<pod>.<jobset>
        return f"{found[1]}-0.{env[JOBSET]}", f"{_POD} and {JOBSET}"
    return f"{found[1]}-0.{found[1]}", _POD


def job_file(request: Request) -> str:
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


def submission(request: Request, path: str) -> tuple[str, ...]:  # noqa: ARG001
    """The command that submits the manifest at `path`.

    It fails if a job with this name exists. `kubectl apply` would leave a finished job as it is, and report success.
    """
    return "kubectl", "create", "--filename", path
