"""From what was asked to what will be done: which GPUs, how many processes, where they meet."""

import pytest

from ddp_kit.errors import UsageError
from ddp_kit.launcher import agent, plan, spec
from ddp_kit.launcher.devices import Gpu

GIB = 1024**3


def machine(*processes: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index, f"GPU-{index}{index}-uuid", "Fake GPU", 80 * GIB, count * GIB, count)
        for index, count in enumerate(processes)
    )


def planned(words: str, gpus: tuple[Gpu, ...] = (), env: dict[str, str] | None = None) -> plan.Plan:
    asked = spec.parse(words.split(), agent.torchrun_parser(), env or {})
    return plan.make(asked, gpus, env or {}, run_id="run-1")


def gpus_of(words: str, gpus: tuple[Gpu, ...], env: dict[str, str] | None = None) -> tuple[str, str]:
    made = planned(words, gpus, env)
    return made.env["CUDA_VISIBLE_DEVICES"], made.torchrun["nproc_per_node"]


def test_without_a_number_there_is_one_process_per_visible_gpu_and_one_without_any() -> None:
    assert planned("train.py").torchrun["nproc_per_node"] == "1"
    made = planned("train.py", machine(0, 0, 0))
    assert made.torchrun["nproc_per_node"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in made.env
    assert planned("train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1"}).torchrun["nproc_per_node"] == "1"


def test_torchrun_s_own_ways_to_say_a_number_stay() -> None:
    assert planned("--nproc_per_node=auto train.py", machine(0, 0)).torchrun["nproc_per_node"] == "auto"
    assert planned("train.py", machine(0, 0), {"PET_NPROC_PER_NODE": "5"}).torchrun["nproc_per_node"] == "5"


def test_free_gpus_come_first_and_stay_in_order() -> None:
    assert gpus_of("--gpus 2 train.py", machine(1, 0, 2, 0)) == ("1,3", "2")
    assert gpus_of("--gpus 3 train.py", machine(1, 0, 2, 0)) == ("0,1,3", "3")


def test_all_and_a_list_of_positions() -> None:
    assert gpus_of("--gpus all train.py", machine(1, 0)) == ("0,1", "2")
    assert gpus_of("--gpus 2,0 train.py", machine(0, 0, 0)) == ("2,0", "2")
    assert gpus_of("--gpus 0, train.py", machine(0, 0, 0)) == ("0", "1")


def test_positions_are_those_in_the_user_s_own_mask() -> None:
    mask = {"CUDA_VISIBLE_DEVICES": "3,GPU-11,0"}
    assert gpus_of("--gpus 0,1 train.py", machine(0, 0, 0, 0), mask) == ("3,GPU-11", "2")
    assert "CUDA_DEVICE_ORDER" not in planned("--gpus 1 train.py", machine(0, 0, 0, 0), mask).env
    assert planned("--gpus 1 train.py", machine(0, 0)).env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_what_follows_an_invalid_entry_of_the_mask_is_not_seen_as_in_cuda() -> None:
    with pytest.raises(UsageError, match="found 1 .limited by CUDA_VISIBLE_DEVICES.:\n    0: Fake GPU"):
        planned("--gpus 2 train.py", machine(0, 0, 0), {"CUDA_VISIBLE_DEVICES": "0,-1,2"})


@pytest.mark.parametrize("words", ["--gpus 3", "--gpus 0,2"])
def test_more_gpus_than_there_are_lists_what_there_is(words: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(f"{words} train.py", machine(0, 2))
    assert "found 2:" in caught.value.message
    assert "1: Fake GPU, 2.0 of 80 GiB used, 2 running on it" in caught.value.message
    assert "--gpus 2 train.py" in caught.value.hint


def test_gpus_on_a_machine_with_none_says_what_to_type_instead() -> None:
    with pytest.raises(UsageError, match="this machine has no NVIDIA GPU") as caught:
        planned("--gpus 4 train.py")
    assert "ddpkit launch --nproc-per-node 4 train.py" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "said"), [("0", "asks for no GPU"), ("two", "neither"), ("1,1", "different"), (",", "neither")]
)
def test_other_words_after_gpus_are_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(f"--gpus {words} train.py", machine(0, 0))


def test_a_mig_device_is_taken_at_its_word() -> None:
    assert gpus_of("--gpus 1 train.py", machine(0), {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}) == ("MIG-1", "1")
    assert planned("train.py", machine(0), {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}).torchrun["nproc_per_node"] == "2"


def test_gpus_and_processes_that_disagree_are_refused() -> None:
    with pytest.raises(UsageError, match="--gpus 2 means 2 processes, one per GPU, but --nproc-per-node is 4"):
        planned("--gpus 2 --nproc-per-node 4 train.py", machine(0, 0))


def test_one_node_meets_on_loopback_at_a_free_port() -> None:
    for words in ("train.py", "--standalone --nnodes 1 train.py"):
        settings = planned(words).torchrun
        assert (settings["rdzv_backend"], settings["rdzv_endpoint"]) == ("c10d", "localhost:0")
        assert (settings["rdzv_id"], settings["local_addr"]) == ("run-1", "127.0.0.1")


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes 2",
        "--nnodes 1:2",
        "--master_port=1",
        "--master-port 29501",
        "--rdzv-endpoint host:1",
        "--rdzv-backend c10d",
    ],
)
def test_a_meeting_point_of_the_user_s_own_stays(words: str) -> None:
    settings = planned(f"{words} train.py").torchrun
    assert settings["rdzv_id"] == "none"
    assert settings["local_addr"] is None


def test_a_port_from_the_environment_is_the_user_s_own_too() -> None:
    assert planned("train.py", env={"PET_MASTER_PORT": "29501"}).torchrun["master_port"] == 29501
    assert planned("train.py", env={"PET_MASTER_PORT": "29501"}).torchrun["rdzv_backend"] == "static"


def test_several_processes_get_one_thread_each_unless_the_user_chose() -> None:
    assert planned("--nproc-per-node 2 train.py").env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in planned("--nproc-per-node 1 train.py").env
    assert "OMP_NUM_THREADS" not in planned("--nproc-per-node 2 train.py", env={"OMP_NUM_THREADS": "4"}).env


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--standalone --rdzv-endpoint h:1", "--standalone wins over --rdzv-endpoint h:1, which is not used"),
        ("--rdzv-backend c10d --node-rank 1", "--rdzv-backend c10d wins over --node-rank 1, which is not used"),
        ("--rdzv-endpoint h:1 --master-port 5", "--rdzv-endpoint wins over --master-port 5, which is not used"),
    ],
)
def test_of_two_flags_that_exclude_each_other_the_winner_is_named(words: str, said: str) -> None:
    assert planned(f"{words} train.py").says[-1] == said
