"""The driver of a Ray job: reserves a placement group with one bundle per node, and runs a launcher in each bundle.

    python -m ddp_kit.clusters.ray_driver --nodes 3 --gpus 8 -- train.py --lr 0.1

If a node is lost, Ray restarts its actor on another node. The launchers on the remaining nodes keep running,
and the new launcher joins them. If node 0, which hosts the rendezvous, is lost, or if no replacement arrives in time,
all launchers end with exit code 4, and the driver restarts them all.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ddp_kit.clusters.engine import remote_script
from ddp_kit.clusters.request import AGAIN, COUNTED, PORT, SIGNALLED
from ddp_kit.env import THREADS
from ddp_kit.exit_codes import ExitCode

_REMINDER_SECONDS = 30.0
_REPLACEMENT_SECONDS = 120  # for Ray to notice the loss of a node, and to start an actor on another node
_OTHERS_SECONDS = 10.0  # for the other launchers to end after the first one has failed


class Host:
    """Ray actor that runs the launcher on one node of the job."""

    def address(self) -> str:
        """The IP address of the node that this actor runs on."""
        return str(ray.util.get_node_ip_address())

    def run(self, launch: Sequence[str], cpus: int) -> int:
        """Run the launcher, and return its exit code. The launcher is stopped when this actor ends.

        `cpus`: the number of CPU cores of this actor.
        """
        env = dict(os.environ)
        if env.get(THREADS) == str(cpus):  # set by Ray, for a single process; the launcher divides the cores
            del env[THREADS]
        with subprocess.Popen(remote_script(launch), stdin=subprocess.PIPE, env=env) as process:
            return process.wait() % 256


def main(words: Sequence[str]) -> int:
    """Run the job, restart it after retryable exit codes, and return the last exit code.

    `words`: the flags of this driver, then `--`, then the arguments of `ddpkit launch`.
    """
    parser = argparse.ArgumentParser(prog="ray_driver", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--retries", type=int, default=3)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--cpus", type=int)
    end = words.index("--")
    args = parser.parse_args(words[:end])
    launch = words[end + 1 :]
    bundle = {"CPU": args.cpus or 1}
    if args.gpus:
        bundle["GPU"] = args.gpus
    ray.init(address="auto", log_to_driver=True)
    retries = args.retries
    while True:
        code = _attempt(args.nodes, args.spares, bundle, launch)
        counted = code in COUNTED or code >= SIGNALLED
        if not (counted and retries) and code not in AGAIN:
            return code
        retries -= counted
        _say(f"restarting the job: it ended with exit code {code}")


def _attempt(nodes: int, spares: int, bundle: dict[str, int], words: Sequence[str]) -> int:
    """Run the job once on all nodes, and return its exit code."""
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    while not group.wait(_REMINDER_SECONDS):
        alive = [node for node in ray.nodes() if node["Alive"]]
        _say(f"waiting for {nodes} nodes with {bundle} each; the cluster has {len(alive)} nodes (see `ray status`)")
    actor: Any = ray.remote(max_restarts=-1, max_task_retries=-1)(Host)
    hosts = [
        actor.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(nodes)
    ]
    try:
        address = ray.get(hosts[0].address.remote())
        launches = [("ddpkit", "launch", *_place(nodes - spares, rank, address), *words) for rank in range(nodes)]
        runs = [host.run.remote(launch, bundle["CPU"]) for host, launch in zip(hosts, launches, strict=True)]
        return _outcome(runs, spares)
    except (RayActorError, RayTaskError) as error:
        _say(f"a node was lost: {error}")
        return ExitCode.NODE_LOST
    finally:
        for host in hosts:
            ray.kill(host)
        remove_placement_group(group)


def _place(nodes: int, rank: int, address: str) -> tuple[str, ...]:
    if nodes == 1:
        return ()
    meet = ("--master-addr", address, "--master-port", str(PORT))
    wait = ("--rdzv-conf", f"replacement_timeout={_REPLACEMENT_SECONDS}")
    return ("--nnodes", str(nodes), "--node-rank", str(rank), *meet, *wait)


def _outcome(runs: Sequence[Any], spares: int) -> int:
    """The exit code of the job: that of the first launcher that fails, or 0.

    With spares, that of node 0, unless more launchers than there are spares fail before. Once the exit code is known,
    the other launchers have 10 s to end.
    """
    codes: dict[Any, int] = {}
    left = list(runs)
    deadline = None
    while left:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, left = ray.wait(left, num_returns=1, timeout=timeout)
        if not done:
            break
        codes.update(zip(done, ray.get(done), strict=True))
        failed = len([*filter(None, codes.values())])
        if deadline is None and (failed > spares or (spares and runs[0] in codes)):
            deadline = time.monotonic() + _OTHERS_SECONDS
    if spares and runs[0] in codes:
        return codes[runs[0]]
    return next(filter(None, codes.values()), 0)


def _say(text: str) -> None:
    print(f"ddpkit: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
