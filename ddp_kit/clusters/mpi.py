"""mpirun of Open MPI, and mpiexec of MPICH and its derivatives. Neither sets MASTER_ADDR: users have to set it.

Source: Open MPI documentation, "Environment variables defined by Open MPI"; MPICH, "Hydra process management".
"""

from collections.abc import Mapping

from ddp_kit.clusters.engine import Environment
from ddp_kit.clusters.request import PORT, JobPlace, number, optional_number
from ddp_kit.env import MASTER_ADDR, MASTER_PORT
from ddp_kit.errors import UsageError

# The variables for the rank, the number of processes, and the number of processes on this node.
_KINDS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
}


class Mpi(Environment):
    """A job that mpirun or mpiexec started."""

    def recognise(self, env: Mapping[str, str]) -> JobPlace | None:
        """Return this node's rank and the job's rendezvous settings, or None outside of mpirun.

        Raises `UsageError` if mpirun started several processes per node, or if MASTER_ADDR is missing.
        """
        name = next((kind for kind, variables in _KINDS.items() if env.keys() >= set(variables)), None)
        if name is None:
            return None
        rank, size, local_size = _KINDS[name]
        nodes = number(env, size, name, 1)
        node_rank = number(env, rank, name)
        if env[local_size] != "1":
            if node_rank:
                raise SystemExit(2)  # only process 0 reports the error
            raise UsageError(
                f"mpirun started {env[local_size]} processes on this node, but `ddpkit launch` starts the workers "
                "itself: run it once per node",
                "add `--map-by ppr:1:node` to the mpirun command (mpiexec: -ppn 1)",
            )
        if nodes > 1 and not env.get(MASTER_ADDR):
            if node_rank:
                raise SystemExit(2)
            raise UsageError(
                f"mpirun does not provide the address of process 0, and {MASTER_ADDR} is not set",
                f"run `mpirun -x {MASTER_ADDR}=<first host> ...` (mpiexec: -genv {MASTER_ADDR} <first host>)",
            )
        return JobPlace(
            environment=name,
            nodes=nodes,
            node_rank=node_rank,
            host=env.get(MASTER_ADDR, "localhost"),
            port=optional_number(env, MASTER_PORT) or PORT,
            run_id=env.get("PMIX_NAMESPACE", name),
            sources={"nodes": size, "node rank": rank, "host": MASTER_ADDR, "port": MASTER_PORT},
        )
