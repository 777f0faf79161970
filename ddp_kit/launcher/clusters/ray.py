"""Ray: submit a job whose driver, ray_driver.py, runs one launcher per node."""

import shlex

from ddp_kit.launcher.clusters.request import Request


def command(request: Request) -> tuple[str, ...]:
    """The command that submits the job. Ray uploads the working folder; ddpkit must be installed on all nodes."""
    flags = ["--nodes", str(request.nodes), "--retries", str(request.retries)]
    flags += [] if request.gpus is None else ["--gpus", str(request.gpus)]
    flags += [] if request.cpus_per_node is None else ["--cpus", str(request.cpus_per_node)]
    driver = ("python", "-m", "ddp_kit.launcher.clusters.ray_driver", *flags, "--", *request.words)
    return ("ray", "job", "submit", "--working-dir", ".", "--", *driver)


def job_file(request: Request) -> str:
    """A shell script that submits the job."""
    return f"#!/usr/bin/env bash\n# Made by: {request.command}\nexec {shlex.join(command(request))}\n"
