"""A user's mistake in several processes: one message, no traceback, and the launcher ends."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import mistakes
from tests.support.launching import PROGRAMS, seconds

Start = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[[str], Path]

FIVE_MISTAKES = """
from ddp_kit import TrainerConfig
TrainerConfig(global_batch_sz=64, precision="bf15", log_every_steps=0, num_workers=2, max_steps=-5)
"""


@pytest.mark.slow
def test_each_mistake_gives_both_ranks_the_message_of_the_table(start: Start) -> None:
    run = start("ddpkit", 2, Path(mistakes.__file__))
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[int, tuple[tuple[str, str], bool]]] = {}
    for line in run.stdout.splitlines():
        rank, what, message, hint, elsewhere = json.loads(line)
        found.setdefault(what, {})[rank] = (message, hint), elsewhere
    for mistake in mistakes.at(2):
        by_rank = found[mistake.what]
        reported = {text for text, elsewhere in by_rank.values() if not elsewhere}
        assert by_rank.keys() == {0, 1}, mistake
        assert len(reported) == 1, mistake
        if mistake.ranks == (2,):  # other messages may contain numbers that depend on the number of ranks
            assert reported == {(mistake.message, mistake.hint)}


@pytest.mark.slow
def test_evaluation_uses_one_model_including_its_batch_norm_statistics(start: Start) -> None:
    run = start("ddpkit", 2, PROGRAMS / "batch_norm.py")
    assert run.returncode == 0, run.stderr
    ranks = [[float(word) for word in line.split()] for line in run.stdout.splitlines()]
    assert ranks[0][1] == ranks[1][1]
    for _, metric, loss_of_the_own_model in ranks:
        assert metric == pytest.approx(loss_of_the_own_model, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes"), [("python", 1), ("torchrun", 3), ("ddpkit", 3)])
def test_configuration_with_five_mistakes_lists_them_once(
    start: Start, script: Script, launcher: str, processes: int
) -> None:
    run = start(launcher, processes, script(FIVE_MISTAKES))
    assert run.returncode == 1
    assert run.stderr.count("ddpkit: error at script.py:3: TrainerConfig has 5 problems:") == 1
    for line in (
        "global_batch_sz = 64: there is no such setting; did you mean global_batch_size?",
        "nearest: 'bf16'",
        "log_every_steps = 0: must be at least 1; nearest: 1",
        "num_workers = 2: there is no such setting; did you mean data.num_workers?",
        "max_steps = -5: must be at least 1; nearest: 1",
    ):
        assert run.stderr.count(line) == 1
    if launcher != "torchrun":  # torchrun shows a traceback of its own
        assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_mistake_on_one_rank_alone_is_shown_by_that_rank(start: Start) -> None:
    run = start("ddpkit", 3, PROGRAMS / "loss_of_a_wrong_type.py")
    assert run.returncode == 1
    assert run.stderr.count("the loss function returned a str") == 1
    assert "ddpkit: error (rank 1) at loss_of_a_wrong_type.py:" in run.stderr
    assert "rank 1 failed first" in run.stderr.splitlines()[-1]


@pytest.mark.slow
def test_verdict_names_the_rank_that_printed_the_mistake(start: Start) -> None:
    run = start("ddpkit", 2, PROGRAMS / "mistake_printed_by_rank_1.py")
    assert run.returncode == 1
    assert run.stderr.count("ddpkit: error at mistake_printed_by_rank_1.py:") == 1, run.stderr
    assert "ddpkit: rank 1 failed first: exit code 1" in run.stderr
    assert "rank 0 then failed" in run.stderr


FAULTS = """
import torch
from torch import nn
from torch.utils.data import IterableDataset
from ddp_kit import DataConfig, Loss, Trainer, TrainerConfig

rank, call = int(os.environ["RANK"]), 0
on = {on}
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.spare, self.leaves_out = nn.Linear(2, 1), nn.Linear(2, 1), False
    def forward(self, batch):
        return self.first(batch) if self.leaves_out else self.first(batch) + self.spare(batch)

def loss_fn(wrapped, batch):
    global call
    call += 1
    model.leaves_out = {leaves_out} and rank in on
    loss = wrapped(batch).mean()
    return {loss} if rank in on else loss

model, data, settings, predict = Net(), torch.randn(40, 2), {{}}, None
{change}
settings = dict(max_steps=4, global_batch_size=8, log_every_steps=2) | settings
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, TrainerConfig(**settings))
if predict:
    trainer.predict(data, predict)
trainer.fit(data)
say("done")
"""
MIXED = "data = [torch.zeros(3 if rank in on and number % 5 == 1 else 2) for number in range(40)]\n"
PREDICT = "predict = lambda model, batch: torch.zeros(len(batch), {width})"
ONE, TWO, BOTH = (0,), (1,), (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "loss", "leaves_out", "change", "said"),
    [
        (BOTH, "wrapped(batch)", False, "", "returned a tensor of shape (4, 1), not a scalar"),
        (TWO, "loss.detach()", False, "", "returned a tensor that does not require grad"),
        (TWO, "loss.item()", False, "", "the loss function returned a float"),
        (ONE, "loss * float('nan')", False, "", "the loss is nan in the first step of this run, on rank 0"),
        (TWO, "loss * float('nan')", False, "", "the loss is nan in the first step of this run, on rank 1"),
        (BOTH, "loss / 0", False, "", "in the first step of this run, on rank 0"),
        (TWO, "loss * (float('nan') if call > 2 else 1)", False, "", "from step 3 on, first on rank 1"),
        (TWO, "'text' if call > 2 else loss", False, "", "the loss function returned a str"),
        (BOTH, "'text' if call > 2 else loss", False, "", "the loss function returned a str"),
        (TWO, "Loss(loss, 1)", False, "", "a plain tensor on some ranks and a Loss on others"),
        (BOTH, "loss", "True", "", "spare.weight, spare.bias got no gradient"),
        (BOTH, "loss", "call == 4", "", "spare.weight, spare.bias got no gradient"),
        (TWO, "loss", "call == 4", "", "spare.weight, spare.bias got no gradient"),
        (ONE, "loss", "call == 2", "settings = dict(max_steps=1, accumulation_steps=2)", "spare.bias got no gradient"),
        (BOTH, "loss", False, MIXED, "data: the samples of a batch differ: shape ("),
        (
            TWO,
            "loss",
            False,
            MIXED + "settings = dict(data=DataConfig(num_workers=1, compare_items=0))",
            "of a batch differ: shape (",
        ),
        (TWO, "loss", False, PREDICT.format(width="1 + (rank in on)"), "float32 (1,); float32 (2,)"),
        (
            TWO,
            "loss",
            False,
            PREDICT.format(width="(rank in on) * len(batch)") + "; data = data[:10]",
            "differ in shape or dtype: ",
        ),
    ],
)
def test_mistake_on_several_ranks_is_shown_once_and_ends_all(
    start: Start, script: Script, on: tuple[int, ...], loss: str, leaves_out: object, change: str, said: str
) -> None:
    run = start("ddpkit", 2, script(FAULTS.format(on=on, loss=loss, leaves_out=leaves_out, change=change)))
    assert run.returncode == 1
    assert run.stderr.count("ddpkit: error") == 1, run.stderr
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert "done" not in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--cold",)], ids=["warm", "cold"])
def test_rank_with_the_cause_is_named_whichever_rank_ends_first(
    ddpkit: Start, script: Script, flags: tuple[str, ...]
) -> None:
    main = script(FAULTS.format(on=(2,), loss="loss.detach()", leaves_out=False, change=""))
    run = ddpkit("launch", *flags, "--nproc-per-node", 4, main)
    assert run.stderr.count("ddpkit: error") == 1, run.stderr
    assert "ddpkit: error (rank 2) at script.py:" in run.stderr
    assert "ddpkit: rank 2 failed first: exit code 1" in run.stderr


APART = PROGRAMS / "ranks_apart.py"
TIMES = str(seconds(0.1)), str(seconds(1))
"""Seconds that the barrier waits for answers, and seconds before it says that it waits."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "on_step",
            "rank 1 is waiting at trainer.stop() after step 3, but other ranks did not arrive: rank 0 (it did not make "
            "this",
        ),
        ("on_evaluate", "rank 1 is waiting at trainer.stop() after step 10, but other ranks did not arrive: rank 0"),
        ("left", "rank 1 is waiting at trainer.evaluate() after step 3, but other ranks did not arrive: rank 0"),
        (
            "saves",
            "rank 0 is waiting at trainer.save() after step 1, but other ranks did not arrive: rank 1 (it did not make "
            "this",
        ),
        ("other", "rank 0 at trainer.evaluate() after step 0, rank 1 at trainer.fit() after step 0"),
    ],
)
def test_ranks_that_diverge_are_reported(start: Start, place: str, said: str) -> None:
    run = start("ddpkit", 2, APART, place, *TIMES)
    assert run.returncode == 1
    assert said in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "place", "said"),
    [
        ("ddpkit", "fit", "trainer.fit() after step 0"),
        ("torchrun", "fit", "trainer.fit() after step 0"),
        ("ddpkit", "made", "Trainer(...)"),
    ],
)
def test_barrier_names_a_rank_that_exited_before_it(start: Start, launcher: str, place: str, said: str) -> None:
    run = start(launcher, 2, APART, place, *TIMES)
    assert run.returncode == 1
    assert f"rank 0 is waiting at {said}, but other ranks did not arrive: rank 1 (its process ha" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_barrier_reports_that_other_ranks_have_not_made_their_trainer(start: Start, rank: int) -> None:
    run = start("ddpkit", 2, PROGRAMS / "makes_trainer_late.py", str(rank))
    assert run.returncode == 0, run.stderr
    assert f"rank {rank} is waiting at Trainer(...): not all of the 2 processes have reached this call" in run.stderr


@pytest.mark.slow
def test_incomplete_launcher_environment_is_refused_without_a_traceback(start: Start) -> None:
    run = start(
        "python",
        1,
        PROGRAMS / "makes_trainer_late.py",
        "0",
        env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": ""},
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "MASTER_ADDR" in run.stderr


OMITS = PROGRAMS / "omits_module.py"
# Seconds that a rank waits for others: until a line says so, and until that is an error. No rank waits before the
# module is left out: from then on SHORT is for waits in vain, and LONG for those that end.
SHORT = str(seconds(0.5)), str(seconds(2))
LONG = str(seconds(100)), str(seconds(200))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "who", "since", "said"),
    [
        ("ddp", "each", 0, "got no gradient in a step, but DDP waits for the gradients of all parameters"),
        ("ddp", "one", 2, "blocks.2.0.weight, blocks.2.0.bias got no gradient in a step"),
        (
            "fsdp",
            "each",
            0,
            "different calls: rank 0 at blocks.2 in training pass 1, rank 1 at blocks.1 in training pass 1\n"
            "  hint: run the same modules on all ranks",
        ),
        (
            "fsdp",
            "one",
            3,
            "rank 1 is waiting at the model's end in training pass 4, where the previous pass ran blocks.2, but other "
            "ranks did not arrive: rank 0 (",
        ),
    ],
)
def test_module_that_some_ranks_omit_is_named_without_a_hang(
    start: Start, strategy: str, who: str, since: int, said: str
) -> None:
    run = start("ddpkit", 2, OMITS, strategy, who, str(since), *SHORT)
    assert run.returncode == 1
    assert said in run.stderr
    assert run.stderr.count("ddpkit: error") == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout.count("step 1") == (2 if since > 1 else 0)
    assert "step 2" not in run.stdout


@pytest.mark.slow
def test_module_that_all_ranks_omit_in_a_pass_is_accepted(start: Start) -> None:
    run = start("ddpkit", 2, OMITS, "fsdp", "all", "3", *LONG)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("step 2") == 2
    assert "did not reach" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 2])
def test_rank_whose_weights_differ_from_the_majority_is_the_cause(start: Start, script: Script, odd: int) -> None:
    drift = """
def drift(loss):
    with torch.no_grad():
        model.spare.bias.add_(call == 3)
    return loss
"""
    run = start("ddpkit", 3, script(FAULTS.format(on=(odd,), loss="drift(loss)", leaves_out=False, change=drift)))
    assert run.returncode == 1
    differs = f"first difference: spare.bias): rank {odd} differs from ranks {'1, 2' if odd == 0 else '0, 1'}\n"
    assert run.stderr.count(differs) == 1, run.stderr
    assert f"ddpkit: error{f' (rank {odd})' if odd else ''} at script.py:" in run.stderr
    assert f"ddpkit: rank {odd} failed first: exit code 1" in run.stderr
