"""What the watch of a rehearsal records in one process. Whole runs: end_to_end/test_rehearsals.py."""

import gc
import random
import warnings
from collections.abc import Iterator
from copy import deepcopy
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp_kit.rehearsal.lines import Instructions, Line, read_attempts
from ddp_kit.rehearsal.watch import Watch, checksum, checksum_of_batch


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    Instructions(launch=0, steps=100, steps_after_restart=100, folders=(str(tmp_path / "saved"),)).write(tmp_path)
    watch = Watch(tmp_path, Instructions.read(tmp_path))
    yield watch
    watch._file.close()


def lines(folder: Path) -> list[Line]:
    return read_attempts(folder)[0][0]


def watched_step(watch: Watch, net: nn.Module, optimizer: torch.optim.Optimizer, value: float = 1.0) -> None:
    loss = net(torch.full((3, 2), value)).square().mean()
    with watch.backward_pass(loss):
        loss.backward()
    watch.before_step(optimizer)
    optimizer.step()
    watch.after_step(optimizer)
    optimizer.zero_grad()


def test_line_of_a_step_has_the_state_before_it(watch: Watch, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25)
    before = checksum(net[0].weight)
    watched_step(watch, net, optimizer)
    watched_step(watch, net, optimizer)
    first, second = lines(tmp_path)
    assert (first.step, second.step) == (1, 2)
    assert first.parameters == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert first.weights[0] == before
    assert second.weights != first.weights
    assert first.settings["lr"] == (0.25,)
    assert not first.state
    assert set(second.state) == {"exp_avg", "exp_avg_sq", "step"}
    assert second.count == 1
    assert len(first.losses) == 1
    assert set(first.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_watch_draws_no_random_numbers_and_changes_no_tensor(watch: Watch) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    weight = net.weight.detach().clone()
    watched_step(watch, net, optimizer)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]
    assert torch.equal(net.weight, weight)


def test_averages_of_the_weights_are_copies(watch: Watch, tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    average = AveragedModel(net)
    by_name = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    watched_step(watch, net, torch.optim.SGD(net.parameters(), lr=0.1))
    copies = lines(tmp_path)[0].copies
    assert {"AveragedModel.weight", "AveragedModel.bias", "dict.weight", "dict.bias"} <= set(copies)
    assert checksum(by_name["weight"]) in copies["dict.weight"]
    assert average.module.weight.shape == (2, 2)


def test_average_in_a_list_is_a_copy_with_the_names_of_the_parameters(watch: Watch, tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.requires_grad_(True).bias.requires_grad_(False)
    averages = [[parameter.detach() + 1 for parameter in net.parameters()], [net.weight.detach() + 2]]
    watched_step(watch, net, torch.optim.SGD(net.parameters(), lr=0.1))
    copies = lines(tmp_path)[0].copies
    assert checksum(averages[0][0]) in copies["list.weight"]
    assert checksum(averages[0][1]) in copies["list.bias"]


def test_copy_of_the_model_is_recorded_after_the_script_freezes_the_garbage_collector(
    watch: Watch, tmp_path: Path
) -> None:
    net = nn.Linear(2, 2)
    average = deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watched_step(watch, net, optimizer)
    gc.freeze()
    try:
        watched_step(watch, net, optimizer)
    finally:
        gc.unfreeze()
    assert checksum(average.weight) in lines(tmp_path)[1].copies["Linear.weight"]


def test_gradient_scaler_is_recorded_with_its_scale(watch: Watch, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    net = nn.Linear(2, 2)
    watched_step(watch, net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert 512.0 in [state["scale"] for state in lines(tmp_path)[0].scalers]
    assert scaler.get_scale() == 512.0


def test_steps_before_the_first_backward_pass_and_inside_another_step_are_not_counted(
    watch: Watch, tmp_path: Path
) -> None:
    net = nn.Linear(2, 2)
    outer, inner = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    watch.before_step(outer)
    watch.after_step(outer)
    with watch.backward_pass(torch.ones(())), watch.backward_pass(torch.ones(())):
        pass
    outer.state[net.weight] = None  # as in ZeRO, for a parameter of another rank
    inner.state[net.weight]["momentum_buffer"] = torch.ones(2, 2)
    watch.before_step(outer)
    watch.before_step(inner)
    watch.after_step(inner)
    watch.after_step(outer)
    (line,) = lines(tmp_path)
    assert (line.step, line.optimizer, len(line.losses)) == (1, 0, 1)
    assert set(line.state) == {"momentum_buffer"}


def test_step_with_a_closure_is_counted_with_the_passes_that_it_makes(watch: Watch, tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(3, 2)).square().mean()
        with watch.backward_pass(loss):
            loss.backward()
        return loss

    weights = checksum(net.weight)
    for _ in range(2):
        watch.before_step(optimizer, with_closure=True)
        optimizer.step(closure)
        watch.after_step(optimizer)
    first, second = lines(tmp_path)
    assert (first.step, second.step) == (1, 2)
    assert first.weights[0] == weights
    assert len(first.losses) == 3
    directions = optimizer.state[net.weight]["old_dirs"]
    watch.before_step(optimizer, with_closure=True)
    watch.after_step(optimizer)
    directions[0] += 1e-6  # not visible in its text
    watch.before_step(optimizer, with_closure=True)
    watch.after_step(optimizer)
    before, after = lines(tmp_path)[2:]
    assert before.state["old_dirs"] != after.state["old_dirs"]


def test_checksum_of_batch_adds_up_over_any_division_of_the_samples() -> None:
    batch = {"x": torch.arange(12.0).reshape(4, 3), "y": torch.arange(4)}
    halves = [{name: tensor[part] for name, tensor in batch.items()} for part in (slice(2), slice(2, 4))]
    size, total, whole = checksum_of_batch(batch)
    (size_1, total_1, whole_1), (size_2, total_2, _) = map(checksum_of_batch, halves)
    assert (size, total) == (size_1 + size_2, (total_1 + total_2) % 2**64)
    assert whole != whole_1
    shuffled = {name: tensor.flip(0) for name, tensor in batch.items()}
    assert checksum_of_batch(shuffled)[:2] == (size, total)
    assert checksum_of_batch(shuffled)[2] != whole
    other = {**batch, "y": batch["y"] + 1}
    assert checksum_of_batch(other)[1] != total


class Color(Enum):
    RED = torch.ones(2)


class Linked:
    def __init__(self) -> None:
        self.itself, self.x = self, torch.ones(2)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # these layouts are in beta state
    LAYOUTS = [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    ]


@pytest.mark.parametrize(
    "batch",
    [
        *LAYOUTS,
        torch.ones(()),
        [],
        ["a", "b"],
        3,
        None,
        (np.ones(3), {"text": "x"}),
        [torch.ones(2, 2), torch.ones(3)],
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, device="meta"),
        np.ones((3, 3))[::-1],
        np.ones(3, dtype=">f8"),
        Color.RED,
        Linked(),
        torch,
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_checksum_of_batch_accepts_any_batch(batch: object) -> None:
    assert checksum_of_batch(batch) == checksum_of_batch(batch)


def test_checksum_of_batch_does_not_depend_on_the_order_of_a_set() -> None:
    texts = {f"text {number}" for number in range(20)}
    assert checksum_of_batch(texts) == checksum_of_batch(sorted(texts))


def test_file_of_the_run_is_no_file_elsewhere(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(watch, "_end", lambda: ended.append(True))
    net = nn.Linear(2, 2)
    watch.check_own(tmp_path.parent / "before the first step.pt")
    watched_step(watch, net, torch.optim.SGD(net.parameters(), lr=0.1))
    watch.check_own(tmp_path / "saved" / "checkpoint.pt")
    assert not ended
    watch.check_own(str(tmp_path.parent / "elsewhere.pt"))
    assert ended
