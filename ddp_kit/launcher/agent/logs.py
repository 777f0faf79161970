"""Where each worker's output goes: torch's settings for logs, and ours."""

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from ddp_kit.env import OUTPUT_LOG, RANK
from ddp_kit.launcher.output import Output
from ddp_kit.launcher.streams import Route, Streams, private_files


class Remembered(LogsSpecs):
    """torch's log settings, and what they have decided."""

    def __init__(self, inner: LogsSpecs) -> None:
        self._inner = inner
        self.dest = LogsDest()

    @property
    def root_log_dir(self) -> str:
        """torch's own."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Decide, and remember it."""
        with private_files():
            self.dest = self._inner.reify(envs)
        return self.dest


@dataclass(frozen=True)
class Console:
    """How the workers' output is shown."""

    direct: bool
    """Whether a stream that is only shown goes to the console by itself: there is one worker."""
    colour: bool
    template: str = ""
    """torch's --log-line-prefix-template."""
    keep: bool = False
    """Whether what is shown is also kept, in one file per rank."""

    def output(
        self, dest: LogsDest, name: str, envs: Mapping[int, Mapping[str, str]], is_ending: Callable[[int], bool]
    ) -> Output:
        """The streams of one round's workers, after torch's own settings for logs. `is_ending`: see `Output`."""
        return Output(self._streams(dest, name, envs), self.direct, self.colour, is_ending)

    def _streams(self, dest: LogsDest, name: str, envs: Mapping[int, Mapping[str, str]]) -> list[Streams]:
        found = []
        for local_rank, env in envs.items():
            rank = int(env[RANK])
            words = {"role_name": name, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
            label = Template(self.template).safe_substitute(words)
            kept = str(Path(dest.error_files[local_rank]).with_name(OUTPUT_LOG)) if self.keep else ""
            out = self._route(local_rank, dest.stdouts, dest.tee_stdouts, label, f"[{name}{local_rank}]:", kept)
            err = self._route(local_rank, dest.stderrs, dest.tee_stderrs, label, f"[{name}{local_rank}]:", kept)
            found.append(Streams(local_rank, rank, out, err))
        return found

    def _route(
        self, local_rank: int, files: dict[int, str], shown: dict[int, str], label: str, torchs: str, kept: str
    ) -> Route:
        file = files[local_rank]
        if not file:
            return Route(True, kept, label)
        return Route(local_rank in shown and file != os.devnull, file, label or torchs)
