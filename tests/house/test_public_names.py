"""What users import, and what it costs."""

import sys
from importlib import import_module

import pytest

import ddp_kit
from tests.support.launching import run

PUBLIC = {
    "__version__",
    "BatchPlan",
    "Callback",
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "CSVLogger",
    "DataConfig",
    "DataError",
    "DdpKitError",
    "EarlyStopping",
    "EMA",
    "FitResult",
    "Gradients",
    "JSONLinesLogger",
    "LaunchError",
    "LearningRateSearch",
    "LoadedWeights",
    "LogRow",
    "Loss",
    "LossError",
    "MemoryConfig",
    "MemoryPlan",
    "MLflowLogger",
    "ParallelConfig",
    "ProfileConfig",
    "RowLogger",
    "Step",
    "TensorBoardLogger",
    "TokenBatchSampler",
    "TrackioLogger",
    "Trainer",
    "TrainerConfig",
    "Update",
    "UsageError",
    "WandbLogger",
    "World",
    "WorldError",
    "launch",
    "load_model",
    "scheduler_steps",
}


def test_public_names_are_as_listed() -> None:
    assert set(ddp_kit.__all__) == PUBLIC
    assert set(dir(ddp_kit)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(ddp_kit, name)
    assert name == "__version__" or value.__doc__


def test_unknown_public_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        ddp_kit.Trainr  # noqa: B018


def test_import_of_ddpkit_suggests_ddp_kit() -> None:
    with pytest.raises(ImportError, match="from ddp_kit import Trainer"):
        import_module("ddpkit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "torch_loaded"),
    [
        ("import ddp_kit", False),
        ("from ddp_kit import TrainerConfig, ConfigError", False),
        ("from ddp_kit import Loss", True),
    ],
)
def test_torch_is_imported_only_by_names_that_need_it(statement: str, torch_loaded: bool) -> None:
    code = f"{statement}; import sys; print('torch' in sys.modules)"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, f"{torch_loaded}\n"), done.stderr


@pytest.mark.slow
def test_callbacks_import_no_tracker_packages() -> None:
    code = "import ddp_kit.callbacks, sys; print({'tensorboard', 'wandb'} & set(sys.modules))"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
