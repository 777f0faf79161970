"""Compares between the ranks in which order they run the units of FSDP, where that may differ.

Each unit gathers its weights from all ranks. Where a rank leaves one out that others run, their collectives no longer
belong together: they hang, or gather the weights of another unit without an error (pytorch#148334).

    before each unit of a pass, and at the end of the model's forward pass:
        the same unit as in the pass before                  -> go on; nothing is sent
        another one, or the first pass                       -> wait in the process group's store for all ranks
            a rank is at another unit                        -> LossError
            the others do not come: they ran what was left out, and wait in its collective    -> LossError
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from ddp_kit.errors import LossError
from ddp_kit.log import logger
from ddp_kit.torch_internals import default_store
from ddp_kit.world import World

SILENT_SECONDS = 5.0
"""The wait for other ranks before a line says so."""
TIMEOUT_SECONDS = 120.0
"""The wait for other ranks before it is an error. They may only be late, and come to the same place."""
_FIRST_TIMEOUT_SECONDS = 600.0  # as long as a collective's: in a first pass a rank may be compiling
_LONGEST_PAUSE = 0.25
_PREFIX = "ddp_kit/units"
_numbers = count()  # of the models that this process trains
_END = "the end of the pass"
_HINT = (
    "let all ranks run the same modules: decide what is left out by numbers that are the same on all of them, or "
    'multiply its result by 0. With parallel={"strategy": "ddp", "find_unused_parameters": True} they may differ'
)


class UnitOrder:
    """The order in which passes run the units. `units`: the modules by name, "" for the model itself."""

    def __init__(self, world: World, units: Mapping[str, nn.Module]) -> None:
        self._world = world
        self._store: Any = None  # a connection of its own
        self._prefix = f"{_PREFIX}/{next(_numbers)}"
        self._orders: dict[str, list[str]] = {}  # of the latest pass of each kind
        self._expected: list[str] | None = None  # None: outside of a pass, as in recomputation
        self._kind = ""
        self._seen: list[str] = []
        self._at = 0  # in `_expected`
        self._passes = self._compared = 0
        for name, unit in units.items():
            unit.register_forward_pre_hook(partial(self._before, name or "the model's begin"), prepend=True)
            if not name:
                unit.register_forward_hook(partial(self._before, "the model's end"))

    @contextmanager
    def in_pass(self, kind: str) -> Iterator[list[str]]:
        """The context of one forward pass; yields the list to which the names of its units are added as they run.

        `kind`: passes of one kind usually have the same order.

        Raises `LossError` where ranks differ.
        """
        self._kind, self._expected, self._seen, self._at = kind, self._orders.get(kind, []), [], 0
        self._passes += 1
        try:
            yield self._seen
            if self._at < len(self._expected) or not self._expected:
                self._compare(_END)
            self._orders[kind] = self._seen
        finally:
            self._expected = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, name: str, *_hook: Any) -> None:
        expected = self._expected
        if expected is None:
            return
        self._seen.append(name)
        if self._at < len(expected) and expected[self._at] == name:
            self._at += 1
            return
        self._compare(name)
        if name in expected[self._at :]:
            self._at = expected.index(name, self._at) + 1

    def _compare(self, place: str) -> None:
        """Wait until all ranks are at the same place."""
        if self._store is None:
            self._store = default_store().clone()  # type: ignore[attr-defined]
        store, rank = self._store, self._world.rank
        keys = [f"{self._prefix}/{self._compared}/{each}" for each in range(self._world.world_size)]
        before, self._compared = f"{self._prefix}/{self._compared - 1}/{rank}", self._compared + 1
        own = f"{place} in {self._kind} {self._passes}"
        store.set(keys[rank], own)
        self._wait(keys, own)
        self._check(keys, own)
        store.delete_key(before)  # all ranks have read it

    def _check(self, keys: list[str], own: str) -> list[int]:
        """The ranks that are not here yet. Raises `LossError` where one is elsewhere."""
        there = {rank: self._store.get(key).decode() for rank, key in enumerate(keys) if self._store.check([key])}
        if set(there.values()) != {own}:
            shown = ", ".join(f"rank {rank} is at {words}" for rank, words in there.items())
            raise LossError(f"the ranks do not run the same units of FSDP: {shown}", _HINT)
        return [rank for rank in range(self._world.world_size) if rank not in there]

    def _wait(self, keys: list[str], own: str) -> None:
        began, pause, warned = time.monotonic(), 0.0005, False
        limit = TIMEOUT_SECONDS if self._expected else _FIRST_TIMEOUT_SECONDS
        while not self._store.check(keys):
            waited = time.monotonic() - began
            if pause >= _LONGEST_PAUSE:
                missing = self._check(keys, own)
                if waited > limit:
                    error = LossError(f"{self._problem(own, missing)} after {limit:.0f} seconds", _HINT)
                    error.only_this_rank = True
                    raise error
                if waited > SILENT_SECONDS and self._expected and not warned:
                    warned = True
                    logger.warning("{}; after {:.0f} seconds this is an error", self._problem(own, missing), limit)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _problem(self, own: str, missing: list[int]) -> str:
        left = self._expected[self._at : self._at + 1] if self._expected else []
        before = f"where the pass before had {left[0]}" if left else "which the pass before did not have"
        others = ", ".join(map(str, missing))
        return f"rank {self._world.rank} is at {own}, {before}; rank {others} did not reach the same unit of FSDP"
