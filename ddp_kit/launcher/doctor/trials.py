"""Run probe.py in separate processes: torch may be broken, and host names may take long to resolve."""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO, Any

from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.launcher.devices.gpus import Gpu
from ddp_kit.launcher.warm.cleanup import die_with_parent

_LOOPBACK = "127.0.0.1"
_PROBE = Path(__file__).parents[1] / "agent" / "probe.py"


@dataclass(frozen=True)
class Answer:
    """The result of a trial."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why it failed: the last line of the process that failed first."""


Ask = Callable[[], Answer]
"""Waits for a trial and returns its answer."""


@dataclass(frozen=True)
class Trials:
    """All trials; they run concurrently, because each has to import torch."""

    host: Ask
    torch: Ask
    gloo: Ask
    nccl: Ask | None
    """None with fewer than two GPUs."""
    products: Mapping[str, Ask]
    """By the GPU's UUID."""


@contextmanager
def started(env: Mapping[str, str], host: str, gpus: Sequence[Gpu], limit_seconds: float = 60) -> Iterator[Trials]:
    """Start all trials; kill those that still run at the end of the block."""
    with ExitStack() as stack:

        def start(*commands: Sequence[str], env: Mapping[str, str] = env, inherited: Sequence[int] = ()) -> Ask:
            # Files, because a full pipe would block the process.
            outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
            trial = _Trial(commands, env, inherited, outputs, limit_seconds)
            stack.callback(trial.end)
            return trial.answer

        def reduce(backend: str, env: Mapping[str, str] = env) -> Ask:
            try:
                listening = socket.create_server((_LOOPBACK, 0))
            except OSError as error:
                return partial(Answer, error=f"{_LOOPBACK} cannot be listened on: {error}")
            with listening:
                store, port = listening.fileno(), listening.getsockname()[1]
                ranks = [("reduce", backend, rank, str(port), str(store)) for rank in ("0", "1")]
                return start(*ranks, env=env, inherited=[store])

        whole = [gpu.uuid for gpu in gpus if not gpu.uuid.startswith("MIG-")]  # NCCL needs one GPU per process
        yield Trials(
            host=start(("host", host)),
            torch=start(("facts",)),
            gloo=reduce("gloo"),
            nccl=reduce("nccl", {**env, VISIBLE_GPUS: ",".join(whole[:2])}) if len(whole) > 1 else None,
            products={gpu.uuid: start(("product",), env={**env, VISIBLE_GPUS: gpu.uuid}) for gpu in gpus},
        )


class _Trial:
    """The processes of one trial."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        env: Mapping[str, str],
        inherited: Sequence[int],
        outputs: Sequence[IO[bytes]],
        limit_seconds: float,
    ) -> None:
        self._limit, self._start = limit_seconds, time.monotonic()
        self._outputs = outputs
        self._processes: list[Popen[bytes]] = []
        self._answer: Answer | None = None
        try:
            for words, output in zip(commands, outputs, strict=True):
                self._processes.append(_start(words, env, inherited, output))
        except OSError as error:  # too many processes, too little memory
            self._answer = Answer(error=f"cannot start a process: {error}")

    def answer(self) -> Answer:
        """Wait for all processes, or for the first that fails."""
        while self._answer is None:
            codes = [process.poll() for process in self._processes]
            failed = next((place for place, code in enumerate(codes) if code), None)
            if failed is not None:
                self._answer = Answer(error=self._reason(failed))
            elif None not in codes:
                self._answer = Answer(facts=json.loads(self._lines(0)[-1]))
            elif time.monotonic() - self._start > self._limit:
                self._answer = Answer(error=f"no answer within {self._limit:g} s")
            else:
                time.sleep(0.02)  # there is no portable way to wait for any of several processes
        return self._answer

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
            with suppress(TimeoutExpired):  # SIGKILL does not end a process in a driver that hangs
                process.wait(timeout=1)

    def _reason(self, place: int) -> str:
        code = self._processes[place].returncode
        if code < 0:
            return f"killed by {signal.strsignal(-code) or f'signal {-code}'}"
        return (self._lines(place) or [f"exit code {code}"])[-1]

    def _lines(self, place: int) -> list[str]:
        self._outputs[place].seek(0)
        return [line for line in self._outputs[place].read().decode(errors="replace").splitlines() if line.strip()]


def _start(words: Sequence[str], env: Mapping[str, str], inherited: Sequence[int], output: IO[bytes]) -> Popen[bytes]:
    return Popen(
        [sys.executable, "-P", str(_PROBE), *words],
        env=env,
        pass_fds=inherited,
        stdin=DEVNULL,
        stdout=output,
        stderr=STDOUT,
        preexec_fn=partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None,
    )
