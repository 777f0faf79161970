"""Replayed passes: gradients as numbers, the verdict on ranks, and passes as messages."""

import math
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ddp_kit.errors import CheckpointError
from ddp_kit.state_values import plain
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer import replay
from ddp_kit.trainer.replay import ALWAYS, ONCE, GradientSums, Repeats, faults, faulty_ranks, same_gradients

CPU = torch.device("cpu")


def sums(gradient: Tensor, tolerance: float = 2e-5) -> replay.Gradients:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    watched = GradientSums([parameter], exact=not tolerance)
    (parameter * gradient).sum().backward()
    watched.close()
    return watched.values()


@pytest.mark.parametrize("size", [1, 7, 4096, 4097, 20_000])
@pytest.mark.parametrize("tolerance", [0.0, 2e-5])
def test_same_gradients_with_one_changed_element_is_false(size: int, tolerance: float) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert same_gradients(sums(gradient, tolerance), sums(gradient.clone(), tolerance), tolerance)
    for place in {0, size // 2, size - 1}:
        changed = gradient.clone()
        changed[place] += 1e-3 * gradient.norm()
        assert not same_gradients(sums(gradient, tolerance), sums(changed, tolerance), tolerance)


def test_same_gradients_allows_rounding_only_with_a_tolerance() -> None:
    gradient = torch.randn(1000)
    rounded = gradient * (1 + 1e-7 * torch.randn(1000))
    assert same_gradients(sums(gradient), sums(rounded), 2e-5)
    assert not same_gradients(sums(gradient, 0.0), sums(rounded, 0.0), 0.0)


def test_same_gradients_ignores_rounding_in_a_tiny_gradient_next_to_large_ones() -> None:
    one, other = [[1e4, 50.0], [1e-12, 1e-6]], [[1e4, 50.0], [1e-12, -1e-6]]
    assert same_gradients(one, other, 2e-5)
    assert not same_gradients([one[1]], [other[1]], 2e-5)


@pytest.mark.parametrize("tolerance", [0.0, 2e-5])
def test_same_gradients_compares_values_that_are_not_finite(tolerance: float) -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert same_gradients(sums(bad, tolerance), sums(bad.clone(), tolerance), tolerance)
    assert not same_gradients(sums(good, tolerance), sums(bad, tolerance), tolerance)


def test_gradient_sums_see_what_hooks_of_the_script_return() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.register_hook(lambda gradient: gradient * 2)
    watched = GradientSums([parameter], exact=False)
    parameter.sum().backward()
    assert watched.values()[0][0] == pytest.approx(12)


def test_gradient_sums_that_discard_keep_no_gradient() -> None:
    parameters = [nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(2))]
    watched = GradientSums(parameters, exact=False, discard=True)
    gradient, unused = torch.autograd.grad(parameters[0].sum(), parameters, allow_unused=True)
    assert unused is None
    assert gradient.untyped_storage().nbytes() == 4
    assert watched.values()[0][0] == pytest.approx(50)
    assert watched.values()[1] == [0.0] * 2


def test_gradient_sums_of_a_sparse_gradient_do_not_depend_on_its_order() -> None:
    layer = nn.Embedding(9, 3, sparse=True)
    found = []
    for tokens in ([1, 5, 1], [5, 1, 1]):
        watched = GradientSums([layer.weight], exact=False)
        layer(torch.tensor(tokens)).square().sum().backward()
        watched.close()
        found.append(watched.values())
    assert same_gradients(*found, 2e-5)


# --- Verdict ----------------------------------------------------------------------------------------------------------


def checked(ranks: int, computed: Callable[[int, int, int], float], distance: int = 1) -> list[Repeats]:
    """The results of a check. `computed`: (rank, pass, number of the computation on this rank) -> the gradient."""

    def one(rank: int, of_pass: int, number: int) -> replay.Gradients:
        return [[computed(rank, of_pass, number)] * 2]

    return [
        Repeats(
            one(rank, rank, 0),
            one(rank, rank, 1),
            one(rank, rank, 2),
            (one(rank, (rank - distance) % ranks, 0), one(rank, (rank - distance) % ranks, 1)),
            one(rank, (rank - 2 * distance) % ranks, 0) if ranks > 2 else [],
        )
        for rank in range(ranks)
    ]


def named(ranks: int, computed: Callable[[int, int, int], float], distance: int = 1) -> dict[int, str]:
    return faults(checked(ranks, computed, distance), distance, lambda one, other: one == other)


@pytest.mark.parametrize("ranks", [3, 4, 8])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_faults_name_the_rank_that_is_wrong_each_time(ranks: int, bad: int) -> None:
    assert named(ranks, lambda rank, of_pass, _: of_pass + 0.5 * (rank == bad)) == {bad: ALWAYS}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("bad", [0, 1])
def test_faults_name_the_rank_that_was_wrong_once_in_its_own_pass_or_in_a_repetition(ranks: int, bad: int) -> None:
    for of_pass in (bad, (bad - 1) % ranks):
        assert named(ranks, lambda *case, p=of_pass: case[1] + 0.5 * (case == (bad, p, 0))) == {bad: ONCE}


def test_faults_of_two_ranks_that_differ_each_time_are_both() -> None:
    assert named(2, lambda rank, of_pass, _: of_pass + 0.5 * rank) == {0: ALWAYS, 1: ALWAYS}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_faults_are_empty_if_no_rank_can_be_named(ranks: int) -> None:
    numbers = iter(range(10**6))
    assert not named(ranks, lambda *_: next(numbers)), "a loss function with a random generator of its own"
    assert not named(ranks, lambda _, of_pass, __: of_pass), "all agree"
    assert ranks == 2 or not named(ranks, lambda rank, of_pass, __: of_pass + rank), "it depends on the rank"
    # The place of the original batch in memory changes rounding.
    assert not named(ranks, lambda rank, of_pass, number: of_pass + 0.5 * (rank == of_pass and number < 2))


def test_faults_name_all_ranks_of_a_wrong_node_and_no_others() -> None:
    assert named(6, lambda rank, of_pass, _: of_pass + 0.5 * (rank in (2, 3)), distance=2) == {2: ALWAYS, 3: ALWAYS}
    assert not named(8, lambda rank, of_pass, _: of_pass + 0.5 * (rank > 3)), "neighbours are wrong alike"


def test_faults_skip_ranks_without_a_pass() -> None:
    results = checked(3, lambda rank, of_pass, _: of_pass + 0.5 * (rank == 1))
    results[2] = results[2]._replace(noted=[], own=[], copied=[])
    results[0] = results[0]._replace(previous=([], []))
    results[1] = results[1]._replace(before_previous=[])
    assert faults(results, 1, lambda one, other: one == other) == {1: ALWAYS}


def test_error_for_faulty_ranks_says_since_when_the_weights_may_be_wrong() -> None:
    places = ["gpu1, NVIDIA H100", "gpu2, NVIDIA H100", "gpu3, NVIDIA H100"]
    error = faulty_ranks(400, 200, {1: ALWAYS}, places)
    assert error.ranks == (1,)
    assert error.message.startswith("rank 1 (gpu2, NVIDIA H100) computed wrong gradients each time at step 400: ")
    assert "resume from a checkpoint of step 200 or before" in error.hint
    error = faulty_ranks(400, None, {1: ONCE, 2: ONCE}, places)
    assert "rank 1 (gpu2, NVIDIA H100) and rank 2 (gpu3, NVIDIA H100) computed wrong gradients once" in error.message
    assert error.ranks == (1, 2)


# --- Messages ---------------------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", ["first", "second"])
BATCHES = {
    "tensor": torch.randn(3, 4),
    "pair": (torch.randn(3), torch.tensor([1, 2, 3])),
    "nested": {"image": torch.randn(2, 3), "meta": [{"name": "a", "size": (1, None)}, 2.5, True]},
    "bfloat16": torch.randn(3).bfloat16(),
    "array": [np.arange(3.0), torch.zeros(0, 2)],
    "strings": {"text": ["a", "b"], 3: torch.tensor(1)},
}


def sent(batch: Any, kind: Any = None) -> Any:
    noted = [[1.0, 2.0]]
    message = replay._packed(replay._Pass(batch, 3, "random", noted)) | {replay._NOTED: torch.tensor(noted)}
    received = replay._unpacked(safetensors.torch.save(message), CPU, kind)
    assert (received.samples, received.random, received.noted) == (3, "random", noted)
    return received.batch


@pytest.mark.parametrize("name", BATCHES)
def test_message_restores_a_batch(name: str) -> None:
    received, form = pytree.tree_flatten(sent(BATCHES[name]))
    values, expected = pytree.tree_flatten(BATCHES[name])
    assert form == expected
    for one, other in zip(received, values, strict=True):
        assert type(one) is type(other)
        assert np.array_equal(plain(one), plain(other))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(100)[3:],
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6)[:, 1:3],
        torch.randn(1, 3).expand(5, 3),
    ],
)
def test_message_restores_address_and_strides_which_determine_rounding(tensor: Tensor) -> None:
    received = sent([tensor])[0]
    assert torch.equal(received, tensor)
    assert received.data_ptr() % 64 == tensor.data_ptr() % 64
    dense = torch.empty_like(tensor).stride() == tensor.stride()
    assert received.stride() == (tensor.stride() if dense else tensor.contiguous().stride())


def test_message_of_a_user_dict_gets_the_class_of_the_own_batch() -> None:
    class Encoding(UserDict):  # type: ignore[type-arg]
        pass

    received = sent(Encoding({"ids": torch.arange(3)}), Encoding({"ids": torch.zeros(1)}))
    assert type(received) is Encoding
    assert received["ids"].tolist() == [0, 1, 2]


def test_message_of_an_unknown_object_is_refused() -> None:
    with pytest.raises(CheckpointError):
        sent([object()])
