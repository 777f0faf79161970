"""What a worker reads from its environment."""

import pytest

from ddp_kit.env import WorkerEnv, allocator_defaults, from_env
from ddp_kit.errors import WorldError
from ddp_kit.exit_codes import ExitCode

FULL = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_worker_env_is_read_from_the_environment() -> None:
    assert from_env(FULL | MASTER) == WorkerEnv(5, 1, 8, 4, 1)


def test_worker_env_without_a_launcher_is_one_process() -> None:
    assert from_env({"LOCAL_RANK": "3"}) == WorkerEnv()


def test_worker_env_with_missing_variables_names_them() -> None:
    with pytest.raises(WorldError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"):
        from_env({"RANK": "0"})


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "two"}, {"LOCAL_RANK": "1.5"}])
def test_worker_env_with_impossible_values_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(WorldError, match=next(iter(change))):
        from_env(FULL | MASTER | change)


def test_exit_code_of_a_signal_is_that_of_the_shell() -> None:
    assert ExitCode.of_signal(11) == 139


def test_allocator_defaults_expand_segments_unless_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathlib.Path.exists", lambda _: True)
    assert allocator_defaults({}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        assert allocator_defaults({name: "max_split_size_mb:64"}) == {}
    monkeypatch.setattr("pathlib.Path.exists", lambda _: False)
    assert allocator_defaults({}) == {}
