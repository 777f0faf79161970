"""AWS Batch: multi-node parallel jobs. Source: AWS Batch documentation, "AWS Batch job environment variables"."""

from collections.abc import Mapping

from ddp_kit.clusters.engine import Environment
from ddp_kit.clusters.request import PORT, JobPlace, number
from ddp_kit.errors import UsageError

_NAME = "AWS Batch"
_NODES, _INDEX, _MAIN = "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_ADDRESS, _JOB = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "AWS_BATCH_JOB_ID"
_POD = "HOSTNAME"


class AwsBatch(Environment):
    """A multi-node parallel job of AWS Batch."""

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this node's rank and the job's rendezvous settings, or None outside of a multi-node job."""
        if _NODES not in env or _INDEX not in env:
            return None
        index, main = number(env, _INDEX, _NAME), number(env, _MAIN, _NAME)
        # The main node gets rank 0; the rank of each node that precedes it is its index plus one.
        rank = 0 if index == main else index + (index < main)
        # The variable with the address is not set on the main node itself.
        host = env.get(_ADDRESS) or (env.get(_POD) or "localhost" if rank == 0 else "")
        if not host:
            raise UsageError(f"this looks like {_NAME}, but {_ADDRESS} is not set", "use --master-addr ADDRESS")
        return JobPlace(
            environment=_NAME,
            nodes=number(env, _NODES, _NAME, 1),
            node_rank=rank,
            host=host,
            port=PORT,
            run_id=env.get(_JOB, _NAME).partition("#")[0],
            sources={
                "nodes": _NODES, "node rank": f"{_INDEX} and {_MAIN}",
                "host": _ADDRESS if rank else f"{_POD}, as the main node",
            },
            waits_for="the job's page in the AWS console lists its nodes",
        )  # fmt: skip
