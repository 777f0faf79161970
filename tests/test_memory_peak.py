"""The largest allocations at the peak, from snapshots as `torch.cuda.memory._snapshot` documents them."""

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.trainer.profile import LineMemory, MemoryPeak, memory_peak

TORCH, OWN, STDLIB = Path("/env/site-packages/torch"), Path("/env/site-packages/ddp_kit"), sysconfig.get_path("stdlib")
Event = dict[str, Any]


def frame(file: str, line: int = 7, name: str = "forward") -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


TORCH_FRAME, LOOP = frame(f"{TORCH}/nn/functional.py"), frame(f"{OWN}/trainer/step.py")


def user(line: int) -> list[dict[str, Any]]:
    """A stack, the innermost frame first."""
    return [TORCH_FRAME, frame("/home/me/model.py", line), TORCH_FRAME, LOOP, frame("/home/me/train.py", 99, "main")]


def alloc(address: int, size: int, frames: list[dict[str, Any]] | None = None) -> Event:
    return {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": frames or []}


def free(address: int, size: int) -> list[Event]:
    event = {"addr": address, "size": size, "stream": 0, "frames": []}
    return [{"action": "free_requested", **event}, {"action": "free_completed", **event}]


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": (size + 511) // 512 * 512, "requested_size": size, "state": state, "frames": []}


def segment(*blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    return {"device": device, "address": 0, "total_size": 2 << 20, "stream": 0, "blocks": list(blocks)}


def snapshot(*traces: list[Event], segments: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    return {"segments": list(segments), "device_traces": list(traces)}


def peak(*traces: list[Event], segments: tuple[dict[str, Any], ...] = ()) -> MemoryPeak | None:
    return memory_peak(snapshot(*traces, segments=segments), (TORCH, OWN))


def test_memory_peak_is_the_moment_with_the_most_bytes() -> None:
    events = [
        {"action": "segment_alloc", "addr": 0, "size": 2 << 20, "stream": 0, "frames": []},
        alloc(1, 100, user(7)), alloc(2, 300, user(8)), *free(1, 100), alloc(3, 250, user(8)), *free(2, 300),
        *free(3, 250), alloc(4, 500, user(9)),
    ]  # fmt: skip
    found = peak(events, segments=(segment(block(4, 500), block(2, 300, "inactive")),))
    assert found == MemoryPeak(550, 0, (LineMemory("/home/me/model.py", 8, "forward", 550, 2),))


def test_memory_peak_counts_earlier_allocations_without_a_line() -> None:
    events = [alloc(1, 100, user(7)), *free(50, 30), alloc(2, 200, user(8)), *free(60, 4000)]
    segments = (segment(block(1, 100), block(2, 200)), segment(block(70, 600), block(80, 9, "inactive")))
    found = peak(events, segments=segments)
    # 30 bytes were freed before the peak; 4000 after it; 600 are still there.
    assert found is not None
    assert (found.bytes, found.earlier) == (4900, 4600)
    assert [(each.line, each.bytes) for each in found.lines] == [(8, 200), (7, 100)]


def test_memory_peak_may_be_before_the_first_allocation() -> None:
    found = peak([*free(50, 1000), alloc(1, 100, user(7)), *free(1, 100)])
    assert found == MemoryPeak(1000, 1000, ())


def test_memory_peak_attributes_a_reused_address_to_its_last_use() -> None:
    found = peak([alloc(1, 100, user(7)), *free(1, 100), alloc(1, 200, user(8))], segments=(segment(block(1, 200)),))
    assert found == MemoryPeak(200, 0, (LineMemory("/home/me/model.py", 8, "forward", 200, 1),))


def test_memory_peak_does_not_count_a_dropped_free_twice() -> None:
    found = peak([alloc(1, 100, user(7)), alloc(1, 200, user(8))], segments=(segment(block(1, 200)),))
    assert found is not None
    assert (found.bytes, found.earlier) == (200, 0)


def test_memory_peak_excludes_memory_that_waits_for_another_stream() -> None:
    events = [alloc(1, 100, user(7)), free(1, 100)[0], alloc(2, 90, user(8))]
    found = peak(events, segments=(segment(block(1, 100, "active_awaiting_free"), block(2, 90)),))
    assert found is not None
    assert (found.bytes, found.lines[0].line) == (100, 7)


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([], ("", 0, "")),
        ([TORCH_FRAME, LOOP], ("", 0, "")),
        ([LOOP, frame("/home/me/train.py", 3, "main")], ("/home/me/train.py", 3, "main")),
        ([frame(f"{STDLIB}/contextlib.py"), frame("/home/me/train.py")], ("/home/me/train.py", 7, "forward")),
        ([frame(f"{STDLIB}/site-packages/lib/model.py")], (f"{STDLIB}/site-packages/lib/model.py", 7, "forward")),
        ([frame("/tmp/torchinductor_me/ab/cd.py"), frame("/home/me/a.py")], ("/home/me/a.py", 7, "forward")),
        ([frame("<string>"), frame("??", 0), frame("/home/me/a.py")], ("/home/me/a.py", 7, "forward")),
        ([frame("/env/site-packages/torchvision/ops.py")], ("/env/site-packages/torchvision/ops.py", 7, "forward")),
    ],
)
def test_memory_peak_attributes_allocations_to_the_innermost_user_line(
    frames: list[dict[str, Any]], place: tuple[str, int, str]
) -> None:
    found = peak([alloc(1, 100, frames)], segments=(segment(block(1, 100)),))
    assert found == MemoryPeak(100, 0, (LineMemory(*place, 100, 1),))


def test_memory_peak_of_several_gpus_is_that_of_the_fullest() -> None:
    first, second = [alloc(1, 100, user(7))], [alloc(1, 300, user(8))]
    segments = (segment(block(1, 100)), segment(block(1, 300), block(9, 50), device=1))
    found = peak(first, second, [], segments=segments)
    assert found == MemoryPeak(350, 50, (LineMemory("/home/me/model.py", 8, "forward", 300, 1),))


def test_memory_peak_keeps_the_largest_lines() -> None:
    events = [alloc(number, number, user(number)) for number in range(1, 31)]
    found = peak(events, segments=(segment(*(block(number, number) for number in range(1, 31))),))
    assert found is not None
    assert [each.line for each in found.lines] == list(range(30, 10, -1))
    assert found.earlier == 0, "what other lines have is not from before"


def test_memory_peak_without_events_is_none() -> None:
    assert peak([], [], segments=(segment(block(1, 100)),)) is None
