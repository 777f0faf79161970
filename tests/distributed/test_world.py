"""This process among the others."""

import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddp_kit.distributed import world
from ddp_kit.distributed.world import decoded, encoded, random_states_kept, seed_everything, seed_generators
from ddp_kit.errors import WorldError
from tests.support.launching import PROGRAMS, SUPPORT

CPU = torch.device("cpu")
MEETING = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}


def test_join_of_one_process_makes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = world.join()
    assert (found.rank, found.world_size, found.is_main) == (0, 1, True)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_join_uses_a_group_that_the_script_has_made(
    start: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    run = start("ddpkit", 2, PROGRAMS / "own_process_group.py", env={"MEETING": str(tmp_path / "meeting")})
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["0 2 True", "1 2 False"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["together", "late"])
def test_all_ranks_end_has_the_same_result_on_a_late_rank(
    start: Callable[..., "subprocess.CompletedProcess[str]"], when: str
) -> None:
    run = start("ddpkit", 3, PROGRAMS / "ends_late.py", when)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"{rank} {when == 'together'} True" for rank in range(3)]


@pytest.mark.slow
def test_rank_that_works_after_the_others_does_not_keep_them_from_ending(
    start: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    run = start("ddpkit", 2, PROGRAMS / "works_after_the_others.py", env={"OMP_NUM_THREADS": "1"})
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_seed_everything_is_repeatable_and_differs_between_ranks() -> None:
    def drawn(rank: int) -> tuple[float, float, float]:
        seed_everything(3, rank)
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    assert drawn(0) == drawn(0)
    assert not set(drawn(0)) & set(drawn(1))


def test_random_states_kept_restores_the_generators() -> None:
    seed_everything(1, 0)
    with random_states_kept():
        seed_generators(5)
        within = random.random(), float(np.random.rand()), torch.rand(()).item()
    after = random.random(), float(np.random.rand()), torch.rand(()).item()
    seed_everything(1, 0)
    assert after == (random.random(), float(np.random.rand()), torch.rand(()).item())
    assert not set(after) & set(within)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A node with one GPU and two processes, as rank 1 sees it; and how process groups are made there."""
    made: list[dict[str, object]] = []
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, **MEETING}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(
        torch.distributed, "rendezvous", lambda url, timeout: iter([(torch.distributed.HashStore(), 1, 2)])
    )
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda backend, **rest: made.append({"backend": backend, **rest})
    )
    monkeypatch.setattr(world.atexit, "register", lambda *_: None)
    return made


def test_join_with_more_processes_than_gpus_refuses_the_last_rank(
    one_gpu: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError, match="rank 2 has no GPU: 3 processes on this node; visible GPUs: 2") as caught:
        world.join()
    assert "share_gpus" in caught.value.hint
    assert not one_gpu


@pytest.mark.slow
def test_join_with_one_visible_gpu_per_process_uses_it_if_no_other_rank_does(
    start: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    main, env = PROGRAMS / "one_gpu_each.py", {"PYTHONPATH": str(SUPPORT)}
    run = start("ddpkit", 2, main, "own", env=env)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [f"{rank} cuda:0 cpu:gloo,cuda:nccl cuda:0" for rank in range(2)]
    run = start("ddpkit", 2, main, "same", env=env)
    assert run.returncode == 1
    assert re.search(r"rank [01] has no GPU: 2 processes on this node; visible GPUs: 1\n", run.stderr), run.stderr
    assert "share_gpus" in run.stderr


def test_ranks_that_share_a_gpu_reduce_over_gloo(one_gpu: list[dict[str, object]]) -> None:
    assert world.join(share_gpus=True).device == torch.device("cuda", 0)
    assert [(group["backend"], group["device_id"]) for group in one_gpu] == [("gloo", None)]


def test_ranks_with_a_gpu_each_reduce_over_nccl(
    one_gpu: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert world.join().device == torch.device("cuda", 1)
    assert [(group["backend"], group["device_id"]) for group in one_gpu] == [
        ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))
    ]


@pytest.mark.parametrize(("gpus", "rank", "own"), [(4, 0, (0, 1)), (4, 1, (2, 3)), (3, 1, None)])
def test_join_with_several_gpus_per_process_binds_nccl_to_none(
    one_gpu: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, gpus: int, rank: int, own: tuple[int, ...] | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    monkeypatch.setenv("DDPKIT_GPUS_PER_PROCESS", "2")
    if own is None:
        with pytest.raises(
            WorldError, match="rank 1 needs 2 GPUs, which are not available: 2 processes on this node; visible GPUs: 3"
        ):
            world.join()
        return
    found = world.join()
    assert found.gpus == tuple(torch.device("cuda", index) for index in own)
    assert found.device == found.gpus[0]
    assert [(group["backend"], group["device_id"]) for group in one_gpu] == [("cpu:gloo,cuda:nccl", None)]


@pytest.mark.parametrize("number", ["0", "two", ""])
def test_join_with_an_invalid_number_of_gpus_per_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setenv("DDPKIT_GPUS_PER_PROCESS", number)
    with pytest.raises(WorldError, match="DDPKIT_GPUS_PER_PROCESS="):
        world.join()


def test_random_states_of_all_gpus_of_a_process_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {index: torch.full((16,), index, dtype=torch.uint8) for index in range(4)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": now[torch.device(device).index or 0].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: now.update({index: state}))
    gpus = (torch.device("cuda", 2), torch.device("cuda", 3))
    states = world.random_states(world.World(1, 2, 1, 2, 0, gpus[0], gpus))
    now |= {index: torch.zeros(16, dtype=torch.uint8) for index in now}
    world.set_random_states(decoded(encoded(states)))
    assert [now[index].unique().tolist() for index in range(4)] == [[0], [0], [2], [3]]
