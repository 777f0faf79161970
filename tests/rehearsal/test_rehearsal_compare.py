"""Comparison of the recordings of a rehearsal. The whole command: end_to_end/test_rehearsals.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.rehearsal import compare
from ddp_kit.rehearsal.lines import Line, attempt_file, read_attempts, write_line

RATES = (0.1,) * 3 + (0.05,) * 3 + (0.025,) * 4


def line(step: int, rank: int = 0) -> Line:
    """A line of a run in which everything changes in each step, with epochs of four steps."""
    return Line(
        step=step,
        parameters=("layer.weight", "layer.bias") if step == 1 else (),
        weights=(f"weight {step}", f"bias {step}"),
        numel=6,
        norm=10.0 + step,
        state={"exp_avg": f"average {step}"} if step > 1 else {},
        settings={"lr": (RATES[step - 1],), "weight_decay": (0.01,)},
        scalers=({"scale": 1024.0},),
        losses=(2.0 + 1 / step + rank,),
        batches=((4, 1000 * step + rank, f"batch {step} of rank {rank}"),),
        epochs=((0, True, step // 4),) if step % 4 == 1 else (),
        random={"Python": "same", "torch": f"torch {step}"},
        buffers={"bn.running_mean": (f"mean {step}",)},
        copies={"AveragedModel.weight": (f"copy {step}",)},
    )


def lines_by_rank(ranks: int = 2, steps: int = 10) -> dict[int, list[Line]]:
    return {rank: [line(step, rank) for step in range(1, steps + 1)] for rank in range(ranks)}


def resumed_lines(begin: int = 5, *, ranks: tuple[int, ...] = (0, 1), only_first: bool = False, **changes: Any) -> Any:
    """The undisturbed run from an index on, with changed values on some ranks."""
    attempt = {rank: lines[begin:] for rank, lines in lines_by_rank().items()}
    for rank in ranks:
        lines = attempt[rank]
        attempt[rank] = [
            replace(each, **changes) if index == 0 or not only_first else each for index, each in enumerate(lines)
        ]
    return attempt


def found(attempt: Any) -> list[compare.Difference]:
    begin = compare.begins_at(lines_by_rank(), attempt)
    assert begin == 5
    return compare.differences(lines_by_rank(), attempt, begin)


def test_attempt_that_continues_the_undisturbed_run_has_no_difference() -> None:
    assert found(resumed_lines()) == []
    assert compare.compared_steps(lines_by_rank(), resumed_lines(), 5) == (6, 10)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"settings": {"lr": (0.1,), "weight_decay": (0.01,)}}, "learning rate", "learning rate 0.05 -> 0.1"),
        ({"settings": {"lr": (0.05,), "weight_decay": (0.1,)}}, "settings", "weight_decay 0.01 -> 0.1"),
        ({"state": {}}, "optimizer", "the optimizer's state is empty (exp_avg missing)"),
        ({"weights": ("other", "bias 6")}, "weights", "the weights: 1 of 2 tensors, first layer.weight"),
        ({"weights": ("weight 5", "bias 5")}, "weights", "the weights are those of step 5"),
        ({"scalers": ({"scale": 65536.0},)}, "scaler", "gradient scaler: scale 1024 -> 65536"),
        ({"losses": ()}, "passes", "backward passes per step 1 -> 0"),
        ({"batches": ((4, 9, "unknown"),)}, "samples", "the samples are other ones"),
        ({"random": {"torch": "other"}}, "random", "the random state of torch"),
        ({"buffers": {"bn.running_mean": ("other",)}}, "buffers", "buffer bn.running_mean"),
        ({"copies": {"AveragedModel.weight": ("other",)}}, "copies", "copy of the model: AveragedModel.weight"),
        ({"losses": (2.5,)}, "loss", "loss 2.16667 -> 2.5"),
    ],
)
def test_difference_has_its_kind_step_and_text(changes: dict[str, Any], kind: str, text: str) -> None:
    first = found(resumed_lines(**changes))[0]
    assert (first.kind, first.step) == (kind, 6)
    assert first.text.startswith(text)
    assert kind in compare.CAUSES


def test_difference_of_one_rank_names_the_rank() -> None:
    attempt = resumed_lines(ranks=(1,), buffers={"bn.running_mean": ("other",)})
    assert found(attempt)[0].description == "buffer bn.running_mean (rank 1)"


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (1, "the samples start again, with those of step 1"),
        (5, "the samples are those of step 5, where the epoch begins"),
        (4, "the samples are those of step 4"),
    ],
)
def test_samples_of_another_step_name_this_step(step: int, text: str) -> None:
    attempt = {rank: lines[5:] for rank, lines in lines_by_rank().items()}
    for rank, lines in attempt.items():
        lines[0] = replace(lines[0], batches=line(step, rank).batches)
    assert found(attempt)[0].text == text


def test_batches_that_are_skipped_or_drawn_ahead_after_a_resume_are_no_difference() -> None:
    attempt = {rank: lines[5:] for rank, lines in lines_by_rank().items()}
    for rank, lines in attempt.items():
        skipped = (*line(5, rank).batches, *lines[0].batches)
        lines[0] = replace(lines[0], batches=skipped)
    assert found(attempt) == []


def test_weights_saved_before_the_step_do_not_move_where_the_attempt_begins() -> None:
    attempt = resumed_lines(only_first=True, weights=("weight 5", "bias 5"))
    assert found(attempt)[0].text == "the weights are those of step 5"


def test_weights_that_are_not_loaded_do_not_move_where_the_attempt_begins() -> None:
    attempt = resumed_lines(only_first=True, weights=("weight 1", "bias 1"))
    assert found(attempt)[0].text == "the weights are the initial ones"


def test_script_that_loads_only_its_weights_begins_where_they_were_saved() -> None:
    attempt = {rank: lines[5:] for rank, lines in lines_by_rank().items()}
    for rank, lines in attempt.items():
        fresh = line(1, rank)
        lines[0] = replace(fresh, weights=lines[0].weights)
    kinds = [each.kind for each in found(attempt)]
    assert kinds[:3] == ["optimizer", "learning rate", "samples"]


def test_attempt_without_the_weights_of_the_undisturbed_run_begins_where_other_evidence_shows() -> None:
    attempt = resumed_lines(weights=("random", "random"))
    assert compare.begins_at(lines_by_rank(), attempt) == 5
    assert compare.begins_at(lines_by_rank(), {0: [Line(step=1, weights=("random",))]}) is None


def test_described_omits_what_follows_from_another_difference() -> None:
    attempt = resumed_lines(batches=((4, 9, "unknown"),), losses=(9.0,), buffers={"bn.running_mean": ("other",)})
    assert compare.described(found(attempt)) == "the samples are other ones"


def test_kinds_that_differ_undisturbed_are_ignored() -> None:
    attempt = resumed_lines(losses=(9.0,), settings={"lr": (1.0,)})
    kinds = {each.kind for each in compare.differences(lines_by_rank(), attempt, 5, frozenset({"loss"}))}
    assert "loss" not in kinds
    assert "learning rate" in kinds


@pytest.mark.parametrize(
    ("field", "noisy", "other", "text"),
    [
        ("buffers", {"noisy": ("1",)}, {"bn.running_mean": ("other",)}, "buffer bn.running_mean"),
        ("copies", {"noisy": ("1",)}, {"AveragedModel.weight": ("other",)}, "copy of the model: AveragedModel.weight"),
        ("state", {"noisy": "1"}, {"exp_avg": "other"}, "the optimizer's state (exp_avg)"),
        ("settings", {"noisy": (1.0,)}, {"weight_decay": (0.5,)}, "weight_decay 0.01 -> 0.5"),
        ("settings", {"lr": (7.0,)}, {"weight_decay": (0.5,)}, "weight_decay 0.01 -> 0.5"),
    ],
)
def test_value_that_differs_undisturbed_hides_no_other_value(
    field: str, noisy: dict[str, Any], other: dict[str, Any], text: str
) -> None:
    def changed(recording: Any, values: dict[str, Any]) -> Any:
        return {
            rank: [replace(each, **{field: {**getattr(each, field), **values}}) for each in lines]
            for rank, lines in recording.items()
        }

    names = list(noisy)
    first, second = changed(lines_by_rank(), {names[0]: "0"}), changed(lines_by_rank(), noisy)
    noise = compare.noise(first, second)
    reference = compare.without(first, noise)
    assert compare.differences(reference, compare.without(second, noise)) == []
    (found,) = compare.differences(reference, compare.without(changed(first, other | noisy), noise))
    assert found.text == text


def test_random_states_that_a_script_does_not_seed_are_not_compared() -> None:
    first, second = (
        {
            rank: [replace(each, random={"Python": name, **each.random}) for each in lines]
            for rank, lines in lines_by_rank().items()
        }
        for name in ("a", "b")
    )
    for lines in (*first.values(), *second.values()):
        lines[:] = [replace(each, random={**each.random, "Python": f"{id(lines)}"}) for each in lines]
    noise = compare.noise(first, second)
    seeded = compare.without(first, noise)
    assert compare.differences(seeded, compare.without(second, noise)) == []
    other = {
        rank: [replace(each, random={**each.random, "torch": "other"}) for each in lines]
        for rank, lines in lines_by_rank().items()
    }
    assert compare.differences(seeded, other)[0].text == "the random state of torch"


def test_random_state_that_nothing_uses_is_harmless() -> None:
    assert compare.is_harmless(found(resumed_lines(random={"torch": "other"})))
    assert not compare.is_harmless(found(resumed_lines(random={"torch": "other"}, losses=(9.0,))))


def test_pass_of_a_step_that_the_scaler_skipped_before_the_save_is_harmless() -> None:
    reference = lines_by_rank()
    for lines in reference.values():
        lines[5] = replace(lines[5], losses=(9.0, *lines[5].losses))
    differing = compare.differences(reference, resumed_lines(), 5)
    assert [each.text for each in differing] == ["backward passes per step 2 -> 1"]
    assert compare.is_harmless(differing)


def test_dict_that_is_there_for_one_step_is_no_copy_of_the_model() -> None:
    attempt = resumed_lines(only_first=True, copies={"AveragedModel.weight": ("other",)})
    assert found(attempt) == []


def test_repeated_epoch_is_found_at_its_first_step() -> None:
    repeating = {
        rank: [
            replace(
                each, batches=line((each.step - 1) % 4 + 1, rank).batches, epochs=((0, True, 0),) * bool(each.epochs)
            )
            for each in lines
        ]
        for rank, lines in lines_by_rank().items()
    }
    repeated = compare.repeated_epoch(repeating)
    assert repeated is not None
    assert repeated.step == 5
    assert compare.repeated_epoch(lines_by_rank()) is None


def test_repeated_epoch_ignores_a_loader_from_which_one_batch_was_taken() -> None:
    peeked = {
        0: [
            replace(line(1), epochs=((0, True, 0), (1, True, 0)), batches=line(1).batches * 2),
            *(line(step) for step in range(2, 5)),
        ]
    }
    assert compare.repeated_epoch(peeked) is None


def test_another_number_of_ranks_is_compared_in_total() -> None:
    alone = {0: [replace(each, weights=("near",), count=None) for each in lines_by_rank(ranks=1)[0]]}
    for index, each in enumerate(alone[0]):
        pair = [lines_by_rank()[rank][index] for rank in (0, 1)]
        batches = tuple(batch for other in pair for batch in other.batches)
        losses = tuple(loss for other in pair for loss in other.losses)
        alone[0][index] = replace(each, batches=batches, losses=losses)
    assert compare.differences_in_total(lines_by_rank(), {0: alone[0][5:]}, 5) == []
    other_samples = {0: [replace(each, batches=((8, 1, "other"),)) for each in alone[0][5:]]}
    assert [each.kind for each in compare.differences_in_total(lines_by_rank(), other_samples, 5)] == ["samples"]
    larger_batch = {0: [replace(each, batches=((12, 1, "other"),)) for each in alone[0][5:]]}
    assert "12 samples instead of 8" in compare.differences_in_total(lines_by_rank(), larger_batch, 5)[0].text
    other_loss = {0: [replace(each, losses=(each.losses[0] * 1.1,)) for each in alone[0][5:]]}
    assert [each.kind for each in compare.differences_in_total(lines_by_rank(), other_loss, 5)] == ["mean loss"]
    assert compare.differences_in_total(lines_by_rank(), other_loss, 5, noise=0.2) == []


def test_first_save_is_no_log_file() -> None:
    lines = [replace(line(step), files=("log.txt", *["a.pt"] * (step == 6))) for step in range(1, 11)]
    assert compare.first_save({0: lines}) == 5
    assert compare.first_save(lines_by_rank()) is None


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    for rank, lines in lines_by_rank().items():
        text = "".join(map(write_line, lines))
        (tmp_path / attempt_file(0, 0, rank)).write_text(text)
    (tmp_path / attempt_file(0, 1, 0)).write_text(write_line(line(3)) + '{"step": 4, "wei')
    first, second = read_attempts(tmp_path)
    assert first == lines_by_rank()
    assert second == {0: [line(3)]}
