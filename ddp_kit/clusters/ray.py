"""Ray: submit a job whose driver, ray_driver.py, runs one launcher per node."""

import shlex

from ddp_kit.clusters.engine import Engine
from ddp_kit.clusters.request import Request


class Ray(Engine):
    """A Ray cluster. Ray uploads the working folder; ddpkit must be installed on all nodes."""

    name = "ray"
    help = "a job for `ray job submit`"
    flags = frozenset({"cpus", "retries"})
    suffix = ".sh"
    program = "ray"
    install = "install Ray (pip install ray[default]), and set RAY_ADDRESS to the address of your cluster"
    copies_folder = True

    def text(self, request: Request) -> str:
        """A shell script that submits the job."""
        command = shlex.join(self.submit_command(request, ""))
        return f"#!/usr/bin/env bash\n# Made by: {request.command}\nexec {command}\n"

    def submit_command(self, request: Request, path: str) -> tuple[str, ...]:  # noqa: ARG002
        """The command that submits the job's driver; it needs no job file."""
        flags = ["--nodes", str(request.nodes), "--retries", str(request.retries)]
        if request.spares:
            flags += ["--spares", str(request.spares)]
        if request.gpus is not None:
            flags += ["--gpus", str(request.gpus)]
        if request.cpus_per_node is not None:
            flags += ["--cpus", str(request.cpus_per_node)]
        driver = ("python", "-m", "ddp_kit.clusters.ray_driver", *flags, "--", *request.words)
        return (self.program, "job", "submit", "--working-dir", ".", "--", *driver)
