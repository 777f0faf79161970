"""PyTorchJob (Kubeflow Training Operator v1) and PAI-DLC: RANK and WORLD_SIZE count nodes, not processes.

Source: Alibaba Cloud PAI documentation, "General environment variables"; Kubeflow documentation, "PyTorch Training
(PyTorchJob)".
"""

from collections.abc import Mapping

from ddp_kit.clusters.engine import Environment
from ddp_kit.clusters.request import JobPlace, number, optional_number
from ddp_kit.env import LOCAL_RANK, MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
from ddp_kit.errors import UsageError

_NAME = "a PyTorchJob"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_GPUS = "NPROC_PER_NODE"


class PyTorchJob(Environment):
    """A multi-node PyTorchJob."""

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this node's rank and the job's rendezvous settings, or None outside of a multi-node PyTorchJob.

        Also returns None in a worker, where RANK and WORLD_SIZE count processes.

        Raises `UsageError` if the variables contradict each other, for example because some of them are left over from
        a container image or a shell.
        """
        names = (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)
        if not all(env.get(name) for name in names) or LOCAL_RANK in env or env[WORLD_SIZE] == "1":
            return None
        rank = optional_number(env, RANK)
        nodes = optional_number(env, WORLD_SIZE)
        if rank is None or nodes is None or rank >= nodes or env[MASTER_ADDR] in _LOOPBACK:
            values = ", ".join(f"{name}={env[name]}" for name in names)
            raise UsageError(
                f"{values} look like variables of {_NAME}, where {RANK} is the rank of the node, but contradict each "
                "other",
                f"unset {', '.join(names)}, or use --nnodes 1 to run on this machine alone",
            )
        return JobPlace(
            environment=f"{_NAME} or PAI",
            nodes=nodes,
            node_rank=rank,
            host=env[MASTER_ADDR],
            port=number(env, MASTER_PORT, _NAME, 1),
            run_id=env[MASTER_ADDR].split(".")[0],
            sources={"nodes": WORLD_SIZE, "node rank": RANK, "host": MASTER_ADDR, "port": MASTER_PORT, "GPUs": _GPUS},
            gpus=optional_number(env, _GPUS),
            waits_for="`kubectl get pods` shows which pods are not running, and why",
        )
