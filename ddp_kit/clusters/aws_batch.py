"""AWS Batch: multi-node parallel jobs. Source: AWS Batch documentation, "AWS Batch job environment variables"."""

from collections.abc import Mapping

from ddp_kit.clusters.engine import Environment
from ddp_kit.clusters.request import PORT, JobPlace, number
from ddp_kit.errors import UsageError

_NAME = "AWS Batch"
_NODES = "AWS_BATCH_JOB_NUM_NODES"
_INDEX = "AWS_BATCH_JOB_NODE_INDEX"
_MAIN = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_JOB = "AWS_BATCH_JOB_ID"
_POD = "HOSTNAME"


class AwsBatch(Environment):
    """A multi-node parallel job of AWS Batch."""

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this node's rank and the job's rendezvous settings, or None outside of a multi-node job."""
        if _NODES not in env or _INDEX not in env:
            return None
        index = number(env, _INDEX, _NAME)
        main = number(env, _MAIN, _NAME)
        rank = index + (index < main)  # the main node gets rank 0, so those before it move up by one
        host = env.get(_ADDRESS)
        source = _ADDRESS
        if index == main:
            rank = 0
            host = host or env.get(_POD) or "localhost"  # the variable with the address is not set on the main node
            source = f"{_POD}, as the main node"
        if not host:
            raise UsageError(f"this looks like {_NAME}, but {_ADDRESS} is not set", "use --master-addr ADDRESS")
        return JobPlace(
            environment=_NAME,
            nodes=number(env, _NODES, _NAME, 1),
            node_rank=rank,
            host=host,
            port=PORT,
            run_id=env.get(_JOB, _NAME).partition("#")[0],
            sources={"nodes": _NODES, "node rank": f"{_INDEX} and {_MAIN}", "host": source},
            waits_for="the job's page in the AWS console lists its nodes",
        )
