"""Values that several ranks log: their means, and what is exchanged and created for them."""

import json
import math
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.distributed.world import World
from ddp_kit.trainer import context
from ddp_kit.trainer.context import over_all_ranks

CPU = torch.device("cpu")
Pairs = dict[str, tuple[float, float]]


def means_of_ranks(monkeypatch: pytest.MonkeyPatch, ranks: Sequence[Pairs]) -> tuple[list[dict[str, float]], int]:
    """What each rank computes from all ranks' (sum, weight), and its number of collectives. Ranks are threads."""
    store = dist.HashStore()
    own = threading.local()
    collectives: list[int] = []

    def gather(whole: Tensor, part: Tensor, _group: object) -> None:
        own.group._allgather_base(whole, part).wait()
        collectives.append(own.rank)

    def run(rank: int) -> dict[str, float]:
        own.rank = rank
        own.group = dist.ProcessGroupGloo(store, rank, len(ranks), timedelta(seconds=60))
        table = torch.tensor([*ranks[rank].values()], dtype=torch.float64).view(-1, 2)
        return over_all_ranks(World(rank, len(ranks), 0, 1, 0, CPU), [*ranks[rank]], table)

    monkeypatch.setattr(context, "gather_ranges", gather)
    with ThreadPoolExecutor(len(ranks)) as threads:
        found = [*threads.map(run, range(len(ranks)))]
    assert collectives.count(0) * len(ranks) == len(collectives)
    return found, collectives.count(0)


def expected_means(ranks: Sequence[Pairs]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for pairs in ranks:
        for name, (total, weight) in pairs.items():
            so_far = sums.setdefault(name, [0.0, 0.0])
            so_far[0] += total
            so_far[1] += weight
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}


def random_pairs(generator: random.Random, names: Sequence[str]) -> Pairs:
    """Sums whose total depends on the order in which they are added."""
    return {name: (generator.gauss() * 10 ** generator.uniform(-8, 8), generator.uniform(1, 9)) for name in names}


@pytest.mark.parametrize(
    "names",
    [
        [["a", "b", "c"]] * 5,
        [["b", "a"], ["a", "b"], ["a", "b"], ["b", "a"]],
        [["a"], [], ["c", "a"], ["é", "a"]],
        [["only on rank 0"], [], []],
        [[], [], ["only on the last rank"]],
    ],
    ids=["equal", "other order", "different", "first rank", "last rank"],
)
def test_means_are_sums_in_rank_order_on_every_rank(monkeypatch: pytest.MonkeyPatch, names: list[list[str]]) -> None:
    generator = random.Random(1)
    ranks = [random_pairs(generator, of_rank) for of_rank in names]
    found, collectives = means_of_ranks(monkeypatch, ranks)
    expected = expected_means(ranks)
    for means in found:
        assert [*means.items()] == [*expected.items()], "the same bits, in the same order"
    assert collectives == 2


@pytest.mark.parametrize("names", [["a", "b", "c", "d"], ["a", "b", "c", "d", "of rank 0"]], ids=["equal", "different"])
def test_means_of_values_that_are_not_finite_or_have_no_weight(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    values = {"a": (math.nan, 1.0), "b": (math.inf, 2.0), "c": (1.0, 0.0), "d": (math.inf, 1.0)}
    values["of rank 0"] = (3.0, 2.0)
    ranks = [
        {name: values[name] for name in names},
        {"a": (1.0, 1.0), "b": (1.0, 2.0), "c": (0.0, 0.0), "d": (-math.inf, 1.0)},
    ]
    for means in means_of_ranks(monkeypatch, ranks)[0]:
        assert [*means] == names
        assert math.isnan(means["a"])
        assert means["b"] == math.inf
        assert math.isnan(means["c"])
        assert math.isnan(means["d"])
        assert means.get("of rank 0", 1.5) == 1.5


def test_means_of_one_rank_on_a_gpu_need_no_process_group() -> None:
    world = World(0, 1, 0, 1, 0, torch.device("cuda"))
    assert over_all_ranks(world, ["a"], torch.tensor([[3.0, 2.0]], dtype=torch.float64)) == {"a": 1.5}


@pytest.mark.parametrize("ranks", [2, 512, 8192])
def test_equal_names_are_not_sent_and_numbers_have_8_bytes(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    sent: list[int] = []

    def gather(whole: Tensor, part: Tensor, _group: object) -> None:
        sent.append(part.nbytes)
        whole.view(ranks, -1)[:] = part

    def no_text(*_: object) -> None:
        raise AssertionError("a text was read")

    monkeypatch.setattr(context, "gather_ranges", gather)
    monkeypatch.setattr(context.json, "loads", no_text)
    names = [f"metric/{number}" for number in range(10)]
    table = torch.rand(10, 2, dtype=torch.float64)
    assert over_all_ranks(World(0, ranks, 0, 8, 0, CPU), names, table) == pytest.approx(
        {name: total / weight for name, (total, weight) in zip(names, table.tolist(), strict=True)}
    )
    assert sent == [24, 160]


@pytest.mark.parametrize("ranks", [4, 8192])
def test_equal_lists_of_names_are_read_once(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The first half of the ranks logs what this rank logs, the second half nothing, as stages of a pipeline."""
    read: list[bytes] = []
    half = ranks // 2

    def gather(whole: Tensor, part: Tensor, _group: object) -> None:
        rows = whole.view(ranks, -1)
        rows[:] = part
        if part.dtype == torch.uint8:
            rows[half:] = torch.frombuffer(bytearray(b"[]".rjust(82).ljust(len(part))), dtype=torch.uint8)
        else:
            rows[half:] = torch.tensor([7, 2, 0])

    def loads(text: bytes) -> object:
        read.append(text.strip())
        return json.loads(text)

    monkeypatch.setattr(context, "gather_ranges", gather)
    monkeypatch.setattr(context, "json", SimpleNamespace(dumps=json.dumps, loads=loads))
    table = torch.tensor([[1.0, 2.0]] * 5, dtype=torch.float64)
    means = over_all_ranks(World(0, ranks, 0, 8, 0, CPU), [*"abcde"], table)
    assert means == dict.fromkeys("abcde", 0.5)
    assert read == [b'["a", "b", "c", "d", "e"]', b"[]"]
