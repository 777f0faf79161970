"""What SkyPilot does with a managed job, on hosts made of namespaces: see hosts.py.

    job = ManagedJob(task, hosts, folder, env)   # what `ddpkit submit --dry-run` prints
    job.start()
    job.lose(1)       # a node is lost, which its provider knows, and everything on it dies
    job.run()         # until the job has succeeded or failed

Read in SkyPilot 0.14.1:

- sky/backends/task_codegen.py, RayCodeGen: the variables of a node. Once `run` ends on one node with a code that is not
  0, it is cancelled on the others, whose code is then 137. Lines that follow `run` in the same shell wait for what is
  not in its bucket yet.
- sky/skylet/log_lib.py and subprocess_daemon.py: `bash -i` runs it. To cancel it is SIGTERM for each of its processes,
  and SIGKILL 30 s later.
- sky/jobs/controller.py, `_run_one_task`: a cluster with a lost node is recovered; else the exit codes decide.
- sky/jobs/recovery_strategy.py, `should_restart_on_failure`: if one of them is in `recover_on_exit_codes`, the job is
  recovered; if none is, that is counted: `max_restarts_on_errors`. EAGER_NEXT_REGION ends all nodes, and takes others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import psutil
import yaml

from tests.support.hosts import Host, Tree
from tests.support.launching import wait_until

SECONDS = 240.0
_CANCELLED = 137
_CANCEL_SECONDS = 30.0
_AFTER_RUN = '\nended=$?\necho "$SKYPILOT_NODE_RANK" >>uploads\nexit $ended\n'


class ManagedJob:
    """Runs one task, each node on a host of its own."""

    def __init__(self, task: str, hosts: Sequence[Host], folder: Path, env: Mapping[str, str]) -> None:
        self._task = yaml.safe_load(task)
        assert self._task["num_nodes"] == len(hosts)
        recovery = self._task["resources"]["job_recovery"]
        assert recovery["strategy"] == "EAGER_NEXT_REGION"
        self._recovers_on = recovery["recover_on_exit_codes"]
        self._restarts_left = recovery.get("max_restarts_on_errors", 0)
        self._hosts, self._folder, self._env = list(hosts), folder, env
        self.nodes: list[Tree] = []
        """By node rank."""
        self.said: list[str] = []
        """What the nodes of earlier clusters had to say."""
        self.codes: list[list[int]] = []
        """The exit codes of all nodes, for each time that `run` ended."""
        self.recoveries = 0
        self._lost: set[int] = set()
        self._succeeded: bool | None = None

    def start(self) -> None:
        """Start the task on all nodes."""
        for tree in [self._shell(host, self._task["setup"], {}) for host in self._hosts]:
            assert tree.wait(SECONDS) == 0, tree.output
        addresses = "\n".join(host.address for host in self._hosts)
        shared = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_NODES": str(len(self._hosts))}
        shared |= {"SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-00-00-00-0_train_1-0"}
        self.nodes = [
            self._shell(host, self._task["run"] + _AFTER_RUN, shared | {"SKYPILOT_NODE_RANK": str(rank)})
            for rank, host in enumerate(self._hosts)
        ]

    def lose(self, rank: int) -> None:
        """Lose a node: the provider says so, and the job is recovered."""
        self._lost.add(rank)
        self.nodes[rank].die()

    def host(self, rank: int) -> Host:
        """The host that is this node now."""
        return self._hosts[rank]

    def until(self, enough: Callable[[], bool]) -> None:
        """Look after the nodes until it is enough."""

        def is_enough() -> bool:
            if enough():
                return True
            self._look()
            return False

        wait_until(is_enough, lambda: self, SECONDS)

    def run(self) -> bool:
        """Look after the nodes until the job has succeeded (True) or failed."""
        self.until(lambda: self._succeeded is not None)
        return bool(self._succeeded)

    def _shell(self, host: Host, script: str, env: Mapping[str, str]) -> Tree:
        return host.start("env", "-C", self._folder, "bash", "-i", "-c", script, env={**self._env, **env})

    def _look(self) -> None:
        ended = {rank: tree.wait(0) for rank, tree in enumerate(self.nodes) if tree.ended}
        if self._lost:
            self._recover()
        elif any(ended.values()):
            for rank, tree in enumerate(self.nodes):
                if rank not in ended:
                    ended[rank] = _cancel(tree)
            self.codes.append([ended[rank] for rank in sorted(ended)])
            if self._starts_again(self.codes[-1]):
                self._recover()
            else:
                self._succeeded = False
        elif len(ended) == len(self.nodes):
            self._succeeded = True

    def _starts_again(self, codes: Sequence[int]) -> bool:
        if any(code in self._recovers_on for code in codes):
            return True
        self._restarts_left -= 1
        return self._restarts_left >= 0

    def _recover(self) -> None:
        for tree in self.nodes:
            tree.die()
            self.said.append(tree.output)
        self.recoveries += 1
        self._lost.clear()
        self._hosts.reverse()  # in another region, node 0 has another address
        self.start()

    def __repr__(self) -> str:
        running = [f"--- node {rank}\n{tree.output[-3000:]}" for rank, tree in enumerate(self.nodes)]
        return "\n".join([f"codes {self.codes}", *(said[-2000:] for said in self.said), *running])


def _cancel(tree: Tree) -> int:
    """Stop what a node runs; its code, whatever it ended with."""
    with suppress(psutil.NoSuchProcess, ValueError):  # it has just ended
        for process in (tree.command, *tree.command.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.terminate()
    with suppress(TimeoutExpired):
        tree.wait(_CANCEL_SECONDS)
    tree.die()
    return _CANCELLED
