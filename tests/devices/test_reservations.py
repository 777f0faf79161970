"""Two launches never get the same GPU: real processes that choose at the same time and die in every way."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_kit.devices import reservations
from ddp_kit.devices.cpus import Cpus
from ddp_kit.devices.gpus import Gpu
from ddp_kit.errors import UsageError
from ddp_kit.launcher import spec
from ddp_kit.launcher.plan import Plan, WorkerResources, make
from tests.support.launching import DDPKIT, ROOT, SUPPORT, clean_environment, run, seconds, started

CHOOSER = [sys.executable, str(SUPPORT / "chooser.py")]

Machine = Callable[..., dict[str, str]]


class Launches:
    """Launches on one machine, each in a session of its own."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def choose(self, *asked: str, answers: int = 0) -> dict[int, str]:
        """Start a launch for each of the words after --gpus; all choose at once. What each has, by its pid."""
        env = clean_environment(self.env | {"CHOOSING_SECONDS": str(seconds(120))})
        start, go = os.pipe()
        told, tell = os.pipe()
        for words in asked:
            command = [*CHOOSER, *words.split()]
            chooser = subprocess.Popen(command, stdin=start, stdout=tell, env=env, start_new_session=True)
            self.running[chooser.pid] = chooser
        for descriptor in (start, tell, go):  # the last one: it is the end of their standard input
            os.close(descriptor)
        with os.fdopen(told) as lines:
            found = [lines.readline().split(" has ") for _ in range(answers or len(asked))]
        return {int(pid): what.strip() for pid, what in found}

    def end(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.killpg(pid, number)
        self.running.pop(pid).wait()


@pytest.fixture
def launches_on() -> Iterator[Callable[[dict[str, str]], Launches]]:
    made: list[Launches] = []

    def on(env: dict[str, str]) -> Launches:
        made.append(Launches(env))
        return made[-1]

    yield on
    for launches in made:
        for pid in list(launches.running):
            launches.end(pid)


On = Callable[[dict[str, str]], Launches]


def winners(results: dict[int, str]) -> dict[int, str]:
    return {pid: what for pid, what in results.items() if not what.startswith("none")}


@pytest.mark.slow
def test_reservations_of_fifty_launches_give_four_gpus_to_four_of_them(launches_on: On, machine: Machine) -> None:
    results = launches_on(machine(0, 0, 0, 0)).choose(*["1"] * 50)
    have = winners(results)
    assert sorted(have.values()) == ["0", "1", "2", "3"]
    told = [what for pid, what in results.items() if pid not in have]
    assert len(told) == 46
    for line in told:
        assert "--gpus 1 is not available: other launches hold 4 of the 4 visible GPUs" in line
        assert all(f"held by pid {pid} of " in line for pid in have)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_reservation_of_a_launcher_that_dies_is_released_at_once(
    launches_on: On, machine: Machine, number: signal.Signals
) -> None:
    launches = launches_on(machine(0, 0))
    have = launches.choose("1", "1")
    dying = next(iter(have))
    launches.end(dying, number)
    (again,) = launches.choose("1").values()
    assert again == have[dying]


@pytest.mark.slow
def test_reservations_of_the_same_gpus_give_all_of_them_to_one_launch(launches_on: On, machine: Machine) -> None:
    launches = launches_on(machine(0, 0, 0, 0))
    have = winners(launches.choose(*["4", "all", "3,2,1,0", "free:4"] * 2))
    assert list(have.values()) in (["0,1,2,3"], ["3,2,1,0"])


@pytest.mark.slow
def test_launch_inside_another_may_use_its_gpus(launches_on: On, machine: Machine) -> None:
    launches = launches_on(machine(0, 0))
    assert list(launches.choose("0,1 all", answers=2).values()) == ["0,1", "0,1"]
    (other,) = launches.choose("1").values()
    assert other.startswith("none")


@pytest.mark.slow
def test_launch_command_holds_its_gpus_while_its_job_runs(
    launches_on: On, machine: Machine, script: Callable[[str], Path]
) -> None:
    environment = launches_on(machine(0, 0)).env
    holds = script("say(os.environ['CUDA_VISIBLE_DEVICES']); sys.stdin.read()")
    command = [DDPKIT, "launch", "--gpus", 1, holds]
    with (
        started(*command, env=environment, stdin=subprocess.PIPE) as one,
        started(*command, env=environment, stdin=subprocess.PIPE) as other,
    ):
        assert one.stdout is not None
        assert other.stdout is not None
        assert sorted([one.stdout.readline(), other.stdout.readline()]) == ["0\n", "1\n"]
        third = run(*command, env=environment)
        shown = run(DDPKIT, "devices", env=environment).stdout
        one.kill()
        other.communicate(timeout=seconds(60))
    assert third.returncode == 2
    for launcher in (one, other):
        assert f"held by pid {launcher.pid} of " in third.stderr
        assert f"held by pid {launcher.pid} of " in shown
    assert "ddpkit launch --gpus 1" in shown
    assert other.returncode == 0
    assert "held by" not in run(DDPKIT, "devices", env=environment).stdout


@pytest.mark.slow
def test_torchrun_that_replaces_the_launcher_holds_its_gpus(
    launches_on: On, machine: Machine, script: Callable[[str], Path]
) -> None:
    environment = launches_on(machine(0)).env
    holds = script("say(os.environ['CUDA_VISIBLE_DEVICES']); sys.stdin.read()")
    command = [DDPKIT, "launch", "--gpus", 1, "--event-log-handler", "console", holds]
    with started(*command, env=environment, stdin=subprocess.PIPE) as torchrun:
        assert torchrun.stdout is not None
        assert torchrun.stdout.readline() == "0\n"
        shown = run(DDPKIT, "devices", env=environment).stdout
        torchrun.communicate(timeout=seconds(60))
    assert f"held by pid {torchrun.pid} of " in shown
    assert "torch.distributed.run" in shown
    assert "held by" not in run(DDPKIT, "devices", env=environment).stdout


@pytest.fixture
def plan() -> Plan:
    """A plan on one GPU that no other test knows of."""
    gpu = Gpu(0, f"GPU-{uuid.uuid4()}", "Fake GPU", memory_total=0, memory_used=0)
    asked = spec.parse(["--nproc-per-node", "2", "train.py"], {})
    return replace(make(asked, (), {}, "id", Cpus({0: 0}), {}), workers=(WorkerResources((gpu,)), WorkerResources()))


def uuid_of(plan: Plan) -> str:
    (gpu,) = plan.workers[0].gpus
    assert gpu is not None
    return gpu.uuid


def test_reservation_lasts_until_the_end_of_the_block(plan: Plan) -> None:
    with reservations.reserved(lambda held: plan, lambda made: made.held_gpus) as settled:
        assert settled is plan
        assert reservations.holders()[uuid_of(plan)].pid == os.getpid()
    assert uuid_of(plan) not in reservations.holders()


def test_reservation_of_a_plan_that_is_only_shown_holds_nothing(plan: Plan) -> None:
    with reservations.reserved(lambda held: plan, lambda _: ()):
        assert uuid_of(plan) not in reservations.holders()


def test_reservation_of_a_plan_that_is_refused_holds_nothing(plan: Plan) -> None:
    def refuse(held: object) -> Plan:
        raise UsageError("no", "no")

    with pytest.raises(UsageError), reservations.reserved(refuse, lambda made: made.held_gpus):
        pass
    with reservations.reserved(lambda held: plan, lambda made: made.held_gpus):
        pass


def test_reservation_of_a_gpu_taken_at_the_same_moment_is_refused(plan: Plan) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0{reservations._GPU}/{uuid_of(plan)}")
        taken = pytest.raises(UsageError, match="GPU 0 cannot be reserved: Address already in use")
        with taken, reservations.reserved(lambda held: plan, lambda made: made.held_gpus):
            pass


def test_reservation_does_not_wait_forever_for_a_launch_that_hangs(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "_TIMEOUT_SECONDS", seconds(0.05))
    monkeypatch.setattr(reservations, "_CHOOSING", f"ddpkit-choosing-{uuid.uuid4()}")  # other tests' launches continue
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hanging:
        hanging.bind(f"\0{reservations._CHOOSING}")
        with reservations.reserved(lambda held: plan, lambda made: made.held_gpus):
            assert uuid_of(plan) in reservations.holders()


def test_reservations_ignore_sockets_with_other_names() -> None:
    names = (b"\xff\xfe", b"ddpkit-gpu-holder/", b"ddpkit-gpu-holder/x/y/z")
    ours = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in names]
    try:
        for mark, name in zip(ours, names, strict=True):
            mark.bind(b"\0" + name + uuid.uuid4().hex.encode())
        assert not any(gpu.startswith("z") for gpu in reservations.holders())
    finally:
        for mark in ours:
            mark.close()
