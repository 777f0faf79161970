"""A launcher for `ddp_kit.launch` that imports torch before it reads its command line from standard input.

    python -m ddp_kit.launcher.waiting_launcher MODULE...

The first line of standard input is a JSON object with the arguments of `ddpkit launch` (`words`) and the environment
(`env`). Standard input is a pipe from the process that started the launcher. When the pipe is closed, the launcher and
its job end. The ranks must not read the pipe: their standard input is /dev/null, so `input()` raises an EOFError.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO

from ddp_kit.env import allocator_defaults, set_environment
from ddp_kit.launcher import cli
from ddp_kit.launcher.warm.client import WarmServer


def main(modules: Sequence[str]) -> None:
    """Wait for the command line, run it and exit. `modules`: modules that the warm server imports besides torch."""
    commands = _take_stdin()  # before any process is started that would inherit it
    env = {**os.environ, **allocator_defaults(os.environ)}
    room = ["-" * 4096]  # reserves memory for the workers' command lines, see `WarmServer`
    warm = WarmServer(room, env, preload=modules) if sys.platform == "linux" else None
    cli.import_agent()
    line = commands.readline()
    if not line:
        if warm is not None:
            warm.close()
        return
    asked = json.loads(line)
    set_environment(asked["env"])
    threading.Thread(target=_end_with_parent, args=[commands], daemon=True).start()
    cli.entry(["launch", *asked["words"]], warm)


def _take_stdin() -> BinaryIO:
    """Return standard input as a file that no child process inherits, and replace it with /dev/null."""
    commands = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return commands


def _end_with_parent(commands: BinaryIO) -> None:
    commands.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
