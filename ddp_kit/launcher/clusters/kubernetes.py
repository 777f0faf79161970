"""Kubernetes: an Indexed Job, or one in a JobSet; both number their pods by JOB_COMPLETION_INDEX.

Kubernetes says neither how many pods there are nor the name of the first. The manifests of `ddpkit submit` set
PET_NNODES, and a headless service with the job's name makes pod 0 known as `<job>-0.<job>`. For other manifests
MASTER_ADDR is the name of pod 0.
Source: Kubernetes documentation, "Indexed Job" and "Job with Pod-to-Pod Communication"; JobSet 0.12.
"""

import re
from collections.abc import Mapping

from ddp_kit.env import MASTER_ADDR, NODES_DEFAULT
from ddp_kit.errors import UsageError
from ddp_kit.launcher.clusters.job_place import PORT, JobPlace, check_rank, number
from ddp_kit.launcher.clusters.pods import job_spec, labels, manifest, node_count
from ddp_kit.launcher.clusters.request import Request

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
