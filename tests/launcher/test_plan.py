"""From what was asked to what will be done: which GPUs, how many processes, where they meet, on which cores."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ddp_kit.errors import UsageError
from ddp_kit.launcher import plan, spec
from ddp_kit.launcher.devices.cpus import Cpus
from ddp_kit.launcher.devices.gpus import Gpu, GpuProcess, Process
from ddp_kit.launcher.job import RankAssignment

GIB = 1024**3
TWO_CORES = Cpus({0: 0, 1: 1})
EIGHT_CORES_OF_TWO_THREADS = Cpus({cpu: cpu % 8 for cpu in range(16)})


def machine(*processes: int) -> tuple[Gpu, ...]:
    """One GPU per number given: the processes that run on it."""
    return tuple(
        Gpu(
            index,
            f"GPU-{index}{index}-uuid",
            "Fake GPU",
            80 * GIB,
            count * GIB,
            tuple(GpuProcess(Process(70 + number, "ann", "python other.py")) for number in range(count)),
        )
        for index, count in enumerate(processes)
    )


def planned(
    words: str,
    gpus: tuple[Gpu, ...] = (),
    env: dict[str, str] | None = None,
    held: Mapping[str, str] | None = None,
    cpus: Cpus = TWO_CORES,
    defaults: Mapping[str, str] | None = None,
) -> plan.Plan:
    asked = spec.parse(words.split(), env or {})
    return plan.make(asked, gpus, env or {}, "run-1", cpus, held or {}, defaults=defaults or {})


def gpus_of(words: str, gpus: tuple[Gpu, ...], env: dict[str, str] | None = None) -> tuple[str, str]:
    made = planned(words, gpus, env)
    return made.env["CUDA_VISIBLE_DEVICES"], made.torchrun["nproc_per_node"]


def test_without_a_number_there_is_one_process_per_visible_gpu_and_one_without_any() -> None:
    assert planned("train.py").torchrun["nproc_per_node"] == "1"
    made = planned("train.py", machine(0, 0, 0))
    assert made.torchrun["nproc_per_node"] == "3"
    assert made.env["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert made.origin["CUDA_VISIBLE_DEVICES"] == "one process per visible GPU"
    assert planned("train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1"}).torchrun["nproc_per_node"] == "1"


def test_torchrun_s_own_ways_to_say_a_number_stay() -> None:
    assert planned("--nproc_per_node=auto train.py", machine(0, 0)).torchrun["nproc_per_node"] == "auto"
    assert planned("train.py", machine(0, 0), {"PET_NPROC_PER_NODE": "5"}).torchrun["nproc_per_node"] == "5"


def test_workers_are_killed_before_kubernetes_kills_the_launcher_unless_another_grace_is_asked_for() -> None:
    assert planned("train.py").torchrun["shutdown_timeout"] == plan.GRACE_SECONDS < 30
    assert planned("--shutdown-timeout 7 train.py").torchrun["shutdown_timeout"] == 7
    assert planned("--shutdown-timeout 0 train.py").torchrun["shutdown_timeout"] == 0
    assert planned("train.py", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "40"}).torchrun["shutdown_timeout"] == 40


def test_each_of_torchrun_s_settings_is_stored_once() -> None:
    made = planned("--nnodes 2 --role a --max-restarts 1 --tee 3 train.py --lr 1")
    changed = {"role": "b", "max_restarts": 2, "tee": "0", "shutdown_timeout": 9, "training_script_args": ["--lr", "2"]}
    other = replace(made, spec=replace(made.spec, torchrun={**made.torchrun, **changed}))
    assert (other.role, other.rendezvous.limits.max_restarts, other.logs.tee, other.shutdown_timeout) == (
        "b",
        2,
        "0",
        9,
    )
    program = other.program(0)
    assert program is not None
    assert other.command_line(0)[-2:] == program.arguments == ("--lr", "2")


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
    with pytest.raises(UsageError, match="found 1 .limited by CUDA_VISIBLE_DEVICES=0,-1,2.:\n    0: Fake GPU"):
        planned("--gpus 2 train.py", machine(0, 0, 0), {"CUDA_VISIBLE_DEVICES": "0,-1,2"})


@pytest.mark.parametrize("words", ["--gpus 3", "--gpus 0,2"])
def test_more_gpus_than_there_are_lists_what_there_is(words: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(f"{words} train.py", machine(0, 2))
    assert "found 2:" in caught.value.message
    assert (
        "1: Fake GPU, 2.0 of 80 GiB used, busy: 2 processes (pid 70 of ann: python other.py; pid 71"
        in caught.value.message
    )
    assert "--gpus 2 train.py" in caught.value.hint


def test_gpus_on_a_machine_with_none_says_what_to_type_instead() -> None:
    with pytest.raises(UsageError, match="this machine has no NVIDIA GPU") as caught:
        planned("--gpus 4 train.py")
    assert "ddpkit launch --nproc-per-node 4 train.py" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "said"),
    [("0", "requests no GPU"), ("two", "is not a number of"), ("1,1", "more than once"), (",", "is not a number of")],
)
def test_other_words_after_gpus_are_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(f"--gpus {words} train.py", machine(0, 0))


def test_busy_gpus_are_taken_where_free_ones_do_not_suffice_and_that_is_said() -> None:
    assert not any("shares" in line for line in planned("--gpus 2 train.py", machine(1, 0, 2, 0)).notices)
    shared = planned("--gpus 3 train.py", machine(1, 0, 2, 0)).notices
    assert "GPU 0: Fake GPU, 1.0 of 80 GiB used, busy: 1 process (pid 70 of ann: python other.py)" in shared
    assert "fewer than 3 GPUs are free: this launch shares GPU 0 with other processes" in shared


def test_what_is_little_on_a_large_gpu_is_much_on_a_small_one() -> None:
    small, large = machine(0, 0)
    gpus = (replace(small, memory_total=24 * GIB, memory_used=3 * GIB), replace(large, memory_used=4 * GIB))
    assert gpus_of("--gpus 1 train.py", gpus) == ("1", "1")


def test_free_gpus_are_those_without_processes_and_without_much_memory_in_use() -> None:
    gpus = machine(0, 1, 0, 0)
    hidden = replace(gpus[2], memory_used=9 * GIB)  # by processes of another container
    gpus = (*gpus[:2], hidden, gpus[3])
    assert gpus_of("--gpus free:2 train.py", gpus) == ("0,3", "2")
    with pytest.raises(
        UsageError, match="--gpus free:3 is not available: found 2 free among 4 visible GPUs:"
    ) as caught:
        planned("--gpus free:3 train.py", gpus)
    assert "1: Fake GPU, 1.0 of 80 GiB used, busy: 1 process (pid 70 of ann: python other.py)" in caught.value.message
    assert (
        "2: Fake GPU, 9.0 of 80 GiB used, busy: memory is in use, perhaps by a process in another container"
        in caught.value.message
    )
    assert "--gpus free:2 train.py" in caught.value.hint


def test_without_a_free_gpu_the_hint_is_to_share() -> None:
    with pytest.raises(UsageError, match="found 0 free among 2 visible GPUs") as caught:
        planned("--gpus free:1 train.py", machine(1, 1))
    assert "--gpus 1 train.py" in caught.value.hint


def test_gpus_that_another_launch_holds_are_passed_over() -> None:
    held = {"GPU-00-uuid": "pid 7 of ann: ddpkit launch a.py"}
    for words in ("--gpus 2", "--gpus free:2"):
        assert planned(f"{words} train.py", machine(0, 0, 0), held=held).env["CUDA_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("--gpus 3", "--gpus 3 is not available: other launches hold 1 of the 3 visible GPUs:", "--gpus 2 train.py"),
        (
            "--gpus free:3",
            "--gpus free:3 is not available: found 1 free among 3 visible GPUs:",
            "--gpus free:1 train.py",
        ),
        ("--gpus all", "--gpus all is not available: GPU 0 is held by another launch:", "--gpus 2 train.py"),
        ("--gpus 1,0", "--gpus 1,0 is not available: GPU 0 is held by another launch:", "--gpus 2 train.py"),
        ("--gpus GPU-00", "--gpus GPU-00 is not available: GPU 0 is held by", "--gpus 1 train.py"),
        ("", "the default (all visible GPUs) is not available: GPU 0 is held by another launch:", "--gpus 2 train.py"),
    ],
)
def test_who_holds_a_gpu_is_told_with_what_is_free_and_what_to_type(words: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(f"{words} train.py", machine(0, 1, 0), held={"GPU-00-uuid": "pid 7 of ann: ddpkit launch a.py"})
    assert caught.value.message.startswith(said)
    assert "    0: Fake GPU, 0.0 of 80 GiB used, held by pid 7 of ann: ddpkit launch a.py\n" in caught.value.message
    assert "    2: Fake GPU, 0.0 of 80 GiB used, free" in caught.value.message
    assert hint in caught.value.hint


def test_where_every_gpu_is_held_the_hint_is_to_wait_or_to_share() -> None:
    held = {"GPU-00-uuid": "pid 7 of ann: a", "GPU-11-uuid": "pid 7 of ann: a"}
    with pytest.raises(UsageError, match="GPUs 0, 1 are held by another launch") as caught:
        planned("train.py", machine(0, 0), held=held)
    assert "--nproc-per-node 2 train.py" in caught.value.hint


def test_a_number_of_processes_alone_takes_no_gpu_and_asks_nobody() -> None:
    made = planned("--nproc-per-node 2 train.py", machine(0, 0), held={"GPU-00-uuid": "pid 7 of ann: a"})
    assert [worker.gpus for worker in made.workers] == [(), ()]
    assert "CUDA_VISIBLE_DEVICES" not in made.env


def test_uuids_may_be_shortened_and_stand_among_positions() -> None:
    assert gpus_of("--gpus GPU-22,0 train.py", machine(0, 0, 0)) == ("2,0", "2")
    mask = {"CUDA_VISIBLE_DEVICES": "GPU-22,GPU-00"}
    assert gpus_of("--gpus GPU-00-uuid train.py", machine(0, 0, 0), mask) == ("GPU-00", "1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("1,GPU-11", "names GPU 1 more than once"),
        ("GPU-1", "the UUIDs of GPUs 1, 10 all start with GPU-1"),
        ("GPU-7,GPU-x", "is not available: found 11, none of which matches GPU-x:"),
        ("MIG-1", "is not available: found 11, none of which matches MIG-1:"),
        ("free:0", "requests no GPU"),
        ("free:x", "is not a number of GPUs"),
        ("free:12", "is not available: found 11:"),
    ],
)
def test_words_that_mean_no_gpu_or_several_are_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(f"--gpus {words} train.py", machine(*[0] * 11))


def test_a_mask_that_names_a_gpu_twice_shows_none_as_in_cuda() -> None:
    with pytest.raises(UsageError, match="none of these is usable .limited by CUDA_VISIBLE_DEVICES=1,GPU-11."):
        planned("--gpus 1 train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1,GPU-11"})


def test_positions_that_are_not_the_gpu_s_number_are_told() -> None:
    with pytest.raises(UsageError, match="position 0 is GPU 1: Fake GPU"):
        planned("--gpus 2 train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1"})


def with_mig() -> tuple[Gpu, ...]:
    """A whole GPU, one with two MIG devices, one in MIG mode without any."""
    whole, parent, empty = machine(0, 0, 0)
    parts = tuple(replace(parent, uuid=f"MIG-{number}-uuid", mig=number) for number in range(2))
    return (whole, *parts, replace(empty, usable=False))


def test_mig_devices_are_chosen_like_gpus_and_each_process_sees_its_own_alone() -> None:
    assert gpus_of("--gpus MIG-1-uuid train.py", with_mig()) == ("MIG-1-uuid", "1")
    assert gpus_of("--gpus all train.py", with_mig()) == ("0,MIG-0-uuid,MIG-1-uuid", "3")
    assert planned("--gpus 1,2 train.py", with_mig()).torchrun["virtual_local_rank"] is True
    for words in ("--gpus 1,", "--gpus 0,"):
        assert planned(f"{words} train.py", with_mig()).torchrun["virtual_local_rank"] is False


def test_several_mig_devices_of_one_gpu_are_said_to_need_share_gpus() -> None:
    said = "2 processes use MIG devices of GPU 1, which NCCL does not support: select one with --gpus UUID"
    assert any(line.startswith(said) for line in planned("--gpus all train.py", with_mig()).notices)
    assert not any("NCCL" in line for line in planned("--gpus MIG-1-uuid train.py", with_mig()).notices)


def test_a_gpu_in_mig_mode_is_its_first_mig_device_to_a_number_in_the_mask() -> None:
    assert gpus_of("--gpus all train.py", with_mig(), {"CUDA_VISIBLE_DEVICES": "1"}) == ("1", "1")
    with pytest.raises(UsageError, match="none of these is usable"):
        planned("--gpus all train.py", with_mig(), {"CUDA_VISIBLE_DEVICES": "2"})


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


@pytest.mark.parametrize(("rounds", "restarts", "told"), [(0, 0, None), (2, 2, None), (3, 1, "2")])
def test_workers_are_told_how_often_nodes_have_changed(rounds: int, restarts: int, told: str | None) -> None:
    assignment = RankAssignment(
        round=rounds, restarts=restarts, group_rank=0, group_world_size=1, first_rank=0, world_size=1,
        first_role_rank=0, role_world_size=1, master_addr="a", master_port=1,
    )  # fmt: skip
    env = planned("train.py").environment(assignment, 0, {})
    assert (env.get("DDPKIT_NODE_CHANGES"), env["TORCHELASTIC_RESTART_COUNT"]) == (told, str(restarts))


def near(*cores: range) -> tuple[Gpu, ...]:
    """A free GPU for each range: the cores near it."""
    return tuple(replace(gpu, near=tuple(cpus)) for gpu, cpus in zip(machine(*[0] * len(cores)), cores, strict=True))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gpus 4 --gpus-per-process 2", [[0, 1], [2, 3]]),
        ("--gpus 3,1,0,2 --gpus-per-process 2", [[3, 1], [0, 2]]),
        ("--gpus-per-process 2", [[0, 1], [2, 3]]),
        ("--gpus-per-process 4", [[0, 1, 2, 3]]),
        ("--gpus-per-process 1 --gpus 2", [[0], [1]]),
        ("--gpus-per-process 2 --nproc-per-node 1", [[0, 1]]),
        ("--gpus-per-process 2 --nproc-per-node 2 --gpus all", [[0, 1], [2, 3]]),
    ],
)
def test_each_process_gets_as_many_gpus_as_asked_for(words: str, expected: list[list[int]]) -> None:
    made = planned(f"{words} train.py", machine(0, 0, 0, 0))
    assert [[gpu.index for gpu in worker.gpus] for worker in made.workers] == expected
    assert made.torchrun["nproc_per_node"] == str(len(expected))
    assert made.env["CUDA_VISIBLE_DEVICES"] == ",".join(str(index) for group in expected for index in group)
    assert made.env["DDPKIT_GPUS_PER_PROCESS"] == str(len(expected[0]))


@pytest.mark.parametrize(
    ("words", "gpus", "said", "hint"),
    [
        ("--gpus-per-process 2", 3, "does not evenly divide the 3 GPUs", "--gpus 2 --gpus-per-process 2 train.py"),
        ("--gpus-per-process 4", 3, "does not evenly divide the 3 GPUs", "use --gpus-per-process 3"),
        ("--gpus-per-process 2", 0, "this machine has no NVIDIA GPU", "`ddpkit launch train.py`"),
        ("--gpus 6 --gpus-per-process 2", 4, "--gpus 6 is not available", "--gpus 4 --gpus-per-process 2 train.py"),
        ("--gpus-per-process 2 --nproc-per-node 3", 4, "found 4:", "--gpus 4 --gpus-per-process 2 train.py"),
        (
            "--gpus-per-process 2 --virtual-local-rank",
            4,
            "contradicts --virtual-local-rank, which gives each process a single GPU",
            "remove",
        ),
        (
            "--gpus-per-process 2 --nproc-per-node auto",
            4,
            "does not specify how many GPUs",
            "set --gpus to the number of GPUs of this node",
        ),
        ("--gpus 4 --gpus-per-process 2 --nproc-per-node 4", 4, "one per 2 GPUs, but --nproc-per-node is 4", "remove"),
    ],
)
def test_gpus_that_processes_cannot_share_out_are_refused(words: str, gpus: int, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned(f"{words} train.py", machine(*[0] * gpus))
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_a_process_cannot_have_two_mig_devices() -> None:
    with pytest.raises(UsageError, match="a process can use at most one MIG device"):
        planned("--gpus 1,2 --gpus-per-process 2 train.py", with_mig())


def test_a_process_with_several_gpus_is_bound_to_the_cores_near_any_of_them() -> None:
    gpus = near(range(4), range(4, 8), range(8, 12), range(0))
    workers = planned("--gpus 4 --gpus-per-process 2 train.py", gpus, cpus=EIGHT_CORES_OF_TWO_THREADS).workers
    assert [worker.cpus for worker in workers] == [tuple(range(8)), ()]


def test_processes_are_bound_to_those_cores_near_their_gpu_that_the_launcher_may_use() -> None:
    gpus = near(range(8), range(8, 16), range(64, 72), range(0))
    workers = planned("--gpus 1,0,2,3 train.py", gpus, cpus=EIGHT_CORES_OF_TWO_THREADS).workers
    assert [gpu.index for worker in workers for gpu in worker.gpus] == [1, 0, 2, 3]
    assert [worker.cpus for worker in workers] == [tuple(range(8, 16)), tuple(range(8)), (), ()]


def test_the_binding_of_torchrun_wins() -> None:
    made = planned("--numa-binding node --gpus 2 train.py", near(range(8), range(8)), cpus=EIGHT_CORES_OF_TWO_THREADS)
    assert [worker.cpus for worker in made.workers] == [(), ()]


def test_threads_are_shared_out_evenly_unless_the_user_chose() -> None:
    made = planned("--nproc-per-node 2 train.py", cpus=EIGHT_CORES_OF_TWO_THREADS)
    assert made.env["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS=4 for each of 2 processes; set this variable to change the number" in made.notices
    assert planned("--nproc-per-node 9 train.py", cpus=EIGHT_CORES_OF_TWO_THREADS).env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in planned("--nproc-per-node 1 train.py").env
    assert "OMP_NUM_THREADS" not in planned("--nproc-per-node 2 train.py", env={"OMP_NUM_THREADS": "4"}).env


def test_defaults_are_set_for_the_workers_and_named_as_such() -> None:
    made = planned("train.py", defaults={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert made.env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert made.origin["PYTORCH_ALLOC_CONF"] == "ddpkit's default"


def test_processes_near_the_same_cores_share_these() -> None:
    gpus = near(range(4), range(4), range(16))
    for words, threads in {"--gpus 0,1": "2", "--gpus 0,2": "4"}.items():
        made = planned(f"{words} train.py", gpus, cpus=EIGHT_CORES_OF_TWO_THREADS)
        assert made.env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--standalone --rdzv-endpoint h:1", "--standalone overrides --rdzv-endpoint h:1, which is ignored"),
        ("--rdzv-backend c10d --node-rank 1", "--rdzv-backend c10d overrides --node-rank 1, which is ignored"),
        ("--rdzv-endpoint h:1 --master-port 5", "--rdzv-endpoint overrides --master-port 5, which is ignored"),
    ],
)
def test_of_two_flags_that_exclude_each_other_the_winner_is_named(words: str, said: str) -> None:
    assert planned(f"{words} train.py").notices[-1] == said


def test_a_beginning_that_several_uuids_share_selects_none_as_in_cuda() -> None:
    assert gpus_of("train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1,GPU-,0"}) == ("1", "1")


def test_a_single_worker_bound_to_some_cores_has_threads_for_these() -> None:
    near = (replace(machine(0)[0], near=(0, 1, 8, 9)),)
    made = planned("train.py", near, cpus=EIGHT_CORES_OF_TWO_THREADS)
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS=2 for the process; set this variable to change the number" in made.notices
    everywhere = (replace(machine(0)[0], near=tuple(range(16))),)
    assert "OMP_NUM_THREADS" not in planned("train.py", everywhere, cpus=EIGHT_CORES_OF_TWO_THREADS).env


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("--gpus 9 -m package.train", "`ddpkit launch --gpus 2 --module package.train`"),
        ("--gpus 9 --no-python ./run --lr 1", "`ddpkit launch --gpus 2 --no-python ./run ...`"),
        ("--gpus 9 train.py", "`ddpkit launch --gpus 2 train.py`"),
    ],
)
def test_what_to_type_instead_starts_the_same_program(words: str, typed: str) -> None:
    with pytest.raises(UsageError) as refused:
        planned(words, machine(0, 0))
    assert typed in refused.value.hint


def test_a_default_for_the_number_of_processes_is_named_where_it_is_in_the_way() -> None:
    with pytest.raises(UsageError, match="PET_NPROC_PER_NODE"):
        planned("--gpus 1 train.py", machine(0, 0), {"PET_NPROC_PER_NODE": "2"})


@pytest.mark.parametrize("words", ["--nproc 3 t.py", "--nproc=3 t.py --nproc 4", "--nproc_per 3 t.py"])
def test_the_beginning_of_a_flag_means_it_whichever_way_it_is_spelt(words: str) -> None:
    assert spec.parse(words.split(), {}).processes == "3"
