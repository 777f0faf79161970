"""Where a step's time goes, on clocks that the tests set, and between two real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable

from ddp_kit.records import StepTimes
from ddp_kit.trainer import timing
from ddp_kit.trainer.timing import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    TRANSFER,
    DeviceClock,
    StepClock,
    step_clock,
)
from tests.support.launching import PROGRAMS, seconds

NOTHING = dict.fromkeys(("data", "transfer", "forward", "backward", "communication", "optimizer", "other"), 0.0)


def times(**seconds: float) -> StepTimes:
    return StepTimes(**NOTHING | seconds)


class Hands:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    moved = Hands()
    monkeypatch.setattr(timing, "perf_counter", moved)
    return moved


class Reduction(torch.autograd.Function):
    """What DistributedDataParallel does: it waits in a callback that it queues during the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, hands: Any, computing: float, waiting: float) -> Tensor:
        ctx.plan = hands, computing, waiting
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        hands, computing, waiting = ctx.plan

        def wait() -> None:
            hands.now += waiting

        hands.now += computing
        Variable._execution_engine.queue_callback(wait)
        return gradient, None, None, None


def reduced_backward(clock: StepClock, hands: Any, computing: float, waiting: float) -> None:
    loss = Reduction.apply(torch.ones((), requires_grad=True), hands, computing, waiting)
    phase = clock.watch(loss)
    loss.backward()
    clock.end(phase)


# --- on the host ----------------------------------------------------------------------------------------------------


def test_step_clock_assigns_each_phase_the_time_before_its_mark(hands: Hands) -> None:
    clock = StepClock()
    for _ in range(2):
        hands.now += 50  # an evaluation: no part of the step
        clock.start()
        for phase, passed in (DATA, 1), (TRANSFER, 2), (FORWARD, 3), (BACKWARD, 4), (DATA, 5), (OPTIMIZER, 6):
            hands.now += passed
            clock.end(phase)
    assert clock.read(25.0) == times(data=6, transfer=2, forward=3, backward=4, optimizer=6, other=4)


def test_step_clock_read_resets_the_times(hands: Hands) -> None:
    clock = StepClock()
    for passed in (3, 1):
        clock.start()
        hands.now += passed
        clock.end(FORWARD)
        assert clock.read(passed) == times(forward=passed)


def test_step_clock_times_are_never_negative(hands: Hands) -> None:
    clock = StepClock()
    clock.start()
    hands.now += 3
    clock.end(FORWARD)
    assert clock.read(step_seconds=2.9) == times(forward=3)
    assert clock.read(step_seconds=0.5) == times(other=0.5)


def test_step_clock_counts_waiting_for_the_reduction_as_communication(hands: Hands) -> None:
    clock = StepClock()
    clock.start()
    reduced_backward(clock, hands, computing=2, waiting=5)
    found = clock.read(7)
    assert found == times(backward=2, communication=5)
    assert (found.own, found.total) == (2, 7)


def test_step_clock_extrapolates_from_the_watched_short_steps(hands: Hands) -> None:
    clock = StepClock()
    watched = []
    for _ in range(8):
        clock.start()
        hands.now += 0.0006
        clock.end(FORWARD)
        reduced_backward(clock, hands, computing=0.0001, waiting=0.0003)
        watched.append(clock._watched)
    assert watched == [1, 1, 1, 2, 2, 2, 3, 3]
    found = clock.read(0.001)
    assert found.communication == pytest.approx(0.0003)
    assert found.backward == pytest.approx(0.0001)


def test_step_clock_limits_communication_to_the_measured_time(hands: Hands) -> None:
    clock = StepClock()
    for waiting in (0.004, 0, 0, 0):  # only the first of them is watched
        clock._watched_at = hands.now if waiting == 0 else 0.0
        clock.start()
        reduced_backward(clock, hands, computing=0, waiting=waiting)
    found = clock.read(0.001)
    assert found.communication == pytest.approx(0.001)
    assert found.backward >= 0


def test_step_clock_ignores_a_loss_without_gradient() -> None:
    assert StepClock().watch(torch.ones(())) == BACKWARD


# --- on a device that runs behind -----------------------------------------------------------------------------------


class Device:
    """A stand-in for a GPU: `now` is its own time, and it gets to what was recorded when the test lets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorded = self.finished = 0
        self.events = 0

    def new_event(self) -> "DeviceEvent":
        self.events += 1
        return DeviceEvent(self)

    def catch_up(self) -> None:
        self.finished = self.recorded

    def has_finished(self) -> bool:
        return self.finished == self.recorded


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.number, self.time = 0, 0.0

    def record(self) -> None:
        self.device.recorded += 1
        self.number, self.time = self.device.recorded, self.device.now

    def query(self) -> bool:
        return self.number <= self.device.finished

    def elapsed_time(self, end_event: "DeviceEvent") -> float:
        assert self.query(), "CUDA raises here"
        assert end_event.query(), "CUDA raises here"
        return (end_event.time - self.time) * 1000


@pytest.fixture
def device() -> Device:
    return Device()


def step(clock: StepClock, device: Device, forward: float = 2, optimizer: float = 1) -> None:
    clock.start()
    device.now += forward
    clock.end(FORWARD)
    device.now += optimizer
    clock.end(OPTIMIZER)


def test_device_clock_counts_steps_after_the_device_has_finished_them(device: Device) -> None:
    clock = DeviceClock(device.new_event, device.has_finished)
    step(clock, device)
    assert clock.read(4) == times(other=4)
    step(clock, device, forward=6)
    device.catch_up()
    step(clock, device, forward=100)
    assert clock.read(6) == times(forward=4, optimizer=1, other=1)
    device.catch_up()
    assert clock.read(101) == times(forward=100, optimizer=1)


def test_device_clock_reuses_events(device: Device) -> None:
    clock = DeviceClock(device.new_event, device.has_finished)
    for _ in range(100):
        step(clock, device)
        device.catch_up()
    assert clock.read(3) == times(forward=2, optimizer=1)
    assert device.events == 3


def test_device_clock_far_behind_stops_recording_events(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MOST_WAITING", 30)
    clock = DeviceClock(device.new_event, device.has_finished)
    for _ in range(100):
        step(clock, device)
    assert device.events == 30
    device.catch_up()
    assert clock.read(3) == times(forward=2, optimizer=1)
    step(clock, device, forward=7)
    device.catch_up()
    assert clock.read(8) == times(forward=7, optimizer=1)
    assert device.events == 30


def test_device_clock_counts_waiting_for_the_reduction_as_communication(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_SECONDS_BETWEEN_WATCHED", 0.0)
    clock = DeviceClock(device.new_event, device.has_finished)
    for waiting in (5, 1):
        clock.start()
        reduced_backward(clock, device, computing=2, waiting=waiting)
        device.catch_up()
    assert clock.read(5) == times(backward=2, communication=3)


def test_device_clock_of_a_device_always_behind_reports_no_idle_steps(device: Device) -> None:
    clock = DeviceClock(device.new_event, device.has_finished)
    step(clock, device)
    for _ in range(4):
        reached = device.recorded
        step(clock, device)
        device.finished = reached
    clock.read(3)
    assert clock.idle == 1 / 5, "the first step"
    step(clock, device)
    clock.read(3)
    assert clock.idle == 0


@pytest.mark.parametrize("waits_in", ["the forward pass", "the body of the loop", "both"])
def test_device_clock_counts_a_step_in_which_the_host_waits_as_idle_once(device: Device, waits_in: str) -> None:
    clock = DeviceClock(device.new_event, device.has_finished)
    step(clock, device)
    clock.read(3)
    for _ in range(4):
        clock.start()
        if waits_in != "the body of the loop":
            device.catch_up()
        clock.end(FORWARD)
        clock.end(BACKWARD)
        clock.end(OPTIMIZER)
        if waits_in != "the forward pass":
            device.catch_up()
    clock.read(3)
    assert clock.idle == (3 / 4 if waits_in == "the body of the loop" else 1)


def test_step_clock_for_a_device_has_the_matching_class() -> None:
    assert type(step_clock(torch.device("cpu"))) is StepClock
    assert type(step_clock(torch.device("cuda", 0))) is DeviceClock


@pytest.mark.gpu
def test_device_clock_times_a_gpu_without_waiting_for_it() -> None:
    device = torch.device("cuda", 0)
    clock = step_clock(device)
    weight = torch.randn(2048, 2048, device=device, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            clock.start()
            loss = (weight @ weight).sum()
            clock.end(FORWARD)
            phase = clock.watch(loss)
            loss.backward()
            clock.end(phase)
        early = clock.read(1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert early.total == pytest.approx(1.0)
    clock.start()
    torch.cuda.synchronize()
    found = clock.read(1.0)
    assert found.forward > 0
    assert found.backward > found.communication >= 0


@pytest.mark.gpu
def test_device_clock_reports_a_gpu_idle_only_after_it_has_finished() -> None:
    device = torch.device("cuda", 0)
    clock = step_clock(device)

    def two_steps(busy: bool) -> float:
        for _ in range(2):
            torch.cuda.synchronize()
            if busy:
                torch.cuda._sleep(1_000_000_000)  # cycles of the GPU: about half a second
            clock.start()
            clock.end(FORWARD)
        clock.read(1.0)
        return clock.idle

    assert two_steps(busy=True) == 0
    assert two_steps(busy=False) == 1


@pytest.mark.slow
def test_step_clock_of_a_rank_that_waits_for_another_counts_communication(start: Any, tmp_path: Path) -> None:
    done = start("ddpkit", 2, PROGRAMS / "late_rank.py", str(tmp_path / "store"), str(seconds(20)))
    assert done.returncode == 0, done.stderr
    first, late = sorted(map(json.loads, done.stdout.splitlines()), key=lambda said: said["rank"])
    waits = []
    for number, (_, reduced_at) in enumerate(mark for mark in first["marks"] if mark[0] == timing._EXPOSED):
        computed_at = max(at for phase, at in first["marks"] if phase == BACKWARD and at <= reduced_at)
        assert computed_at < late["began"][number] < reduced_at
        waits.append(reduced_at - computed_at)
    assert len(waits) == 3
    assert first["communication"] == pytest.approx(sum(waits) / 3)


def test_step_clock_mark_of_communication_adds_to_it(hands: Hands) -> None:
    clock = StepClock()
    clock.start()
    reduced_backward(clock, hands, computing=2, waiting=5)
    hands.now += 1
    clock.end(COMMUNICATION)
    assert clock.read(8) == times(backward=2, communication=6)
