"""Recognise the cluster that this launcher runs in, and fill in launch settings from the cluster's variables."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ddp_kit.launcher.clusters import aws_batch, azure_ml, kubeflow, kubernetes, mpi, pytorch_job, skypilot, slurm
from ddp_kit.launcher.clusters.request import JobPlace
from ddp_kit.launcher.spec import LaunchSpec

# Environments that start processes come before the environments that allocate nodes: mpirun before Slurm; SkyPilot
# and Kubeflow before Kubernetes.
_ALL = (kubeflow, skypilot, azure_ml, aws_batch, mpi, slurm, kubernetes, pytorch_job)
_RENDEZVOUS = {"rdzv_backend", "rdzv_endpoint"}


def completed(spec: LaunchSpec, env: Mapping[str, str]) -> LaunchSpec:
    """Complete the launch settings with this node's rank and the rendezvous settings from the cluster's variables.

    Values given by flags are kept. Returns `spec` unchanged outside of a cluster, and if the flags are complete or
    restrict the job to this machine. Raises `UsageError` if variables are missing or contradict each other.
    """
    if spec.torchrun["standalone"] or ("nnodes" in spec.typed and _is_one(spec.torchrun)):
        return spec
    if "nnodes" in spec.typed and spec.typed & {"rdzv_endpoint", "node_rank"}:
        return spec  # the command line is complete
    place = read(env)
    if place is None:
        return spec
    found = dict(spec.torchrun)
    if "nnodes" not in spec.given:
        found["nnodes"] = str(place.nodes)
    if _is_one(found) or _RENDEZVOUS & spec.given:
        if "node_rank" not in spec.given and not _is_one(found):
            found["node_rank"] = place.node_rank
        return replace(spec, torchrun=MappingProxyType(found), place=place)
    if "rdzv_id" not in spec.given:
        found["rdzv_id"] = place.run_id
    host = found["master_addr"] if "master_addr" in spec.given else place.host
    port = found["master_port"] if "master_port" in spec.given else place.port
    if ":" in str(found["nnodes"]):  # any number of nodes, in any order
        is_host = f"is_host={int(place.node_rank == 0)}"
        conf = ",".join(filter(None, [found["rdzv_conf"], is_host]))
        found |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"{host}:{port}", "rdzv_conf": conf}
    else:
        found |= {"rdzv_backend": "static", "rdzv_endpoint": "", "master_addr": host, "master_port": port}
        if "node_rank" not in spec.given:
            found["node_rank"] = place.node_rank
    return replace(spec, torchrun=MappingProxyType(found), place=place)


def read(env: Mapping[str, str]) -> JobPlace | None:
    """Return this node's rank and the job's rendezvous settings, or None outside of all supported clusters.

    Raises `UsageError` if variables are missing or contradict each other.
    """
    return next((found for module in _ALL if (found := module.read(env)) is not None), None)


def _is_one(settings: Mapping[str, Any]) -> bool:
    return str(settings["nnodes"]) in ("1", "1:1")
