"""Azure Machine Learning: jobs with `distribution: pytorch`, one process per instance.

Source: Azure Machine Learning documentation, "Distributed GPU training guide".
"""

from collections.abc import Mapping

from ddp_kit.clusters.engine import Environment
from ddp_kit.clusters.request import JobPlace, number
from ddp_kit.env import LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, WORLD_SIZE
from ddp_kit.errors import UsageError

_NAME = "Azure Machine Learning"
_RUN = "AZUREML_RUN_ID"
_RANK = "NODE_RANK"
_NODES = "AZUREML_NODE_COUNT"


class AzureML(Environment):
    """A distributed job of Azure Machine Learning."""

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this node's rank and the job's rendezvous settings, or None outside of a distributed job."""
        if _RUN not in env or _RANK not in env or MASTER_ADDR not in env:
            return None
        if env.get(LOCAL_WORLD_SIZE, "1") != "1":
            raise UsageError(
                f"{_NAME} starts {env[LOCAL_WORLD_SIZE]} processes per instance, but `ddpkit launch` starts the "
                "workers itself",
                "set process_count_per_instance: 1 in the job's distribution",
            )
        nodes = _NODES if _NODES in env else WORLD_SIZE  # with one process per instance, both numbers are equal
        return JobPlace(
            environment=_NAME,
            nodes=number(env, nodes, _NAME, 1),
            node_rank=number(env, _RANK, _NAME),
            host=env[MASTER_ADDR],
            port=number(env, MASTER_PORT, _NAME, 1),
            run_id=env[_RUN],
            sources={"nodes": nodes, "node rank": _RANK, "host": MASTER_ADDR, "port": MASTER_PORT},
            waits_for="the job's page lists the instances",
        )
