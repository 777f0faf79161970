"""`ddpkit rehearse` on scripts that resume exactly, and on scripts with one planted fault each."""

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DDPKIT, PROGRAMS, ROOT, run, seconds, started, wait_until

REHEARSALS, RECIPES = PROGRAMS / "rehearsals", ROOT / "examples" / "recipes"

pytestmark = pytest.mark.slow


def rehearse(folder: Path, *words: object, ranks: int = 2, code: int = 0) -> list[dict[str, Any]]:
    """Run a rehearsal to its end, and return its runs: undisturbed, killed, stopped, and at other numbers of ranks."""
    done = run(DDPKIT, "rehearse", "--json", "--nproc-per-node", ranks, "--steps", 30, *words, cwd=folder, timeout=400)
    assert done.returncode == code, done.stdout + done.stderr
    assert not list(folder.glob("out-*")), "the folders of the runs are removed"
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


def refusal(folder: Path, *words: object, code: int = 2) -> str:
    """What a rehearsal that cannot be done says."""
    done = run(DDPKIT, "rehearse", *words, cwd=folder, timeout=400)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("scheduler", "learning rate", "learning rate 0.0025 -> 0.01"),
        ("position", "samples", "the samples start again, with those of step 1"),
        ("batch_norm", "buffers", "buffers 1.running_mean and 1 more (rank 1)"),
        ("optimizer", "optimizer", "the optimizer's state is empty"),
        ("seed", "random", "the random state of torch"),
        ("average", "copies", "AveragedModel.0.weight"),
        ("scaler", "scaler", "gradient scaler: scale 8192 -> 1024"),
        ("accumulation", "passes", "backward passes per step 2 -> 1"),
        ("partial_epoch", "samples", "where the epoch begins"),
        ("before_step", "weights", "the weights are those of step 14"),
        ("other_file", "weights", "the weights are those of step 8 (rank 1)"),
    ],
)
def test_rehearsal_names_a_planted_fault_and_its_step(tmp_path: Path, fault: str, kind: str, text: str) -> None:
    undisturbed, *disturbed = rehearse(tmp_path, REHEARSALS / "plain.py", "out-{run}", fault, code=1)
    assert undisturbed["equal"]
    for result in disturbed:
        first = result["differences"][0]
        assert (first["kind"], first["step"]) == (kind, 15), result
        assert text in result["summary"]
        assert result["summary"].startswith("differs from step 15")


def test_rehearsal_names_the_epoch_that_repeats_the_samples_of_the_previous_one(tmp_path: Path) -> None:
    undisturbed, *disturbed = rehearse(tmp_path, REHEARSALS / "plain.py", "out-{run}", "set_epoch", code=1)
    assert undisturbed["differences"][0]["kind"] == "epochs"
    assert undisturbed["differences"][0]["step"] == 8
    assert "set_epoch" in undisturbed["cause"]
    assert all(result["equal"] for result in disturbed)


@pytest.mark.parametrize(
    "words",
    [
        (REHEARSALS / "plain.py", "out-{run}"),
        (REHEARSALS / "elastic.py", "--checkpoint-file", "out-{run}/checkpoint.pt"),
        (REHEARSALS / "nanogpt.py", "out-{run}"),
        (REHEARSALS / "accelerated.py", "--output_dir", "out-{run}"),
        (REHEARSALS / "hf_trainer.py", "--output_dir", "out-{run}"),
        (RECIPES / "image_classifier.py",),
        (RECIPES / "token_batches.py", "checkpoint.dir=run", "checkpoint.every_steps=6"),
        (RECIPES / "lora.py",),
    ],
    ids=lambda words: Path(words[0]).stem,
)
def test_rehearsal_of_an_exact_script_finds_no_difference(tmp_path: Path, words: tuple[object, ...]) -> None:
    package = {"accelerated": "accelerate", "hf_trainer": "transformers", "lora": "peft"}.get(Path(str(words[0])).stem)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    results = rehearse(tmp_path, *words)
    assert len(results) == 3
    for result in results:
        assert result["equal"], result
        assert result["summary"].startswith("equal")
    assert all("resumed with step" in result["summary"] for result in results[1:])


def test_rehearsal_at_another_number_of_ranks_compares_within_a_tolerance(tmp_path: Path) -> None:
    *results, fewer, more = rehearse(tmp_path, "--ranks", "1,3", REHEARSALS / "trainer.py")
    assert all(result["equal"] for result in (*results, fewer, more))
    assert "tolerance" in fewer["summary"]
    assert "tolerance" in more["summary"]
    assert not (tmp_path / "run").exists(), "checkpoint.dir is replaced"
    *_, moved = rehearse(tmp_path, "--ranks", 1, REHEARSALS / "plain.py", "out-{run}", code=1)
    assert "the global batch has 8 samples instead of 16" in moved["summary"]


def test_rehearsal_of_a_random_script_does_not_blame_the_resume(tmp_path: Path) -> None:
    words = ("--ranks", 2, REHEARSALS / "unusual.py", "random", "out-{run}")
    undisturbed, *disturbed = rehearse(tmp_path, *words, ranks=1, code=1)
    assert undisturbed["summary"].startswith("differ from step 1:")
    assert "random by itself" in undisturbed["cause"]
    assert all(result["equal"] for result in disturbed), disturbed


def test_rehearsal_of_two_optimizers_counts_the_steps_of_the_first_one(tmp_path: Path) -> None:
    words = (REHEARSALS / "unusual.py", "two_optimizers", "out-{run}")
    assert all(result["equal"] for result in rehearse(tmp_path, *words, ranks=1))


@pytest.mark.parametrize("what", ["autograd_grad", "functional_grad"])
def test_rehearsal_of_a_script_without_backward_passes_counts_its_steps(tmp_path: Path, what: str) -> None:
    words = (REHEARSALS / "unusual.py", what, "out-{run}")
    assert all(result["equal"] for result in rehearse(tmp_path, *words, ranks=1))


def test_rehearsal_of_a_script_that_saves_only_on_sigterm_shows_this_resume(tmp_path: Path) -> None:
    words = (REHEARSALS / "unusual.py", "saves_on_sigterm", "out-{run}")
    _, killed, stopped = rehearse(tmp_path, *words, ranks=1, code=1)
    assert killed["summary"].startswith("not shown: the script had saved nothing")
    assert stopped["equal"]


def test_rehearsal_of_a_script_that_ignores_sigterm_ends_it_and_says_so(tmp_path: Path) -> None:
    words = (REHEARSALS / "unusual.py", "ignores_sigterm", "out-{run}")
    *_, stopped = rehearse(tmp_path, *words, ranks=1)
    assert stopped["equal"]
    assert "continued after SIGTERM until step 30" in stopped["note"]


def test_rehearsal_of_a_script_that_does_not_load_its_checkpoint_says_that_it_starts_again(tmp_path: Path) -> None:
    words = (REHEARSALS / "unusual.py", "ignores_checkpoint", "out-{run}")
    _, *disturbed = rehearse(tmp_path, *words, ranks=1, code=1)
    for result in disturbed:
        assert result["summary"] == "the run starts again at step 1, although files were saved"


def test_rehearsal_of_a_script_that_ends_early_compares_the_steps_that_it_makes(tmp_path: Path) -> None:
    words = (REHEARSALS / "unusual.py", "ends_early", "out-{run}")
    (tmp_path / "queue.py").write_text("")  # the launcher must not search the current folder
    undisturbed, killed, _ = rehearse(tmp_path, *words, ranks=1, code=1)
    assert undisturbed["summary"] == "equal in all 6 steps"
    assert killed["summary"].startswith("not shown")


@pytest.mark.parametrize(
    ("what", "folder", "code", "message"),
    [
        ("fails", "out-{run}", 1, "ValueError: the data is not there"),
        ("without_optimizer", "out-{run}", 2, "without a step of a torch.optim.Optimizer"),
        ("prints_forever", "out-{run}", 2, "made no optimizer step within 6 s"),
        ("ignores_checkpoint", "shared", 2, "shared/checkpoint.tmp, which existed before the rehearsal"),
        ("opens", "shared", 2, "shared/checkpoint.tmp, which existed before the rehearsal"),
        ("opens", "new", 2, "in a folder that all runs would share"),
        ("changes_folder", "out-{run}", 2, "changes its current folder before it saves"),
    ],
)
def test_rehearsal_that_is_impossible_says_why(tmp_path: Path, what: str, folder: str, code: int, message: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "checkpoint.tmp").write_text("of the user")
    timeout = ("--step-timeout", 6) if what == "prints_forever" else ()
    said = refusal(tmp_path, *timeout, REHEARSALS / "unusual.py", what, folder, code=code)
    assert message in said
    assert (tmp_path / "shared" / "checkpoint.tmp").read_text() == "of the user"
    assert not list(tmp_path.rglob("out-*"))


def test_rehearsal_does_not_overwrite_a_checkpoint_of_accelerate(tmp_path: Path) -> None:
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    saved = tmp_path / "saved" / "step-007" / "model.safetensors"
    saved.parent.mkdir(parents=True)
    saved.write_text("of the user")
    said = refusal(tmp_path, REHEARSALS / "accelerated.py", "--output_dir", "saved")
    assert f"changes {saved}, which existed before the rehearsal" in said
    assert saved.read_text() == "of the user"


def test_rehearsal_that_a_launcher_flag_prevents_has_the_launchers_message_and_exit_code(tmp_path: Path) -> None:
    words = (REHEARSALS / "unusual.py", "ends_early", "out-{run}")
    assert "--nproc-per-node 0 is less than 1" in refusal(tmp_path, "--nproc-per-node", 0, *words)
    *_, more = rehearse(tmp_path, "--ranks", 99999999, REHEARSALS / "plain.py", "out-{run}", ranks=1, code=1)
    assert "more processes than Linux allows" in more["summary"]
    assert not more["cause"]


def test_rehearsal_that_two_signals_end_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    words = ("--steps", 10000, "--shutdown-timeout", 2, REHEARSALS / "unusual.py", "ignores_sigterm", "out-{run}")
    with started(DDPKIT, "rehearse", *words, cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")}) as process:
        wait_until(lambda: [*tmp_path.glob("out-*/checkpoint.pt")], "saved")
        process.terminate()
        wait_until(lambda: [*tmp_path.glob("out-*/stopping")], "stopping")  # for two seconds
        process.terminate()
        assert process.wait(seconds(60)) == 128 + signal.SIGTERM
    assert not [*tmp_path.glob("out-*"), *(tmp_path / "tmp").glob("ddpkit-rehearsal-*")]
