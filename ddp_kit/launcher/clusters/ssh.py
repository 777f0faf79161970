"""Plain hosts over ssh: one launcher per host, which stops when the connection ends."""

import shlex

from ddp_kit.launcher.clusters import remote_shell
from ddp_kit.launcher.clusters.job_place import derived_port
from ddp_kit.launcher.clusters.request import Request


def commands(request: Request) -> dict[str, tuple[str, ...]]:
    """The ssh command for each host. The first host is node 0, which hosts the rendezvous."""
    hosts = request.hosts
    address = hosts[0].rpartition("@")[2]
    port = derived_port(str(sum(" ".join((*hosts, str(request.folder), *request.words)).encode())))
    gpus = () if request.gpus is None else ("--gpus", str(request.gpus))
    found: dict[str, tuple[str, ...]] = {}
    for rank, host in enumerate(hosts):
        place = ("--nnodes", str(len(hosts)), "--node-rank", str(rank)) if len(hosts) > 1 else ()
        rendezvous = ("--master-addr", address, "--master-port", str(port)) if len(hosts) > 1 else ()
        launch = ("ddpkit", "launch", *place, *rendezvous, *gpus, *request.words)
        remote = shlex.join(remote_shell.script(launch, str(request.folder), request.programs))
        found[host] = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", host, remote)
    return found


def job_file(request: Request) -> str:
    """The commands as a shell script, for people: `ddpkit submit` runs them itself."""
    lines = (f"{shlex.join(command)} &" for command in commands(request).values())
    return f"#!/usr/bin/env bash\n# Made by: {request.command}\n" + "\n".join(lines) + "\nwait\n"
