"""What is compared of the ranks' data before the first step."""

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ddp_kit import DataConfig, DataError, TrainerConfig
from ddp_kit.config.settings import settings_equal_on_all_ranks
from ddp_kit.data import comparison as comparing
from ddp_kit.data.comparison import RANKS, SampleComparison, check_same_samples
from ddp_kit.distributed import consistency
from ddp_kit.distributed.world import World
from ddp_kit.structures import digest_of_value
from tests.support.toys import world_of_cpus

Pair = namedtuple("Pair", "x y")


@dataclass
class TextSample:
    x: Any
    text: str


class Fetched(Dataset[torch.Tensor]):
    """Notes what is asked for; draws from every generator there is."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.rand(2) + random.random() + np.random.rand() + index


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.tensor([0.0, 1e-30])),
        (torch.zeros(2), torch.zeros(2).bfloat16()),
        (np.zeros(3), np.ones(3)),
        (1, 2),
        ("a", "b"),
        ({"x": torch.zeros(1)}, {"y": torch.zeros(1)}),
        (Pair(1, torch.zeros(2)), Pair(1, torch.ones(2))),
        (TextSample([torch.zeros(2)], "a"), TextSample([torch.zeros(2)], "b")),
    ],
)
def test_digests_of_different_samples_differ(one: object, other: object) -> None:
    assert digest_of_value(one) != digest_of_value(other)
    assert digest_of_value(one) == digest_of_value(one)


def test_digest_of_a_sample_without_a_value_is_none() -> None:
    assert digest_of_value(object()) == digest_of_value(np.array([object()])) == -1


def test_sample_comparison_fetches_few_samples_once_and_draws_nothing() -> None:
    data, comparison = Fetched(), SampleComparison(world_of_cpus(), DataConfig(compare_items=4), 0)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for _ in range(2):
        comparison.compare({"train_data": data})
    assert data.asked == [0, 33, 66, 99]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]


def test_sample_comparison_reads_more_from_memory_and_nothing_if_disabled() -> None:
    rows = Subset(TensorDataset(torch.arange(40)), range(40))
    data, comparison = Fetched(), SampleComparison(world_of_cpus(), DataConfig(compare_items=0), 0)
    comparison.compare({"train_data": data})
    assert (data.asked, comparison._keys(rows)) == ([], [])
    assert len(SampleComparison(world_of_cpus(), DataConfig(), 0)._keys(rows)) == 16


def test_sample_comparison_uses_a_worker_process_if_training_does() -> None:
    data, comparison = Fetched(), SampleComparison(world_of_cpus(), DataConfig(compare_items=4, num_workers=2), 0)
    comparison.compare({"train_data": data})
    assert data.asked == []
    alone = SampleComparison(world_of_cpus(), DataConfig(compare_items=4), 0)
    assert comparison._digests(data, [0, 99], None) == alone._digests(data, [0, 99], None)


def test_sample_comparison_reports_different_ranks_except_for_random_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second rank, as the collective would show it, whose dataset begins with other rows."""

    def gathered(_: World, numbers: list[int]) -> list[list[int]]:
        flag = numbers in ([True], [False])
        return [numbers, numbers] if flag else [numbers, [number + 1 for number in numbers]]

    monkeypatch.setattr(comparing, "gathered", gathered)
    comparison = SampleComparison(world_of_cpus(), DataConfig(), 0)
    with pytest.raises(DataError, match="do not agree on sample 0 of train_data"):
        comparison.compare({"train_data": Fetched()})

    class OwnRandom(Fetched):
        chance = random.Random(0)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(self.chance.random())

    comparison.compare({"train_data": OwnRandom()})


def test_sample_comparison_of_a_slow_dataset_fetches_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_MAX_SECONDS", 0.0)
    data = Fetched()
    SampleComparison(world_of_cpus(), DataConfig(), 0).compare({"train_data": data})
    assert data.asked == [0]


DIFFERENT_DIGESTS = [9, -8]  # the largest digest of the ranks, and the smallest one with another sign


@pytest.mark.parametrize(
    ("samples", "described", "reporter"),
    [
        ((8, 9), "8, 9 on ranks 0, 1", None),
        ((8, 9, 8), "9 on rank 1; 8 on ranks 0, 2", 1),
        ((9, 8, 8, 8), "9 on rank 0; 8 on ranks 1 to 3", 0),
        ((8, 8, 9, 9), "8, 8, 9, 9 on ranks 0 to 3", None),
        ((7, 8, 8, 9, 8), "7, 9 on ranks 0, 3; 8 on ranks 1, 2, 4", 0),
    ],
)
@pytest.mark.parametrize("text", [False, True])
def test_check_agreement_names_the_minority_which_reports_it(
    monkeypatch: pytest.MonkeyPatch, samples: tuple[int, ...], described: str, reporter: int | None, text: bool
) -> None:
    monkeypatch.setattr(consistency, "largest", lambda *_: DIFFERENT_DIGESTS)
    monkeypatch.setattr(consistency, "gathered", lambda world, numbers, group: [[each] for each in samples])
    reporting = []
    for rank, own in enumerate(samples):
        with pytest.raises(DataError) as caught:
            consistency.check_agreement(
                World(rank, len(samples), 0, 1, 0, torch.device("cpu")), {"it": str(own) if text else own}
            )
        assert text or caught.value.message == f"the ranks do not agree on it: {described}"
        reporting += [rank] * (not caught.value.reported_elsewhere)
    assert reporting == ([*range(len(samples))] if reporter is None else [reporter])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("ab", "rank 1 differs from rank 0"),
        ("aabb", "ranks 2, 3 differ from rank 0"),
        ("baaa", "rank 0 differs from ranks 1 to 3"),
        ("abaca", "ranks 1, 3 differ from ranks 0, 2, 4"),
    ],
)
def test_which_differ_compares_ranks_with_the_majority(values: str, words: str) -> None:
    assert consistency.which_differ(dict(enumerate(values))) == words


def _differ(monkeypatch: pytest.MonkeyPatch, name: str, facts: list[consistency.Facts]) -> str:
    """What rank 0 says if the ranks have these facts. Every rank exchanges what it would really send."""
    numbers = [[consistency.digest_of(value.encode()) for value in each.values()] for each in facts]  # type: ignore[union-attr]
    monkeypatch.setattr(consistency, "largest", lambda *_: DIFFERENT_DIGESTS)
    monkeypatch.setattr(consistency, "gathered", lambda *_: numbers)
    sent: list[bytes] = []

    def gathered_bytes(content: bytes, *_: object) -> list[bytes]:
        sent.append(content)
        return [*sent, *[b""] * (len(facts) - len(sent))]

    monkeypatch.setattr(consistency, "gathered_bytes", gathered_bytes)
    for rank, own in enumerate(facts):
        with pytest.raises(DataError) as caught:
            consistency.check_agreement(World(rank, len(facts), 0, 1, 0, torch.device("cpu")), own)
    assert caught.value.hint.startswith("pass the same value on every rank")
    return caught.value.message.removeprefix(f"the ranks do not agree on the setting {name}: ")


@pytest.mark.parametrize("name", settings_equal_on_all_ranks(TrainerConfig()))
def test_every_setting_that_differs_is_named_with_each_ranks_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = consistency.facts_of_settings(TrainerConfig())
    elsewhere = here | {f"the setting {name}": consistency.Shown("'another'")}
    own = here[f"the setting {name}"]
    assert _differ(monkeypatch, name, [here, here, elsewhere]) == f"'another' on rank 2; {own} on ranks 0, 1"


def test_values_that_are_secret_or_long_are_masked_or_shown_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(value: str) -> consistency.Facts:
        return {"the setting checkpoint.dir": consistency.Shown(repr(value))}

    urls = [facts(f"s3://user:{password}@host/runs") for password in ("first", "other")]
    shown = _differ(monkeypatch, "checkpoint.dir", urls)
    assert shown == "'s3://****@host/runs' on rank 0; 's3://****@host/runs' on rank 1"
    folders = [facts(f"/{'long/' * 40}{rank}/{'end' * 40}") for rank in range(12)]
    shown = _differ(monkeypatch, "checkpoint.dir", folders)
    assert shown.startswith("...long/long/long/long/long/long/0/endend")
    assert shown.endswith("; 4 more")
    assert len(shown) < 1000


FACTS: consistency.Facts = {"the setting seed": 0, RANKS: 2, "data.num_workers": 1, "the micro-batch": 4}


def test_resume_with_other_samples_names_each_fact_that_has_changed() -> None:
    check_same_samples(FACTS, FACTS | {"the number of its steps": 7}, 1, 3)
    changed = FACTS | {"the setting seed": 5, "the micro-batch": 8}
    named = "after 3 steps of epoch 2, .*: the setting seed was 0 and is now 5; the micro-batch was 4 and is now 8"
    with pytest.raises(DataError, match=named):
        check_same_samples(FACTS, changed, 1, 3)
    with pytest.raises(DataError, match="the number of its steps was 7 and is now None"):
        check_same_samples(FACTS | {"the number of its steps": 7}, FACTS, 1, 3)


def test_stream_that_resumes_with_another_number_of_ranks_may_have_other_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[object] = []
    monkeypatch.setattr(comparing.logger, "warning", lambda _text, *values: warnings.extend(values))
    check_same_samples(FACTS, FACTS | {RANKS: 1, "data.num_workers": 2, "the micro-batch": 8}, 1, 3)
    assert warnings == [2, "2 ranks", 1]
    with pytest.raises(DataError, match="the setting seed was 0"):
        check_same_samples(FACTS, FACTS | {RANKS: 1, "the setting seed": 5}, 1, 3)
