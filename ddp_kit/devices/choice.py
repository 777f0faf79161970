"""Choose the GPUs of a launch from the visible GPUs that no other launch holds."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_kit.devices.gpus import Gpu, selects, visible
from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.errors import UsageError

Chosen = tuple[tuple[str, Gpu], ...]
"""GPUs, each with the number or UUID that selects it in CUDA_VISIBLE_DEVICES."""


def choose(
    asked: str | None, command: str, machine: tuple[Gpu, ...], env: Mapping[str, str], held: Mapping[str, str]
) -> Chosen:
    """Choose the GPUs of a launch. Raises `UsageError` if the requested GPUs are not available.

    `asked`: the value of --gpus, or None if the option was not given. The default is all visible GPUs, if any.
    `held`: GPU UUID -> the other launch that holds the GPU.
    """
    request = _Request(asked, command, machine, visible(machine, env), env.get(VISIBLE_GPUS), held)
    if asked is None and not request.seen:
        return ()
    value = "all" if asked is None else asked.strip()
    free = value.removeprefix("free:")
    if value == "all":
        return request.all()
    if value.isdecimal():
        return request.number(int(value))
    if free != value and free.isdecimal():
        return request.free(int(free))
    return request.named([word.strip() for word in value.split(",") if word.strip()])


@dataclass(frozen=True)
class _Request:
    asked: str | None
    command: str
    """The script and its arguments as the user typed them, for use in hints."""
    machine: tuple[Gpu, ...]
    seen: Chosen
    mask: str | None
    held: Mapping[str, str]

    def all(self) -> Chosen:
        if not self.seen:
            raise self._not_found(2)
        return self._check_not_held(self.seen)

    def number(self, count: int) -> Chosen:
        if count == 0:
            raise UsageError("--gpus 0 requests no GPU", "to use only GPU 0, use `--gpus 0,` with a trailing comma")
        if count > len(self.seen):
            raise self._not_found(count)
        available = self._not_held()
        if count > len(available):
            raise self._refusal(
                f"other launches hold {len(self.seen) - len(available)} of the {len(self.seen)} visible GPUs", count
            )
        first = sorted(available, key=lambda pair: (pair[1].busy, len(pair[1].processes), pair[1].memory_used))
        return tuple(pair for pair in self.seen if pair in first[:count])

    def free(self, count: int) -> Chosen:
        if count == 0:
            raise UsageError("--gpus free:0 requests no GPU", "use at least free:1")
        if count > len(self.seen):
            raise self._not_found(count)
        free = [pair for pair in self._not_held() if not pair[1].busy]
        if count > len(free):
            raise self._refusal(f"found {len(free)} free among {len(self.seen)} visible GPUs", count)
        return tuple(free[:count])

    def named(self, names: list[str]) -> Chosen:
        if not names or not all(word.isdecimal() or word.startswith(("GPU-", "MIG-")) for word in names):
            raise UsageError(
                f"--gpus {self.asked!r} is not a number of GPUs, `all`, `free:N`, or a list of GPU numbers or UUIDs",
                "use, for example, --gpus 2, --gpus all, --gpus free:2 or --gpus 0,2; `ddpkit devices` lists the GPUs",
            )
        chosen = tuple(self._one(word, len(names)) for word in names)
        gpu, times = Counter(gpu for _, gpu in chosen).most_common(1)[0]
        if times > 1:
            raise UsageError(
                f"--gpus {self.asked} names GPU {gpu.label} more than once",
                "list each GPU once: ddpkit starts one process per GPU",
            )
        return self._check_not_held(chosen)

    def _one(self, word: str, count: int) -> tuple[str, Gpu]:
        if word.isdecimal():
            matches = self.seen[int(word) : int(word) + 1]
        else:
            matches = tuple(pair for pair in self.seen if selects(word, pair[1]))
        if len(matches) > 1:
            labels = ", ".join(gpu.label for _, gpu in matches)
            raise UsageError(
                f"--gpus {self.asked}: the UUIDs of GPUs {labels} all start with {word}",
                "use enough characters of the UUID to select one GPU",
            )
        if not matches:
            which = "" if word.isdecimal() else f", none of which matches {word}"
            raise self._not_found(count, which)
        return matches[0]

    def _not_held(self) -> Chosen:
        """The visible GPUs that no other launch holds."""
        return tuple(pair for pair in self.seen if pair[1].uuid not in self.held)

    def _check_not_held(self, chosen: Chosen) -> Chosen:
        taken = [gpu.label for _, gpu in chosen if gpu.uuid in self.held]
        if taken:
            many = f"GPUs {', '.join(taken)} are" if len(taken) > 1 else f"GPU {taken[0]} is"
            raise self._refusal(f"{many} held by another launch", len(chosen))
        return chosen

    def _not_found(self, count: int, which: str = "") -> UsageError:
        if not self.machine:
            return UsageError(
                f"{self._wanted()} is not available: this machine has no NVIDIA GPU, or no driver for one",
                self._command(f"--nproc-per-node {count}", "to train on the CPU"),
            )
        summary = f"found {len(self.seen)}" if self.seen else "none of these is usable"
        if self.mask is not None:
            summary += f" (limited by {VISIBLE_GPUS}={self.mask})"
        return self._refusal(f"{summary}{which}", count)

    def _refusal(self, why: str, count: int) -> UsageError:
        lines = [self._gpu_text(position, gpu) for position, (_, gpu) in enumerate(self.seen)]
        listed = "\n    ".join(lines or [gpu.described(self.held.get(gpu.uuid, "")) for gpu in self.machine])
        return UsageError(f"{self._wanted()} is not available: {why}:\n    {listed}", self._hint(count))

    def _gpu_text(self, position: int, gpu: Gpu) -> str:
        line = gpu.described(self.held.get(gpu.uuid, ""))
        if gpu.label == str(position):
            return line
        return f"position {position} is GPU {line}"

    def _wanted(self) -> str:
        return "the default (all visible GPUs)" if self.asked is None else f"--gpus {self.asked}"

    def _command(self, flags: str, why: str) -> str:
        return f"run `ddpkit launch {flags} {self.command}` {why}"

    def _hint(self, count: int) -> str:
        available = self._not_held()
        free = [pair for pair in available if not pair[1].busy]
        only_free = (self.asked or "").strip().startswith("free:")
        if only_free and free:
            return self._command(f"--gpus free:{min(count, len(free))}", "to use the free GPUs")
        if available:
            return self._command(f"--gpus {min(count, len(available))}", "to use the available GPUs, free ones first")
        if self.seen:
            return self._command(
                f"--nproc-per-node {count}", "to share GPUs with those launches, or wait for them to end"
            )
        return self._command(f"--nproc-per-node {count}", "to train on the CPU")
