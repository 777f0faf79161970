"""A repeated pass leaves the model as it was, whatever passes write; several ranks: end_to_end/replayed.py."""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddp_kit import Trainer
from ddp_kit.metrics import Loss
from ddp_kit.trainer import repeated_pass
from ddp_kit.trainer.repeated_pass import WEIGHTS, NotRepeatable, PassState, repeat
from tests.support.toys import mean_square, trainer_for


class Writes(nn.Module):
    """A model with one of everything that a forward pass may write, of which `write` changes one thing."""

    def __init__(self, write: "Callable[[Writes, Tensor], object]") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.write = write
        self.layer, self.slow = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)
        self.table, self.hidden = torch.ones(3), torch.zeros(1)
        self.count, self.rate, self.flag, self.name, self.nothing = 0, 0.5, True, "a", None
        self.list, self.nested = [1.0], {"a": [1, (2, [3])]}
        self.queue: deque[Any] = deque([1, 2], maxlen=2)
        self.set, self.ordered, self.default, self.counter = {1}, OrderedDict(a=1), defaultdict(int, a=1), Counter(a=1)
        self.tensors, self.teachers = [torch.ones(3)], [nn.Linear(3, 1)]
        self.array = np.ones(3)
        self.generator = torch.Generator().manual_seed(1)
        self.python, self.numpy, self.old_numpy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self, x)
        facts = torch.tensor(numbers_in(self.state()), dtype=torch.float32)
        return self.layer(x) * (1 + facts.cos().sum())

    def state(self) -> dict[str, Any]:
        """Everything that `WRITES` changes."""
        random_states = [
            self.generator.get_state().tolist()[:40],
            list(self.python.getstate()[1]),
            list(self.numpy.bit_generator.state["state"].values()),
            [int(self.old_numpy.get_state()[2])],  # type: ignore[arg-type]
        ]
        others = {
            name: value
            for name, value in vars(self).items()
            if name not in vars(nn.Module()) and not isinstance(value, torch.Generator) and name != "write"
        }
        tensors = [*self.parameters(), *self.buffers(), *self.teachers[0].parameters(), *self.layer.buffers()]
        steps = [*vars(self.layer).get("steps", [])]
        return {"weights": tensors, "random": random_states, "training": self.slow.training, "steps": steps, **others}


def numbers_in(value: Any) -> list[float]:
    """All numbers in nested values."""
    if isinstance(value, Tensor | np.ndarray):
        return [float(each) for each in value.reshape(-1).tolist()]
    if isinstance(value, dict):
        return [number for item in value.items() for number in numbers_in(item)]
    if isinstance(value, list | tuple | deque | set):
        return [number for item in value for number in numbers_in(item)]
    if isinstance(value, str):
        return [float(sum(map(ord, value)))]
    return [float(value)] if isinstance(value, int | float) else []


def nothing(model: Writes, x: Tensor) -> None:
    pass


def weight_in_place(model: Writes, x: Tensor) -> None:
    with torch.no_grad():
        model.layer.weight.mul_(1.25)


def frozen_weight(model: Writes, x: Tensor) -> None:
    with torch.no_grad():
        model.slow.weight.lerp_(model.layer.weight, 0.25)


def weight_by_data(model: Writes, x: Tensor) -> None:
    model.slow.weight.data.add_(0.5)


def data_of_weight(model: Writes, x: Tensor) -> None:
    model.slow.weight.data = model.slow.weight.data * 0.5 + model.layer.weight.data


def hidden_module(model: Writes, x: Tensor) -> None:
    model.teachers[0].weight.data.add_(0.5)


def buffer(model: Writes, x: Tensor) -> None:
    model.kept += x.mean()


def new_buffer(model: Writes, x: Tensor) -> None:
    model.kept = model.kept * 2


def unsaved_buffer(model: Writes, x: Tensor) -> None:
    model.unsaved.mul_(2)


def tensor_in_place(model: Writes, x: Tensor) -> None:
    model.table.mul_(2)


def tensor_in_list(model: Writes, x: Tensor) -> None:
    model.tensors[0].mul_(2)


def new_tensor(model: Writes, x: Tensor) -> None:
    model.hidden = (model.hidden + x.mean()).detach()


def simple_values(model: Writes, x: Tensor) -> None:
    model.count += 1
    model.rate *= 0.5
    model.flag, model.name, model.nothing = not model.flag, model.name + "b", 1  # type: ignore[assignment]
    model.slow.eval()


def containers(model: Writes, x: Tensor) -> None:
    model.list.append(2.0)
    model.nested["a"][1][1].append(4)  # type: ignore[index]
    model.queue.append(len(model.list))
    model.set.add(len(model.list))
    model.ordered["b"] = model.default["b"] = model.counter["b"] = len(model.list)
    model.ordered.move_to_end("a")


def new_attribute_of_submodule(model: Writes, x: Tensor) -> None:
    model.layer.steps = [*vars(model.layer).get("steps", [7]), 1]  # type: ignore[assignment]


def array(model: Writes, x: Tensor) -> None:
    model.array *= 2


def own_generators(model: Writes, x: Tensor) -> None:
    torch.rand((), generator=model.generator)
    model.python.random()
    model.numpy.random()
    model.old_numpy.rand()


def global_generators(model: Writes, x: Tensor) -> None:
    model.rate = float(torch.rand(()) + random.random() + np.random.rand())


RESTORED = {
    write.__name__: write
    for write in (
        nothing, buffer, new_buffer, unsaved_buffer, new_tensor, simple_values, containers, new_attribute_of_submodule,
        array, own_generators, global_generators,
    )
}  # fmt: skip
NOTICED = {
    weight_in_place: "layer.weight",
    frozen_weight: "slow.weight",
    weight_by_data: "slow.weight",
    data_of_weight: "slow.weight",
    hidden_module: "teachers[0].weight",
    tensor_in_place: "table",
    tensor_in_list: "tensors[0]",
}


def writing_trainer(model: nn.Module) -> Trainer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return trainer_for(model=model, loss_fn=mean_square, optimizer=torch.optim.SGD(trained, lr=0.1))


def check_repeated_pass(model: Writes, written: set[str]) -> list[str]:
    """Run a pass and repeat it: the loss and the model must be as after the pass. Returns what was not copied."""
    context = writing_trainer(model)._run
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = PassState(model, written, weights="each", graphs=False)
    batch = torch.ones(2, 3)
    loss = mean_square(model, batch)
    changed = before.changed()
    state = numbers_in(model.state())
    queue = model.queue

    def set_random() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])

    drawn = random.getstate(), torch.get_rng_state().tolist()
    repeated, changed_again = repeat(
        context, batch, set_random, lambda value: value, start=before, written=written, alone=True
    )
    assert not isinstance(repeated, Loss)
    if not changed:
        assert repeated.item() == loss.item()
        assert numbers_in(model.state()) == state
        assert not changed_again
        assert model.queue is queue
    assert (random.getstate(), torch.get_rng_state().tolist()) == drawn
    return changed


@pytest.mark.parametrize("name", RESTORED)
def test_repeated_pass_leaves_what_forward_passes_write_as_it_was(name: str) -> None:
    model = Writes(RESTORED[name])
    for _ in range(2):
        assert check_repeated_pass(model, set()) == []
    if name != "nothing":
        before = numbers_in(model.state())
        model(torch.ones(2, 3))
        assert numbers_in(model.state()) != before, "the case shows nothing"


@pytest.mark.parametrize(("write", "name"), NOTICED.items())
def test_tensor_that_a_pass_writes_is_noticed_and_from_then_on_copied(write: Any, name: str) -> None:
    model = Writes(write)
    assert check_repeated_pass(model, set()) == [name]
    assert check_repeated_pass(model, {name}) == []


def test_weights_that_are_compared_together_have_one_name() -> None:
    model = Writes(weight_by_data)
    state = PassState(model)
    assert not state.changed()
    model(torch.ones(2, 3))
    assert state.changed() == [WEIGHTS]
    assert PassState(model, weights="none").changed() == []


def test_failed_pass_leaves_the_model_as_it_was() -> None:
    def fail(model: Writes, x: Tensor) -> None:
        simple_values(model, x)
        containers(model, x)
        raise RuntimeError("no\nmore")

    model = Writes(fail)
    state = numbers_in(model.state())
    with pytest.raises(NotRepeatable, match="^RuntimeError: no$") as raised:
        repeat(writing_trainer(model)._run, torch.ones(2, 3), lambda: None, float, alone=True)  # type: ignore[arg-type]
    assert raised.value.after.changed() == []
    assert numbers_in(model.state()) == state


def test_failed_pass_names_the_weights_that_it_has_written() -> None:
    def fail(model: Writes, x: Tensor) -> None:
        weight_in_place(model, x)
        raise RuntimeError("no")

    model = Writes(fail)
    with pytest.raises(NotRepeatable) as raised:
        repeat(writing_trainer(model)._run, torch.ones(2, 3), lambda: None, float, weights="each", alone=True)  # type: ignore[arg-type]
    assert raised.value.after.changed() == ["layer.weight"]


def test_state_before_a_pass_does_not_hold_activations() -> None:
    """A module may keep its last output: its memory must be free for those of the next pass."""

    def keep(model: Writes, x: Tensor) -> None:
        model.hidden = model.layer(x)
        model.list = [model.hidden]  # type: ignore[list-item]

    model = Writes(nothing)
    keep(model, torch.ones(2, 3))
    kept, listed = model.hidden, model.list
    for graphs in (False, True):
        state = PassState(model, graphs=graphs)
        model.hidden, model.list = torch.zeros(1), []
        state.restore()
        assert (model.hidden is kept) == (model.list is listed) == graphs
        model.hidden, model.list = kept, listed


def test_large_containers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_pass, "_LONGEST", 2)
    model = Writes(nothing)
    model.list = [1.0, 2.0, 3.0]
    state = PassState(model)
    model.list.append(4.0)
    state.restore()
    assert len(model.list) == 4


def test_modules_beside_the_model_are_restored_and_named() -> None:
    model, loss = nn.Linear(1, 1), nn.BatchNorm1d(1)
    state = PassState(model, beside=[loss], weights="each")
    loss(torch.tensor([[1.0], [3.0]]))
    assert state.changed() == []
    state.restore()
    assert loss.num_batches_tracked == 0
    with torch.no_grad():
        loss.weight.fill_(2.0)
        model.weight.fill_(2.0)
    assert sorted(state.changed()) == ["BatchNorm1d.weight", "weight"]
