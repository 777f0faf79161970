"""A forked worker's collectives, counted beside its script, for a launcher that watches it."""

import _thread
import sys
import time
from contextlib import suppress

from ddp_kit.contract import HeartbeatField, heartbeat_memory


def count_collectives(every: float) -> None:
    """Note how many have been begun, every so many seconds, in a thread that nobody waits for."""
    memory = heartbeat_memory()
    if memory is not None:
        _thread.start_new_thread(_count, (memory, every))


def _count(memory: "memoryview[int]", every: float) -> None:
    with suppress(BaseException):  # at its end the process sets the names of torch's module to None
        while True:
            time.sleep(every)
            _note(memory)


def _note(memory: "memoryview[int]") -> None:
    """In a function of its own: between two counts nothing here keeps a group alive."""
    module = sys.modules["torch.distributed.distributed_c10d"]
    default, groups = module.GroupMember.WORLD, list(module._world.pg_map)
    if default is not None:
        memory[HeartbeatField.COLLECTIVES] = _begun(default)
        memory[HeartbeatField.ALL_COLLECTIVES] = sum(map(_begun, groups))


def _begun(group: object) -> int:
    """The collectives begun in a group, by whichever of its backends."""
    backends = {id(backend): backend for backend in map(group._get_backend, group._device_types)}  # type: ignore[attr-defined]
    total = 0
    for backend in backends.values():
        with suppress(RuntimeError, AttributeError):  # one that does not count
            total += backend._get_sequence_number_for_group()
    return total
