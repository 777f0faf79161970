"""Clusters, recognised by their variables: what `ddpkit launch train.py` then means on each node."""

from typing import Any

import pytest

from ddp_kit.clusters.slurm import first_host
from ddp_kit.errors import UsageError
from ddp_kit.launcher import rendezvous
from ddp_kit.launcher.rendezvous import Rendezvous
from ddp_kit.launcher.spec import parse

SLURM = {
    "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu-[003-004,9]", "SLURM_NODEID": "1", "SLURM_PROCID": "1",
    "SLURM_JOB_END_TIME": "1795500000", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip
INDEXED = {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2", "HOSTNAME": "run-1"}
KUBEFLOW = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run", "PET_MASTER_PORT": "29500",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-1",
}  # fmt: skip
AWS = {
    "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1", "AWS_BATCH_JOB_ID": "id#1",
}  # fmt: skip
AZURE = {
    "AZUREML_RUN_ID": "run", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6105",
    "WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
}  # fmt: skip
PAI = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456", "NPROC_PER_NODE": "8"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
}  # fmt: skip
JOBSET = {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2", "HOSTNAME": "run-node-0-1", "JOBSET_NAME": "run"}
CLUSTERS = {
    "Slurm": (SLURM, "gpu-003", 10_127),
    "an Indexed Job of Kubernetes": (INDEXED, "run-0.run", 29400),
    "a JobSet of Kubernetes": (JOBSET, "run-node-0-0.run", 29400),
    "a TrainJob of Kubeflow": (KUBEFLOW, "run-node-0-0.run", 29500),
    "SkyPilot": (SKYPILOT, "10.0.0.1", 29400),
    "AWS Batch": (AWS, "10.0.0.1", 29400),
    "Azure Machine Learning": (AZURE, "10.0.0.1", 6105),
    "a PyTorchJob or PAI": (PAI, "dlc-master-0", 23456),
    "Open MPI": (MPI, "10.0.0.1", 29400),
}


def read(env: dict[str, str], *flags: str, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    """How the nodes meet, for a launcher with these variables and flags."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)  # torch's parser reads PET_ variables itself
    spec = rendezvous.complete_from_cluster(parse([*flags, "train.py"], env), env)
    settings: dict[str, Any] = {**spec.torchrun, **rendezvous.single_node_settings(spec.torchrun, "own")}
    return rendezvous.read(settings, spec.place)


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_is_recognised_without_a_flag(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env, host, port = CLUSTERS[name]
    found = read(env, monkeypatch=monkeypatch)
    assert found.place is not None
    assert found.place.environment == name
    assert (found.nodes, found.group_rank, found.host, found.port) == (2, 1, host, port)
    assert found.is_host is False
    assert {"nodes", "node rank", "host"} <= found.place.sources.keys()
    assert found.endpoint_source.endswith(f"of {name}")


@pytest.mark.parametrize("name", CLUSTERS)
def test_flags_take_precedence_over_the_cluster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env, *_ = CLUSTERS[name]
    alone = read(env, "--nnodes", "1", monkeypatch=monkeypatch)
    assert (alone.nodes, alone.place) == (1, None)
    given = ("--nnodes", "3", "--node-rank", "2", "--master-addr", "10.9.9.9", "--master-port", "4242")
    all_given = read(env, *given, monkeypatch=monkeypatch)
    assert (all_given.nodes, all_given.group_rank) == (3, 2)
    assert (all_given.host, all_given.port) == ("10.9.9.9", 4242)
    half_given = read(env, "--master-addr", "10.9.9.9", monkeypatch=monkeypatch)
    assert (half_given.nodes, half_given.group_rank, half_given.host) == (2, 1, "10.9.9.9")


def test_spares_are_nodes_of_the_cluster_that_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    four = SLURM | {"SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "3"}
    found = read(four, "--spares", "2", monkeypatch=monkeypatch)
    assert (found.nodes, found.node_rank, found.group_rank) == (2, 3, None)
    assert read(four, "--spares", "1", "--nnodes", "2", monkeypatch=monkeypatch).nodes == 2
    pods = INDEXED | {"PET_NNODES": "2:4"}
    assert read(pods, "--spares", "1", monkeypatch=monkeypatch).limits.max_nodes == 3
    assert read(pods, "--spares", "2", monkeypatch=monkeypatch).nodes == 2
    with pytest.raises(UsageError, match="--spares 3 is too many for a job of 4 nodes"):
        read(four, "--spares", "3", monkeypatch=monkeypatch)


def test_range_of_nodes_in_a_cluster_uses_c10d_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(SLURM, "--nnodes", "1:2", "--rdzv-conf", "join_timeout=7", monkeypatch=monkeypatch)
    assert (found.backend, found.host, found.is_host, found.group_rank) == ("c10d", "gpu-003", False, None)
    assert found.limits.join_timeout == 7


@pytest.mark.parametrize("env", [INDEXED, JOBSET, KUBEFLOW])
def test_join_timeout_on_kubernetes_lasts_as_long_as_pods_may_take(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = read(env, monkeypatch=monkeypatch).limits
    assert (limits.join_timeout, limits.replacement_timeout) == (86400, 300)
    given = read(env, "--rdzv-conf", "replacement_timeout=9,join_timeout=8", monkeypatch=monkeypatch).limits
    assert (given.join_timeout, given.replacement_timeout) == (8, 9)
    assert read(env, "--rdzv-conf", "timeout=7", monkeypatch=monkeypatch).limits.join_timeout == 7


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}, "runs on only one of them\n  hint: run `srun"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "0"}, "16 tasks on 2 nodes"),
        (SLURM | {"SLURM_HET_SIZE": "2"}, "heterogeneous"),
        (SLURM | {"SLURM_NODEID": ""}, "SLURM_NODEID is ''"),
        (INDEXED | {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "run-2"}, "says node rank 2, PET_NNODES says 2 nodes"),
        (INDEXED | {"HOSTNAME": "other"}, "HOSTNAME='other' does not end in -1"),
        (PAI | {"RANK": "5"}, "contradict each other"),
        (PAI | {"MASTER_ADDR": "localhost"}, "unset RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}, "ppr:1:node"),
        ({**MPI, "MASTER_ADDR": "", "OMPI_COMM_WORLD_RANK": "0"}, "MASTER_ADDR is not set"),
        (AZURE | {"LOCAL_WORLD_SIZE": "4"}, "process_count_per_instance: 1"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "x"}, "SKYPILOT_NODE_RANK is 'x'"),
    ],
)
def test_inconsistent_cluster_variables_are_refused(
    env: dict[str, str], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as refused:
        read(env, monkeypatch=monkeypatch)
    assert part in str(refused.value)
    assert read(env, "--nnodes", "1", monkeypatch=monkeypatch).nodes == 1


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "sweep-3"},  # pods that have nothing to do with each other
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {**PAI, "LOCAL_RANK": "0"},  # within a worker of torchrun
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"},
    ],
)
def test_cluster_job_of_one_node_stays_on_loopback(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(env, monkeypatch=monkeypatch)
    assert (found.nodes, found.host, found.endpoint_source) == (1, "localhost", "")


def test_only_the_first_of_many_tasks_reports_the_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(SLURM | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "3"}, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("gpu-[003-005,9],login", "gpu-003"),
        ("a[7,9]b[01-02]", "a7b01"),
        ("x1,y[2-3]", "x1"),
    ],
)
def test_first_host_of_a_compressed_list(words: str, first: str) -> None:
    assert first_host(words) == first
