"""Run by test_several_ranks.py at 2 and 3 ranks: what ranks share and compare, and what few samples leave to them.

Each scenario is a function; all run one after the other in the same processes. Each rank prints one line at the end.
"""

import gc
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from ddp_kit import Callback, CheckpointError, DataError, LossError, Trainer, TrainerConfig
from ddp_kit.checkpoint import series
from ddp_kit.checkpoint.format import checkpoints

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def linear_trainer(folder: Path | None = None, optimizer: Any = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    metrics, callbacks = settings.pop("metrics", None), settings.pop("callbacks", ())
    checkpoint = {"dir": folder} | settings.pop("checkpoint", {})
    config = TrainerConfig(**({"global_batch_size": 6} | settings), checkpoint=checkpoint)
    return Trainer(
        nn.Linear(1, 1),
        optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-4)),
        lambda model, batch: model(batch).square().mean(),
        config,
        metrics=metrics,
        callbacks=callbacks,
    )


def check_refused(call: Callable[[], Any], kind: type[Exception], said: str) -> None:
    try:
        call()
    except kind as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"nothing was said of {said!r}")


class NoisyRows(Dataset[Tensor]):
    def __init__(self, first: int, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.first, self.noise = first, noise

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.first + index + self.noise()])


class InterleavedStream(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.length)).reshape(-1, 1)[RANK::RANKS])


# --------------------------------------------------------------------------------------------------------------------


def other_rows_are_refused(_: Path) -> None:
    for data in (NoisyRows(RANK), TensorDataset(torch.rand(60, 1) + RANK), [*range(RANK, RANK + 60)]):
        check_refused(lambda data=data: linear_trainer().fit(data), DataError, "do not agree on sample 0 of train_data")
    nested = Subset(Subset(NoisyRows(0), [*range(RANK, 50)] + [0] * RANK), range(50))
    check_refused(lambda: linear_trainer().fit(nested), DataError, "the indices of the Subset train_data")
    trainer = linear_trainer()
    check_refused(lambda: trainer.fit(NoisyRows(0), NoisyRows(RANK)), DataError, "sample 0 of eval_data")
    check_refused(lambda: trainer.evaluate(NoisyRows(RANK)), DataError, "sample 0 of eval_data")
    linear_trainer(data={"compare_items": 0}).fit(NoisyRows(RANK))


def samples_with_random_numbers_are_not(_: Path) -> None:
    chance = random.Random(RANK)
    for noise in (random.random, lambda: torch.rand(()).item(), chance.random):
        for workers in (0, 1):
            linear_trainer(max_steps=1, data={"num_workers": workers}).fit(NoisyRows(0, noise))


def a_function_in_a_parameter_group_is_no_difference(_: Path) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [*parameters], "note": lambda step: step, "of": object()}], lr=1e-4)

    linear_trainer(optimizer=optimizer, max_steps=1).fit(NoisyRows(0))


def a_short_stream_is_an_error(_: Path) -> None:
    trainer = linear_trainer(data={"drop_last": True})
    check_refused(
        lambda: trainer.fit(InterleavedStream(5)),
        DataError,
        "yielded 5 samples in an epoch, fewer than the global batch of 6",
    )


def a_stream_is_read_on_by_ranks_whose_shares_differ(folder: Path) -> None:
    settings: dict[str, Any] = {"global_batch_size": 7, "micro_batch_size": 2, "data": {"num_workers": 2}}
    trainer = linear_trainer(folder / "stream", checkpoint={"every_steps": 2}, **settings)
    for step in trainer.steps(InterleavedStream(60)):
        if step.number == 2:
            break
    assert linear_trainer(folder / "stream", **settings).fit(InterleavedStream(60)).steps > 2
    resumed = linear_trainer(folder / "stream", **settings | {"global_batch_size": 14})
    assert resumed.fit(InterleavedStream(60)).steps == resumed.step, "the epoch has ended: all of it may change"


def containers_are_predicted_also_by_ranks_without_samples(_: Path) -> None:
    for samples in (1, RANKS, 20):
        x = torch.arange(float(samples)).reshape(-1, 1)
        found = linear_trainer().predict(
            x, lambda _, batch: {"logits": batch, 2: [2 * batch, {"a": (batch, batch + 1)}]}
        )
        assert list(found) == ["logits", 2]
        assert torch.equal(found["logits"], x)
        assert isinstance(found[2][1]["a"], tuple)
        assert torch.equal(found[2][1]["a"][1], x + 1)


def entries_stay_what_they_are_whatever_a_rank_calls_them(_: Path) -> None:
    x = torch.arange(20.0).reshape(-1, 1)
    named = [("a", 1.0), ("b", -1.0)][:: -1 if RANK else 1]
    found = linear_trainer().predict(x, lambda _, batch: {name: sign * batch for name, sign in named})
    assert torch.equal(found["a"], x)
    assert torch.equal(found["b"], -x)
    check_refused(
        lambda: linear_trainer().predict(x, lambda _, batch: {"b" if RANK else "a": batch}),
        LossError,
        "different entries: only some of them contain ['a'], ['b']",
    )


def metrics_with_list_states_need_no_sample_on_each_rank(_: Path) -> None:
    try:
        import torchmetrics as tm
    except ModuleNotFoundError:
        return

    def select(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return output.sigmoid().squeeze(1), (batch.squeeze(1) % 2).long()

    def several(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((output, -output, 2 * output), dim=1).softmax(dim=1), batch.squeeze(1).long() % 3

    metrics = {
        "auroc": (tm.AUROC(task="binary"), select),
        "all": (
            tm.MetricCollection({"matrix": tm.ConfusionMatrix(task="binary"), "auroc": tm.AUROC(task="binary")}),
            select,
        ),
        "roc": (tm.ROC(task="multiclass", num_classes=3), several),
    }
    trainer = linear_trainer(metrics=metrics)
    for samples in (1, 2, 7):
        found = trainer.evaluate(torch.arange(float(samples)).reshape(-1, 1))
        assert found["auroc"] == found["all.auroc"]
        assert sum(found[f"all.matrix.{number}"] for number in range(4)) == samples
        assert sum(name.startswith("roc.0.2.") for name in found) > 0


def a_loop_left_at_a_due_step_saves_it(folder: Path) -> None:
    trainer = linear_trainer(folder / "left", checkpoint={"every_steps": 3})
    for step in trainer.steps(NoisyRows(0)):
        if step.number == 3:
            break
    trainer.evaluate(NoisyRows(0))
    assert linear_trainer(folder / "left").step == 3


def a_stop_saves_all_trainers(folder: Path) -> None:
    """Heard by the last rank alone."""
    pair = [linear_trainer(folder / name, epochs=100_000) for name in "ab"]
    try:
        other = pair[1].steps(NoisyRows(0))
        for number, _ in enumerate(pair[0].steps(NoisyRows(0))):
            next(other)
            if number == 2 and RANK == RANKS - 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as ended:
        assert ended.code == 75
    assert pair[0].step >= 3
    assert pair[0].step - pair[1].step in (0, 1)
    again = [linear_trainer(folder / name) for name in "ab"]
    assert [each.step for each in again] == [each.step for each in pair]


def finished_trainers_hold_nothing(folder: Path) -> None:
    def held() -> int:
        gc.collect()  # of the scenarios before
        return len([*Path("/proc/self/fd").iterdir()]) + threading.active_count()

    trainers, counts = [], []
    for number in range(4):
        trainers.append(linear_trainer(folder / f"held{number}", max_steps=2, checkpoint={"every_steps": 1}))
        trainers[-1].fit(NoisyRows(0))
        counts.append(held())
        torch.distributed.barrier()  # a rank that ends closes its connections to the others' store
    assert counts[1:] == counts[1:2] * 3, counts
    for number in range(4 if RANK == 0 else 0):
        assert [each.step for each in checkpoints(folder / f"held{number}", hashes=True)] == [2, 1]


class InSave(Callback):
    """Calls `function` while rank 0 saves, after all other ranks have done their part."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def state_dict(self) -> dict[str, Any]:
        self._function()
        return {}


def all_ranks_return_when_the_checkpoint_is_complete(folder: Path) -> None:
    for save in ("background", "blocking"):
        place = folder / f"complete-{save}"
        slow = InSave(lambda: time.sleep(0.5))
        trainer = linear_trainer(place, max_steps=2, callbacks=[slow], checkpoint={"save": save})
        trainer.fit(NoisyRows(0))
        assert [found.step for found in checkpoints(place) if found.whole] == [2]
        torch.distributed.barrier()
        if RANK == 0:
            shutil.rmtree(place / "step-2", ignore_errors=True)
        torch.distributed.barrier()
        trainer.save()
        assert [found.step for found in checkpoints(place) if found.whole] == [2]


def all_ranks_raise_the_error_of_a_failed_save(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit_files() -> None:
        for process in (os.getpid(), *(child.pid for child in psutil.Process().children())):
            resource.prlimit(process, resource.RLIMIT_FSIZE, (1, before[1]))

    for save in ("background", "blocking"):
        place = folder / f"failed-{save}"
        trainer = linear_trainer(place, max_steps=2, callbacks=[InSave(limit_files)], checkpoint={"save": save})
        for call in (partial(trainer.fit, NoisyRows(0)), trainer.save):
            check_refused(call, CheckpointError, "cannot be written")
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpoints(place) == ()


def one_rank_lists_the_checkpoints_of_a_folder(folder: Path) -> None:
    place = folder / "listed"
    linear_trainer(place, max_steps=4, checkpoint={"every_steps": 2}).fit(NoisyRows(0))
    with patch.object(series, "checkpoints", Mock(side_effect=checkpoints)) as listed:
        assert linear_trainer(place).step == 4
        assert listed.call_count == (RANK == 0)
    torch.distributed.barrier()
    (newest, older) = (found.path / "manifest.json" for found in checkpoints(place))
    torch.distributed.barrier()
    if RANK == 0:
        os.truncate(newest, 100)
    torch.distributed.barrier()
    assert linear_trainer(place).step == 2
    torch.distributed.barrier()
    if RANK == 0:
        os.truncate(older, 0)
    torch.distributed.barrier()
    check_refused(lambda: linear_trainer(place), CheckpointError, "manifest.json is damaged")


SCENARIOS = (
    other_rows_are_refused,
    samples_with_random_numbers_are_not,
    a_function_in_a_parameter_group_is_no_difference,
    a_short_stream_is_an_error,
    a_stream_is_read_on_by_ranks_whose_shares_differ,
    containers_are_predicted_also_by_ranks_without_samples,
    entries_stay_what_they_are_whatever_a_rank_calls_them,
    metrics_with_list_states_need_no_sample_on_each_rank,
    a_loop_left_at_a_due_step_saves_it,
    a_stop_saves_all_trainers,
    finished_trainers_hold_nothing,
    all_ranks_return_when_the_checkpoint_is_complete,
    all_ranks_raise_the_error_of_a_failed_save,
    one_rank_lists_the_checkpoints_of_a_folder,
)

if __name__ == "__main__":
    for scenario in SCENARIOS:
        if len(sys.argv) < 3 or scenario.__name__ in sys.argv[2:]:
            scenario(Path(sys.argv[1]))
    os.write(1, b"all held\n")
