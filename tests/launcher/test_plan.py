"""From what was asked to what will be done: which GPUs, how many processes, where they meet, on which cores."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ddp_kit.devices.cpus import Cpus
from ddp_kit.devices.gpus import Gpu, GpuProcess, Process
from ddp_kit.errors import UsageError
from ddp_kit.launcher import plan, spec
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


def plan_on(
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
    made = plan_on(words, gpus, env)
    return made.env["CUDA_VISIBLE_DEVICES"], made.torchrun["nproc_per_node"]


def test_nproc_per_node_defaults_to_the_number_of_visible_gpus_or_one() -> None:
    assert plan_on("train.py").torchrun["nproc_per_node"] == "1"
    made = plan_on("train.py", machine(0, 0, 0))
    assert made.torchrun["nproc_per_node"] == "3"
    assert made.env["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert made.origin["CUDA_VISIBLE_DEVICES"] == "one process per visible GPU"
    assert plan_on("train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1"}).torchrun["nproc_per_node"] == "1"


def test_nproc_per_node_accepts_the_values_of_torchrun() -> None:
    assert plan_on("--nproc_per_node=auto train.py", machine(0, 0)).torchrun["nproc_per_node"] == "auto"
    assert plan_on("train.py", machine(0, 0), {"PET_NPROC_PER_NODE": "5"}).torchrun["nproc_per_node"] == "5"


def test_shutdown_timeout_defaults_to_less_than_the_grace_of_kubernetes() -> None:
    assert plan_on("train.py").torchrun["shutdown_timeout"] == plan.GRACE_SECONDS < 30
    assert plan_on("--shutdown-timeout 7 train.py").torchrun["shutdown_timeout"] == 7
    assert plan_on("--shutdown-timeout 0 train.py").torchrun["shutdown_timeout"] == 0
    assert plan_on("train.py", env={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "40"}).torchrun["shutdown_timeout"] == 40


def test_each_setting_of_torchrun_is_stored_once() -> None:
    made = plan_on("--nnodes 2 --role a --max-restarts 1 --tee 3 train.py --lr 1")
    changed = {"role": "b", "max_restarts": 2, "tee": "0", "shutdown_timeout": 9, "training_script_args": ["--lr", "2"]}
    other = replace(made, spec=made.spec._replace(torchrun={**made.torchrun, **changed}))
    assert (other.role, other.rendezvous.limits.max_restarts, other.logs.tee, other.shutdown_timeout) == (
        "b",
        2,
        "0",
        9,
    )
    program = other.program(0)
    assert program is not None
    assert other.command_line(0)[-2:] == program.arguments == ("--lr", "2")


def test_gpus_flag_with_a_number_takes_free_gpus_in_order() -> None:
    assert gpus_of("--gpus 2 train.py", machine(1, 0, 2, 0)) == ("1,3", "2")
    assert gpus_of("--gpus 3 train.py", machine(1, 0, 2, 0)) == ("0,1,3", "3")


def test_gpus_flag_accepts_all_and_positions() -> None:
    assert gpus_of("--gpus all train.py", machine(1, 0)) == ("0,1", "2")
    assert gpus_of("--gpus 2,0 train.py", machine(0, 0, 0)) == ("2,0", "2")
    assert gpus_of("--gpus 0, train.py", machine(0, 0, 0)) == ("0", "1")


def test_gpus_flag_counts_positions_in_the_users_mask() -> None:
    mask = {"CUDA_VISIBLE_DEVICES": "3,GPU-11,0"}
    assert gpus_of("--gpus 0,1 train.py", machine(0, 0, 0, 0), mask) == ("3,GPU-11", "2")
    assert "CUDA_DEVICE_ORDER" not in plan_on("--gpus 1 train.py", machine(0, 0, 0, 0), mask).env
    assert plan_on("--gpus 1 train.py", machine(0, 0)).env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_entries_after_an_invalid_one_in_the_mask_are_ignored_as_in_cuda() -> None:
    with pytest.raises(UsageError, match="found 1 .limited by CUDA_VISIBLE_DEVICES=0,-1,2.:\n    0: Fake GPU"):
        plan_on("--gpus 2 train.py", machine(0, 0, 0), {"CUDA_VISIBLE_DEVICES": "0,-1,2"})


@pytest.mark.parametrize("words", ["--gpus 3", "--gpus 0,2"])
def test_gpus_flag_with_too_many_lists_the_gpus(words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_on(f"{words} train.py", machine(0, 2))
    assert "found 2:" in caught.value.message
    assert (
        "1: Fake GPU, 2.0 of 80 GiB used, busy: 2 processes (pid 70 of ann: python other.py; pid 71"
        in caught.value.message
    )
    assert "--gpus 2 train.py" in caught.value.hint


def test_gpus_flag_without_gpus_suggests_nproc_per_node() -> None:
    with pytest.raises(UsageError, match="this machine has no NVIDIA GPU") as caught:
        plan_on("--gpus 4 train.py")
    assert "ddpkit launch --nproc-per-node 4 train.py" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "said"),
    [("0", "requests no GPU"), ("two", "is not a number of"), ("1,1", "more than once"), (",", "is not a number of")],
)
def test_gpus_flag_with_other_words_is_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_on(f"--gpus {words} train.py", machine(0, 0))


def test_gpus_flag_takes_busy_gpus_if_needed_with_a_notice() -> None:
    assert not any("shares" in line for line in plan_on("--gpus 2 train.py", machine(1, 0, 2, 0)).notices)
    shared = plan_on("--gpus 3 train.py", machine(1, 0, 2, 0)).notices
    assert "GPU 0: Fake GPU, 1.0 of 80 GiB used, busy: 1 process (pid 70 of ann: python other.py)" in shared
    assert "fewer than 3 GPUs are free: this launch shares GPU 0 with other processes" in shared


def test_gpu_is_busy_by_the_share_of_its_memory_in_use() -> None:
    small, large = machine(0, 0)
    gpus = (replace(small, memory_total=24 * GIB, memory_used=3 * GIB), replace(large, memory_used=4 * GIB))
    assert gpus_of("--gpus 1 train.py", gpus) == ("1", "1")


def test_gpus_free_takes_gpus_without_processes_and_with_little_memory_in_use() -> None:
    gpus = machine(0, 1, 0, 0)
    hidden = replace(gpus[2], memory_used=9 * GIB)  # by processes of another container
    gpus = (*gpus[:2], hidden, gpus[3])
    assert gpus_of("--gpus free:2 train.py", gpus) == ("0,3", "2")
    with pytest.raises(
        UsageError, match="--gpus free:3 is not available: found 2 free among 4 visible GPUs:"
    ) as caught:
        plan_on("--gpus free:3 train.py", gpus)
    assert "1: Fake GPU, 1.0 of 80 GiB used, busy: 1 process (pid 70 of ann: python other.py)" in caught.value.message
    assert (
        "2: Fake GPU, 9.0 of 80 GiB used, busy: memory is in use, perhaps by a process in another container"
        in caught.value.message
    )
    assert "--gpus free:2 train.py" in caught.value.hint


def test_gpus_free_without_a_free_gpu_advises_to_share() -> None:
    with pytest.raises(UsageError, match="found 0 free among 2 visible GPUs") as caught:
        plan_on("--gpus free:1 train.py", machine(1, 1))
    assert "--gpus 1 train.py" in caught.value.hint


def test_gpus_flag_skips_gpus_held_by_another_launch() -> None:
    held = {"GPU-00-uuid": "pid 7 of ann: ddpkit launch a.py"}
    for words in ("--gpus 2", "--gpus free:2"):
        assert plan_on(f"{words} train.py", machine(0, 0, 0), held=held).env["CUDA_VISIBLE_DEVICES"] == "1,2"


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
def test_gpus_flag_with_held_gpus_names_the_holder_and_the_free_ones(words: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_on(f"{words} train.py", machine(0, 1, 0), held={"GPU-00-uuid": "pid 7 of ann: ddpkit launch a.py"})
    assert caught.value.message.startswith(said)
    assert "    0: Fake GPU, 0.0 of 80 GiB used, held by pid 7 of ann: ddpkit launch a.py\n" in caught.value.message
    assert "    2: Fake GPU, 0.0 of 80 GiB used, free" in caught.value.message
    assert hint in caught.value.hint


def test_gpus_flag_with_all_gpus_held_advises_to_wait_or_share() -> None:
    held = {"GPU-00-uuid": "pid 7 of ann: a", "GPU-11-uuid": "pid 7 of ann: a"}
    with pytest.raises(UsageError, match="GPUs 0, 1 are held by another launch") as caught:
        plan_on("train.py", machine(0, 0), held=held)
    assert "--nproc-per-node 2 train.py" in caught.value.hint


def test_nproc_per_node_alone_reserves_no_gpus() -> None:
    made = plan_on("--nproc-per-node 2 train.py", machine(0, 0), held={"GPU-00-uuid": "pid 7 of ann: a"})
    assert [worker.gpus for worker in made.workers] == [(), ()]
    assert "CUDA_VISIBLE_DEVICES" not in made.env


def test_gpus_flag_accepts_shortened_uuids_among_positions() -> None:
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
def test_gpus_flag_that_matches_none_or_several_is_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan_on(f"--gpus {words} train.py", machine(*[0] * 11))


def test_mask_that_names_a_gpu_twice_shows_none_as_in_cuda() -> None:
    with pytest.raises(UsageError, match="none of these is usable .limited by CUDA_VISIBLE_DEVICES=1,GPU-11."):
        plan_on("--gpus 1 train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1,GPU-11"})


def test_gpus_flag_with_a_position_other_than_the_gpu_number_explains_it() -> None:
    with pytest.raises(UsageError, match="position 0 is GPU 1: Fake GPU"):
        plan_on("--gpus 2 train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1"})


def with_mig() -> tuple[Gpu, ...]:
    """A whole GPU, one with two MIG devices, one in MIG mode without any."""
    whole, parent, empty = machine(0, 0, 0)
    parts = tuple(replace(parent, uuid=f"MIG-{number}-uuid", mig=number) for number in range(2))
    return (whole, *parts, replace(empty, usable=False))


def test_mig_devices_are_chosen_like_gpus_with_one_per_process() -> None:
    assert gpus_of("--gpus MIG-1-uuid train.py", with_mig()) == ("MIG-1-uuid", "1")
    assert gpus_of("--gpus all train.py", with_mig()) == ("0,MIG-0-uuid,MIG-1-uuid", "3")
    assert plan_on("--gpus 1,2 train.py", with_mig()).torchrun["virtual_local_rank"] is True
    for words in ("--gpus 1,", "--gpus 0,"):
        assert plan_on(f"{words} train.py", with_mig()).torchrun["virtual_local_rank"] is False


def test_several_mig_devices_of_one_gpu_give_a_notice_about_nccl() -> None:
    said = "2 processes use MIG devices of GPU 1, which NCCL does not support: select one with --gpus UUID"
    assert any(line.startswith(said) for line in plan_on("--gpus all train.py", with_mig()).notices)
    assert not any("NCCL" in line for line in plan_on("--gpus MIG-1-uuid train.py", with_mig()).notices)


def test_gpu_in_mig_mode_given_by_number_means_its_first_mig_device() -> None:
    assert gpus_of("--gpus all train.py", with_mig(), {"CUDA_VISIBLE_DEVICES": "1"}) == ("1", "1")
    with pytest.raises(UsageError, match="none of these is usable"):
        plan_on("--gpus all train.py", with_mig(), {"CUDA_VISIBLE_DEVICES": "2"})


def test_mask_of_mig_devices_is_trusted() -> None:
    assert gpus_of("--gpus 1 train.py", machine(0), {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}) == ("MIG-1", "1")
    assert plan_on("train.py", machine(0), {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}).torchrun["nproc_per_node"] == "2"


def test_gpus_flag_in_conflict_with_nproc_per_node_is_refused() -> None:
    with pytest.raises(UsageError, match="--gpus 2 means 2 processes, one per GPU, but --nproc-per-node is 4"):
        plan_on("--gpus 2 --nproc-per-node 4 train.py", machine(0, 0))


def test_single_node_uses_loopback_and_a_free_port() -> None:
    for words in ("train.py", "--standalone --nnodes 1 train.py"):
        settings = plan_on(words).torchrun
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
def test_rendezvous_of_the_user_is_kept(words: str) -> None:
    settings = plan_on(f"{words} train.py").torchrun
    assert settings["rdzv_id"] == "none"
    assert settings["local_addr"] is None


def test_port_from_the_environment_is_kept() -> None:
    assert plan_on("train.py", env={"PET_MASTER_PORT": "29501"}).torchrun["master_port"] == 29501
    assert plan_on("train.py", env={"PET_MASTER_PORT": "29501"}).torchrun["rdzv_backend"] == "static"


@pytest.mark.parametrize(("rounds", "restarts", "told"), [(0, 0, None), (2, 2, None), (3, 1, "2")])
def test_node_changes_are_passed_to_workers(rounds: int, restarts: int, told: str | None) -> None:
    assignment = RankAssignment(
        round=rounds, restarts=restarts, group_rank=0, group_world_size=1, first_rank=0, world_size=1,
        first_role_rank=0, role_world_size=1, master_addr="a", master_port=1,
    )  # fmt: skip
    env = plan_on("train.py").environment(assignment, 0, {})
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
def test_gpus_per_process_assigns_that_many_to_each_process(words: str, expected: list[list[int]]) -> None:
    made = plan_on(f"{words} train.py", machine(0, 0, 0, 0))
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
def test_gpus_per_process_that_does_not_divide_the_gpus_is_refused(words: str, gpus: int, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_on(f"{words} train.py", machine(*[0] * gpus))
    assert said in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("--spares 1", "--spares 1 needs a job of several nodes, but this job has one", "use --nnodes N"),
        ("--spares 1 --nnodes 2 --rdzv-backend etcd --rdzv-endpoint h:1", "with --rdzv-backend etcd", "remove one"),
    ],
)
def test_spares_that_cannot_be_used_are_refused(words: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_on(f"{words} train.py", machine(0))
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_process_with_two_mig_devices_is_refused() -> None:
    with pytest.raises(UsageError, match="a process can use at most one MIG device"):
        plan_on("--gpus 1,2 --gpus-per-process 2 train.py", with_mig())


def test_process_with_several_gpus_is_bound_to_the_cores_near_any_of_them() -> None:
    gpus = near(range(4), range(4, 8), range(8, 12), range(0))
    workers = plan_on("--gpus 4 --gpus-per-process 2 train.py", gpus, cpus=EIGHT_CORES_OF_TWO_THREADS).workers
    assert [worker.cpus for worker in workers] == [tuple(range(8)), ()]


def test_process_is_bound_to_allowed_cores_near_its_gpu() -> None:
    gpus = near(range(8), range(8, 16), range(64, 72), range(0))
    workers = plan_on("--gpus 1,0,2,3 train.py", gpus, cpus=EIGHT_CORES_OF_TWO_THREADS).workers
    assert [gpu.index for worker in workers for gpu in worker.gpus] == [1, 0, 2, 3]
    assert [worker.cpus for worker in workers] == [tuple(range(8, 16)), tuple(range(8)), (), ()]


def test_numa_binding_of_torchrun_takes_precedence() -> None:
    made = plan_on("--numa-binding node --gpus 2 train.py", near(range(8), range(8)), cpus=EIGHT_CORES_OF_TWO_THREADS)
    assert [worker.cpus for worker in made.workers] == [(), ()]


def test_omp_threads_are_divided_evenly_unless_set_by_the_user() -> None:
    made = plan_on("--nproc-per-node 2 train.py", cpus=EIGHT_CORES_OF_TWO_THREADS)
    assert made.env["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS=4 for each of 2 processes; set this variable to change the number" in made.notices
    assert plan_on("--nproc-per-node 9 train.py", cpus=EIGHT_CORES_OF_TWO_THREADS).env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in plan_on("--nproc-per-node 1 train.py").env
    assert "OMP_NUM_THREADS" not in plan_on("--nproc-per-node 2 train.py", env={"OMP_NUM_THREADS": "4"}).env


def test_default_variables_are_set_and_their_origin_is_named() -> None:
    made = plan_on("train.py", defaults={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert made.env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert made.origin["PYTORCH_ALLOC_CONF"] == "ddpkit's default"


def test_processes_near_the_same_cores_divide_their_threads() -> None:
    gpus = near(range(4), range(4), range(16))
    for words, threads in {"--gpus 0,1": "2", "--gpus 0,2": "4"}.items():
        made = plan_on(f"{words} train.py", gpus, cpus=EIGHT_CORES_OF_TWO_THREADS)
        assert made.env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--standalone --rdzv-endpoint h:1", "--standalone overrides --rdzv-endpoint h:1, which is ignored"),
        ("--rdzv-backend c10d --node-rank 1", "--rdzv-backend c10d overrides --node-rank 1, which is ignored"),
        ("--rdzv-endpoint h:1 --master-port 5", "--rdzv-endpoint overrides --master-port 5, which is ignored"),
    ],
)
def test_conflicting_flags_give_a_notice_that_names_the_one_used(words: str, said: str) -> None:
    assert plan_on(f"{words} train.py").notices[-1] == said


def test_ambiguous_uuid_prefix_in_the_mask_selects_none_as_in_cuda() -> None:
    assert gpus_of("train.py", machine(0, 0), {"CUDA_VISIBLE_DEVICES": "1,GPU-,0"}) == ("1", "1")


def test_single_worker_bound_to_some_cores_has_as_many_threads() -> None:
    near = (replace(machine(0)[0], near=(0, 1, 8, 9)),)
    made = plan_on("train.py", near, cpus=EIGHT_CORES_OF_TWO_THREADS)
    assert made.env["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS=2 for the process; set this variable to change the number" in made.notices
    everywhere = (replace(machine(0)[0], near=tuple(range(16))),)
    assert "OMP_NUM_THREADS" not in plan_on("train.py", everywhere, cpus=EIGHT_CORES_OF_TWO_THREADS).env


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("--gpus 9 -m package.train", "`ddpkit launch --gpus 2 --module package.train`"),
        ("--gpus 9 --no-python ./run --lr 1", "`ddpkit launch --gpus 2 --no-python ./run ...`"),
        ("--gpus 9 train.py", "`ddpkit launch --gpus 2 train.py`"),
    ],
)
def test_command_in_a_hint_starts_the_same_program(words: str, typed: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan_on(words, machine(0, 0))
    assert typed in refused.value.hint


def test_nproc_per_node_from_the_environment_is_named_in_a_conflict() -> None:
    with pytest.raises(UsageError, match="PET_NPROC_PER_NODE"):
        plan_on("--gpus 1 train.py", machine(0, 0), {"PET_NPROC_PER_NODE": "2"})


@pytest.mark.parametrize("words", ["--nproc 3 t.py", "--nproc=3 t.py --nproc 4", "--nproc_per 3 t.py"])
def test_unique_prefix_of_a_flag_is_accepted_in_every_spelling(words: str) -> None:
    assert spec.parse(words.split(), {}).processes == "3"


@pytest.mark.parametrize(
    ("words", "env", "setting"),
    [
        ("--rdzv-backend etcd", {}, "--rdzv-backend etcd"),
        ("--rdzv-backend etcd --standalone", {}, ""),
        ("--event-log-handler console", {}, "--event-log-handler console"),
        ("", {"PET_EVENT_LOG_HANDLER": "console"}, "--event-log-handler console"),
        ("", {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, "TORCHELASTIC_ENABLE_FILE_TIMER=1"),
        ("", {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, ""),
        ("--rdzv-backend c10d --rdzv-conf store_type='file'", {}, "--rdzv-conf store_type=file"),
        ("--rdzv-backend c10d --rdzv-conf store_type=TCP,is_host=1", {}, ""),
        ("--rdzv-backend static --master-port 1 --nnodes 2", {}, ""),
    ],
)
def test_setting_that_only_torchrun_supports_makes_it_run_the_job(
    words: str, env: dict[str, str], setting: str
) -> None:
    made = plan_on(f"{words} train.py", env=env)
    assert made.torchrun_only == setting
    assert made.may_fork == (not setting)
    notices = [notice for notice in made.notices if "torchrun itself runs this job" in notice]
    assert len(notices) == bool(setting)
    assert all(setting in notice for notice in notices)
