"""Which optimizers can be given shards, and which models have shards."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ddp_kit import ConfigError
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel.optimizer_trial import check_elementwise
from ddp_kit.parallel.shards import Shards, check_dense_gradients, check_no_hooks
from ddp_kit.parallel.strategy import SingleRank
from ddp_kit.state_values import Piece


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
        lambda parameters: torch.optim.Adam([{"params": parameters, "weight_decay": 0.1}], fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.RMSprop(parameters),
        lambda parameters: torch.optim.Adagrad(parameters),
    ],
)
def test_check_elementwise_accepts_optimizers_that_update_each_value_alone(make: Callable[[Any], Any]) -> None:
    optimizer, before, others = make(parameters()), torch.get_rng_state(), random.getstate()
    check_elementwise(optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == others
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5)
    check_elementwise(optimizer)


class NormedByTensor(torch.optim.SGD):
    """Divides each gradient by the norm of its tensor, as LAMB and LARS do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad /= each.grad.norm()
        super().step(closure)


def test_check_elementwise_refuses_an_optimizer_that_uses_whole_tensors() -> None:
    with pytest.raises(ConfigError, match="NormedByTensor cannot be sharded: the update of a value depends on"):
        check_elementwise(NormedByTensor(parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="Adafactor cannot be sharded"):
        check_elementwise(torch.optim.Adafactor(parameters()))


def test_check_elementwise_refuses_at_the_start_of_a_warm_up_too() -> None:
    optimizer = torch.optim.Adafactor(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5)
    with pytest.raises(ConfigError, match="Adafactor cannot be sharded: the update of a value depends on"):
        check_elementwise(optimizer)


class RuleOptimizer(torch.optim.Optimizer):
    """What users write: some rule for each tensor of a group, or for all."""

    def __init__(
        self, params: Any, lr: float = 0.1, rule: str = "plain", calls: list[int] | None = None, max_norm: float = 5.0
    ) -> None:
        super().__init__(params, {"lr": lr, "rule": rule, "calls": calls, "max_norm": max_norm})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        everything = [each for group in self.param_groups for each in group["params"]]
        for group in self.param_groups:
            if group["calls"] is not None:
                group["calls"].append(1)
            if group["rule"] == "clipped":
                nn.utils.clip_grad_norm_(everything, group["max_norm"])
            for each in group["params"]:
                if group["rule"] == "normalised":
                    each.grad /= each.grad.norm()
                if group["rule"] == "centred kernels" and each.ndim == 4:
                    each.grad -= each.grad.mean()
                if group["rule"] != "still":
                    each.sub_(each.grad, alpha=group["lr"])


def test_check_elementwise_tries_every_group() -> None:
    first, second = parameters()
    check_elementwise(RuleOptimizer([{"params": [first]}, {"params": [second], "lr": 0.2}]))
    with pytest.raises(ConfigError, match="depends on other values"):
        check_elementwise(RuleOptimizer([{"params": [first]}, {"params": [second], "rule": "normalised"}]))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rule": "clipped"}, "depends on other values"),
        ({"rule": "clipped", "max_norm": 1e3}, "depends on other values"),
        ({"rule": "centred kernels"}, "depends on other values"),
        ({"rule": "still"}, "a trial run does not change any weights"),
    ],
)
def test_check_elementwise_refuses_rules_over_several_values(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_elementwise(RuleOptimizer(parameters(), **settings))


class FromSize(torch.optim.SGD):
    """Has a rule over several values of a tensor from some size on, like optimizers with factors or blocks."""

    def __init__(self, params: Any, rule: str, size: int) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0].update(rule=rule, size=size)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                rule, size, grad = group["rule"], group["size"], each.grad
                if rule == "factors" and each.ndim == 2 and min(each.shape) >= size:
                    square = grad.square()
                    grad.div_((square.mean(0) * square.mean(1)[:, None] / square.mean()).sqrt() + 1e-8)
                if rule == "one side" and each.ndim == 2 and max(each.shape) >= size:
                    grad.div_(grad.norm(dim=0) + 1e-8)
                if rule == "blocks" and each.numel() >= size:
                    width = size // 4
                    blocks = grad.reshape(-1)[: grad.numel() // width * width].view(-1, width)
                    blocks.div_(blocks.abs().amax(dim=1, keepdim=True) + 1e-8)
        super().step(closure)


@pytest.mark.parametrize("rule", ["factors", "one side", "blocks"])
@pytest.mark.parametrize("size", [8, 32, 128, 512, 1024])
def test_check_elementwise_refuses_rules_that_begin_at_the_size_of_a_parameter(rule: str, size: int) -> None:
    weight, other = nn.Parameter(torch.randn(1024, 1040)), nn.Parameter(torch.randn(4))
    optimizer = FromSize([other, weight], rule, size)
    assert weight.numel() < 2**21, "the trial has the shape of the parameter"
    with pytest.raises(ConfigError, match=r"tensor of shape \(1024, 1040\), the update of a value depends on other"):
        check_elementwise(optimizer)
    optimizer.param_groups[0]["params"] = [other]
    check_elementwise(optimizer)


@pytest.mark.parametrize("shape", [(50257, 768), (8192, 28672), (64, 1024, 1024, 3), (3_000_000,)])
def test_check_elementwise_tries_large_parameters_with_smaller_dimensions(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.empty(shape, device="meta"))
    check_elementwise(torch.optim.AdamW([weight]))
    with pytest.raises(ConfigError, match="the update of a value depends on other values"):
        check_elementwise(FromSize([weight], "factors" if len(shape) == 2 else "blocks", 512))


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 1), (31, 33), (4, 2, 3, 3), (0, 5), ()])
def test_check_elementwise_accepts_every_elementwise_optimizer_with_any_shape(shape: tuple[int, ...]) -> None:
    for kind in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"):
        optimizer = getattr(torch.optim, kind)([nn.Parameter(torch.ones(shape))])
        try:
            check_elementwise(optimizer)
        except ConfigError as refused:
            pytest.fail(f"{kind}: {refused}")


class DividingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for each in (one for group in self.param_groups for one in group["params"]):
            each.grad /= each.numel() / each.numel()
        super().step(closure)


def test_check_elementwise_refuses_an_optimizer_that_fails_on_empty_tensors() -> None:
    with pytest.raises(
        ConfigError, match="shards may be empty, but a trial run on empty tensors fails with ZeroDivisionError"
    ):
        check_elementwise(DividingSGD(parameters(), lr=0.1))


def test_check_elementwise_does_not_change_the_users_settings() -> None:
    calls: list[int] = []
    check_elementwise(RuleOptimizer(parameters(), calls=calls))
    assert calls == []


def test_shards_divide_the_state_that_a_constructor_makes() -> None:
    whole = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = torch.optim.Adagrad([whole], initial_accumulator_value=0.5)
    optimizer.state[whole]["sum"] += torch.arange(6.0).reshape(2, 3)
    piece = Piece(whole.detach().reshape(-1)[2:5], (2, 3), (2,), flat=True)
    shards = Shards({whole: piece}, {whole: "weight"})
    shards.give_to(optimizer)
    assert [*optimizer.state] == [shards.of[whole]]
    assert optimizer.state[shards.of[whole]]["sum"].tolist() == [2.5, 3.5, 4.5]


def test_shards_refuse_state_of_another_shape_by_name() -> None:
    whole = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([whole], lr=0.1)
    optimizer.state[whole]["rows"] = torch.ones(2)
    shards = Shards({whole: Piece(whole.detach().reshape(-1)[2:5], (2, 3), (2,), flat=True)}, {whole: "weight"})
    with pytest.raises(ConfigError, match="rows of weight has the shape"):
        shards.give_to(optimizer)


def test_sparse_gradients_are_refused_unless_the_embedding_is_frozen() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True))
    model[1].requires_grad_(False)
    with pytest.raises(ConfigError, match="this setting does not support modules with sparse gradients: 0\n"):
        check_dense_gradients(model, "this setting")
    check_dense_gradients(model.requires_grad_(False), "this setting")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_max_norm_are_refused_at_several_ranks_unless_frozen(kind: Any) -> None:
    for ranks in (1, 2):
        strategy = SingleRank(World(0, ranks, 0, ranks, 0, torch.device("cpu")), ParallelConfig())
        model = nn.ModuleDict({"rows": kind(4, 2, max_norm=1.0), "layer": nn.Linear(2, 1)})
        with (
            pytest.raises(ConfigError, match="max_norm are not supported with several ranks: rows")
            if ranks > 1
            else nullcontext()
        ):
            strategy.check(model)
        model["rows"].requires_grad_(False)
        strategy.check(model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused_by_name_where_parameters_are_replaced(register: str) -> None:
    model = nn.Linear(2, 1)
    handle = getattr(model.bias, register)(lambda _: None)
    with pytest.raises(ConfigError, match="hooks on their gradients would not run: bias"):
        check_no_hooks(model)
    handle.remove()
    check_no_hooks(model)
