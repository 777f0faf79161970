"""The number of scheduler steps in a run, for creating a scheduler before the Trainer."""

from torch.utils.data import IterableDataset

from ddp_kit.batch import plan_batches
from ddp_kit.config import TrainerConfig
from ddp_kit.env import from_env
from ddp_kit.errors import ConfigError
from ddp_kit.loader import Data, DatasetEpoch, batching, open_data
from ddp_kit.parallel.mesh import sizes_of
from ddp_kit.sampler import lengths_in
from ddp_kit.trainer.data import loader_batch_size


def scheduler_steps(config: TrainerConfig, train_data: Data) -> int:
    """The number of times that a run steps its scheduler: its optimizer steps after `config.warmup_steps`.

    A scheduler with `scheduler_every="epoch"` is stepped once per epoch instead.

        scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=scheduler_steps(config, train_data))

    `train_data`: as for `Trainer.fit`. The result depends on the number of ranks of this job. A sampler whose length
    changes with `set_epoch` is asked for that of every epoch; a dataset is counted with its present length. Raises
    `ConfigError` for a stream without `max_steps`, and if the run has no step after the warm-up.
    """
    epochs = config.last_epoch
    total = config.max_steps
    if epochs is not None:
        by_epochs = _steps_in(range(epochs), config, train_data)
        total = by_epochs if total is None else min(total, by_epochs)
    assert total is not None, "without max_steps, a run has epochs"
    if total <= config.warmup_steps:
        raise ConfigError(
            f"the run has {total} optimizer steps, and warmup_steps={config.warmup_steps} takes all of them",
            f"set warmup_steps below {total}, or train longer",
        )
    return total - config.warmup_steps


def _steps_in(epochs: range, config: TrainerConfig, train_data: Data) -> int:
    dataset, template = open_data(train_data, "train_data")
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"the number of steps in an epoch of a {type(dataset).__name__} is not known before its end",
            "set max_steps in the TrainerConfig",
        )
    own = batching(template)
    ranks = sizes_of(config.parallel, from_env().world_size).data
    drop_last = config.data.drop_last or bool(own and own.drop_last)
    if own is not None and own.batches is not None:
        passes = config.accumulation_steps or 1
        plan = plan_batches(passes * ranks, None, passes, ranks)  # of batches instead of samples
        lengths = lengths_in(own.batches, "batch sampler", config.seed, epochs)
        return sum(plan.steps(length, drop_last) for length in lengths)
    given = None if config.micro_batch_size == "auto" else config.micro_batch_size
    size = loader_batch_size(train_data, config) or given
    plan = plan_batches(config.global_batch_size, size, config.accumulation_steps, ranks)
    if own is not None and own.sampler is not None:
        lengths = lengths_in(own.sampler, "sampler", config.seed, epochs)
        return sum(plan.steps(length, drop_last) for length in lengths)
    DatasetEpoch(dataset, config.seed).set(epochs.start)
    return len(epochs) * plan.steps(len(dataset), drop_last)
