"""What users import, and what it costs."""

import sys
from importlib import import_module

import pytest
from launching import run

import ddp_kit

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


def test_the_public_names_are_these() -> None:
    assert set(ddp_kit.__all__) == PUBLIC
    assert set(dir(ddp_kit)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(ddp_kit, name)
    assert name == "__version__" or value.__doc__


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        ddp_kit.Trainr  # noqa: B018


def test_importing_the_name_of_the_command_says_what_to_import() -> None:
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
def test_torch_is_imported_only_by_what_needs_it(statement: str, torch_loaded: bool) -> None:
    code = f"{statement}; import sys; print('torch' in sys.modules)"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, f"{torch_loaded}\n"), done.stderr


@pytest.mark.slow
def test_callbacks_leave_the_packages_of_others_alone_until_they_are_used() -> None:
    code = "import ddp_kit.callbacks, sys; print({'tensorboard', 'wandb'} & set(sys.modules))"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
