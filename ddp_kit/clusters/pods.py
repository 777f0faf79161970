"""The engines of Kubernetes: what Indexed Jobs, JobSets and TrainJobs have in common, a pod per node."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ddp_kit.clusters.engine import Engine
from ddp_kit.clusters.request import AGAIN, NAME_LENGTH, PORT, SIGNALLED, JobPlace, Request, job_name, number
from ddp_kit.env import GRACE, MASTER_ADDR, NODES_DEFAULT
from ddp_kit.errors import UsageError

_INDEX = "JOB_COMPLETION_INDEX"
_POD = "HOSTNAME"
PENDING_SECONDS = 86400.0
"""Time for all pods to start: the cluster may have no free node for hours. The job's time limit can end it earlier."""
REPLACEMENT_SECONDS = 300.0
"""Time for the Job to replace a lost pod: to notice the loss, schedule a pod, pull its image and start it."""
WAITS_FOR = "`kubectl get pods` shows which pods are not running, and why"
_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
_CODES = 256
_EXPLAINED = """\
# Made by: {command}
# After exit codes 75 (saved) and 4 (a node was lost), and after the loss of a pod, pods are restarted any number of
# times; after exit codes 3, 124 and above 128, a limited number of times. All other exit codes end the job, because
# ddpkit has already restarted the workers.
"""
_FINAL = ["PodFailurePolicy", "DeadlineExceeded"]  # otherwise, the JobSet would restart the job after its time limit
_DNS_LABEL = rf"[a-z](?:[a-z0-9-]{{0,{NAME_LENGTH - 2}}}[a-z0-9])?"


class PodEngine(Engine):
    """An engine that runs one pod per node. Its manifests are submitted with kubectl."""

    flags = frozenset({"cpus", "image", "queue", "retries", "grace", "time"})
    suffix = ".yaml"
    program = "kubectl"
    install = "install kubectl, and configure it for your cluster"
    image_needed = True

    def check(self, request: Request) -> None:
        """Check that the name can be the name of a Kubernetes object."""
        if not re.fullmatch(_DNS_LABEL, request.name):
            raise UsageError(
                f"--name {request.name} is not a valid job name in Kubernetes: use at most {NAME_LENGTH} lower-case "
                "letters, digits and dashes",
                f"use --name {job_name(request.name)}",
            )

    def submit_command(self, request: Request, path: str) -> tuple[str, ...]:  # noqa: ARG002
        """The command that creates the objects of the manifest.

        It fails if a job with this name exists. `kubectl apply` would leave a finished job as it is, and report
        success.
        """
        return self.program, "create", "--filename", path


# --- Pods of an Indexed Job -------------------------------------------------------------------------------------------
# A Job may be standalone or part of a JobSet; in both, JOB_COMPLETION_INDEX numbers the pods.
# Kubernetes sets no variable for the number of pods or the name of the first one. The manifests of `ddpkit submit` set
# PET_NNODES, and a headless service with the job's name makes pod 0 known as `<job>-0.<job>`. Other manifests may set
# MASTER_ADDR to the name of pod 0.
# Source: Kubernetes documentation, "Indexed Job" and "Job with Pod-to-Pod Communication"; JobSet 0.12.


def pod_place(env: Mapping[str, str], environment: str, service: str | None = None) -> JobPlace | None:
    """Return the node rank of a pod of an Indexed Job, and the job's rendezvous settings.

    `service`: the variable that contains the name of the headless service; None: it has the name of the Job. Returns
    None if PET_NNODES is not set, because the pods of such a Job are independent of each other.
    """
    if _INDEX not in env or NODES_DEFAULT not in env:
        return None
    nodes = env[NODES_DEFAULT].split(":")[-1]
    rank = number(env, _INDEX, environment)
    if not nodes.isdecimal():
        raise UsageError(
            f"{NODES_DEFAULT}={env[NODES_DEFAULT]} is neither a number nor MIN:MAX",
            "set it to a number of nodes such as 2, or to a range such as 2:4",
        )
    host = env.get(MASTER_ADDR, "")
    source = MASTER_ADDR
    if not host:  # the name of a pod is JOB-INDEX
        job = re.fullmatch(rf"(.+)-{rank}", env.get(_POD, ""))
        if job is None:
            raise UsageError(
                f"this looks like {environment}, but {_POD}={env.get(_POD, '')!r} does not end in -{rank}, the pod's "
                "index, so the host name of pod 0 cannot be derived from it",
                f"in the manifest, set {MASTER_ADDR} to the host name of pod 0",
            )
        source = _POD if service is None else f"{_POD} and {service}"
        host = f"{job[1]}-0.{env.get(service or '', job[1])}"
    return JobPlace(
        environment=environment,
        nodes=int(nodes),
        node_rank=rank,
        host=host,
        port=PORT,
        run_id=env.get(service or "", host.split(".")[0]),
        sources={"nodes": NODES_DEFAULT, "node rank": _INDEX, "host": source},
        join=PENDING_SECONDS,
        replacement=REPLACEMENT_SECONDS,
        waits_for=WAITS_FOR,
    )


# --- Manifests --------------------------------------------------------------------------------------------------------


def manifest(request: Request, *objects: Mapping[str, Any]) -> str:
    """The YAML text of Kubernetes objects, after comments that show the submit command and explain the exit codes."""
    texts = [yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120) for content in objects]
    return _EXPLAINED.format(command=request.command) + "---\n".join(texts)


def labels(request: Request) -> dict[str, Any]:
    """Metadata with a label that names the job's queue, for Kueue; an empty dict if the request names no queue."""
    return {"labels": {_KUEUE_QUEUE: request.queue}} if request.queue else {}


def container(request: Request, env: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The container that runs the launcher."""
    spec: dict[str, Any] = {
        "name": request.name,
        "image": request.image,
        "command": container_command(request),
        "env": [{"name": GRACE, "value": str(request.grace)}, *env],
    }
    if resources(request):
        spec["resources"] = resources(request)
    # DataLoader workers and NCCL share memory in /dev/shm; the default of 64 MiB is too small.
    spec["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    return spec


def container_command(request: Request) -> list[str]:
    """The launcher's command line for a container: Kubernetes replaces `$(NAME)` by a variable, and `$$` by `$`."""
    return [word.replace("$", "$$") for word in request.launch]


def resources(request: Request) -> dict[str, Any]:
    """Resources of a pod.

    The number of GPUs is a limit, which Kubernetes also uses as the request. The number of CPU cores is only a request,
    so that a pod may also use idle cores.
    """
    amounts: dict[str, Any] = {}
    if request.cpus_per_node is not None:
        amounts["requests"] = {"cpu": str(request.cpus_per_node)}
    if request.gpus is not None:
        amounts["limits"] = {"nvidia.com/gpu": str(request.gpus)}
    return amounts


def node_count(request: Request) -> dict[str, str]:
    """The environment variable PET_NNODES, set to the number of pods. Kubernetes itself sets no such variable."""
    return {"name": NODES_DEFAULT, "value": str(request.nodes)}


def job_spec(request: Request, env: Sequence[Mapping[str, Any]] = (), **pod: Any) -> dict[str, Any]:
    """The `spec` of an Indexed Job. `pod`: further fields for the `spec` of the pods."""
    spec: dict[str, Any] = {
        "completions": request.nodes,
        "parallelism": request.nodes,
        "completionMode": "Indexed",
    }
    if request.seconds is not None:
        spec["activeDeadlineSeconds"] = request.seconds
    return {
        **spec,
        "podFailurePolicy": {"rules": _failure_rules(request)},
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


def _failure_rules(request: Request) -> list[dict[str, Any]]:
    """Rules of the pod failure policy. Kubernetes applies the first rule that matches."""

    def on_codes(action: str, operator: str, codes: Sequence[int]) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"operator": operator, "values": list(codes)}}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        on_codes("Ignore", "In", AGAIN),
        on_codes("Count", "In", [*request.counted, *range(SIGNALLED, _CODES)]),
        on_codes("FailJob", "NotIn", [0]),
    ]


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
