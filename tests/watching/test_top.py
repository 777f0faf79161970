"""`ddpkit top`: what it reads of running jobs, and what it shows of a reading."""

import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.segment import Segment
from rich.table import Table

from ddp_kit.devices.gpus import GpuUsage
from ddp_kit.env import RECORD_NOTE
from ddp_kit.launcher.record import RoundFile, RoundRecord, WorkerRecord
from ddp_kit.watching.readings import (
    HostReadings,
    JobReading,
    RankReading,
    as_json,
    from_json,
    merged,
    readings,
    straggler,
)
from ddp_kit.watching.top import render, screen
from tests.support.launching import DDPKIT, PROGRAMS, seconds, started, wait_until


@pytest.mark.slow
def test_top_reads_a_running_job_and_names_a_slow_rank(
    script: Callable[..., Path], ddpkit: Callable[..., Any], tmp_path: Path
) -> None:
    # Under another name in each process: `ddpkit top` shows all jobs here, those of other tests too.
    path = script((PROGRAMS / "slow_rank.py").read_text(), f"watched_{os.getpid()}.py")
    end, said = tmp_path / "end", tmp_path / "output"
    command = [DDPKIT, "launch", "--nproc-per-node", "2", "--log-dir", "logs", path, end]

    def read() -> list[Any]:
        assert job.poll() is None, said.read_text()
        jobs = json.loads(ddpkit("top", "--once", "--json").stdout)
        return [each for each in jobs if each["script"] == str(path)]

    def row() -> str:
        """Line of rank 0 under the job's title."""
        assert job.poll() is None, said.read_text()
        lines = ddpkit("top", "--once", env={"COLUMNS": "120"}).stdout.splitlines()
        title = next(number for number, line in enumerate(lines) if line.startswith(f"{path.name} "))
        return next(line for line in lines[title:] if line.split()[:1] == ["0"])  # advice may be in between

    with said.open("w") as file, started(*command, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT) as job:
        found: list[Any] = []

        def is_waited_for() -> bool:
            """Whether rank 1 is; rank 0 is, too, between log points at which other programs had its core."""
            found[:] = read()
            return bool(found) and found[0]["ranks"][0]["waits_for"] == 1

        wait_until(is_waited_for, "rank 0 waits for rank 1", within=120)
        (ours,) = found
        first, slow = ours["ranks"]
        assert (ours["world_size"], ours["nodes"], ours["restarts"], ours["launcher"]) == (2, 1, 0, job.pid)
        assert (first["rank"], first["waits_for"]) == (0, 1)
        assert (slow["rank"], slow["waits_for"]) == (1, None)
        assert (ours["arguments"], ours["folder"]) == ([str(end)], str(tmp_path / "run"))
        assert (slow["total"], slow["loss"]) == (10**6, first["loss"])
        assert slow["step"] > 0
        assert slow["seconds_per_step"] > 0.02
        assert first["communication"] > slow["communication"]
        assert slow["memory"] > 0
        assert slow["age"] >= 0
        wait_until(lambda: "rank 1" in row(), "rank 1 in the row of rank 0", within=120)
        end.touch()
        assert job.wait(seconds(120)) == 0, said.read_text()
    assert str(path) not in ddpkit("top", "--once", "--json").stdout
    assert not [*tmp_path.rglob("ddpkit-round.json")], "the folder of logs is as torchrun's"


# The command on a machine where no other test has a job.
ALONE = """
from ddp_kit.cli import main
from ddp_kit.watching import top
top.readings = lambda: ()
main.entry()
"""


def test_top_on_a_terminal_runs_until_a_key_is_pressed(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command, env = [sys.executable, "-c", ALONE, "top"], {"TERM": "xterm"}
    with started(*command, cwd=tmp_path, env=env, stdin=theirs, stdout=theirs, stderr=None) as shown:
        os.close(theirs)
        printed = b""
        while b"no running jobs" not in printed:
            assert select.select([ours], [], [], seconds(60))[0], printed
            printed += os.read(ours, 4096)
        os.write(ours, b"q")
        assert shown.wait(seconds(60)) == 0
    os.close(ours)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--json"], "top --once --json"), (["--interval", "0"], "0.1 to 3600"), (["train.py"], "unrecognized")],
)
def test_top_with_invalid_arguments_is_a_usage_error(ddpkit: Callable[..., Any], words: list[str], said: str) -> None:
    done = ddpkit("top", *words)
    assert done.returncode == 2
    assert said in done.stderr


# --- who waits for whom ----------------------------------------------------------------------------------------------


def _rank(rank: int, communication: float | None = 0.0, **more: Any) -> RankReading:
    known = {"step": 9, "age": 0.0, "communication": communication}
    return RankReading(rank, rank, 100 + rank, "data", **{**known, **more})


def test_straggler_is_the_rank_that_waits_least() -> None:
    assert straggler([_rank(0, 0.6), _rank(1, 0.1), _rank(2, 0.55)]) == 1


def test_straggler_among_equal_ranks_or_without_a_trainer_is_none() -> None:
    assert straggler([_rank(0, 0.3), _rank(1, 0.31), _rank(2, 0.32)]) is None
    assert straggler([_rank(0)]) is None
    assert straggler([_rank(0, 0.9), _rank(1, None, step=None)]) is None


def test_straggler_among_ranks_that_stand_still_is_the_one_behind() -> None:
    ahead = _rank(0, beats=50, age=60.0)
    assert straggler([ahead, _rank(1, beats=48, age=61.0)]) == 1
    assert straggler([ahead, _rank(1, beats=48, age=0.1)]) is None, "it moves"


# --- several hosts ---------------------------------------------------------------------------------------------------


def _job(host: str, *ranks: RankReading, **more: Any) -> JobReading:
    known: dict[str, Any] = {"run_id": "none", "script": "train.py", "nodes": 2, "world_size": 2, "restarts": 0}
    known |= {"node_rank": ranks[0].rank, "seconds": 9.0, "launcher": 42}
    return JobReading(host=host, ranks=tuple(replace(each, host=host) for each in ranks), **{**known, **more})


def test_merged_joins_the_nodes_of_a_job_and_names_the_straggler() -> None:
    other = _job("b", _rank(1, 0.7))
    (job,) = merged([other, _job("a", _rank(0, 0.1)), other])
    assert [(each.rank, each.host, each.waits_for) for each in job.ranks] == [(0, "a", None), (1, "b", 0)]
    assert (job.host, job.node_rank) == ("a", 0)


def test_merged_keeps_different_jobs_apart() -> None:
    assert len(merged([_job("a", _rank(0)), _job("b", _rank(0))])) == 2, "both have a rank 0"
    assert len(merged([_job("a", _rank(0), nodes=1), _job("b", _rank(1), nodes=1)])) == 2
    assert len(merged([_job("a", _rank(0)), _job("b", _rank(1), script="other.py")])) == 2


def test_reading_is_the_same_after_conversion_to_json_and_back() -> None:
    assert from_json(json.dumps(as_json([READING]))) == (READING,)


# --- the picture -----------------------------------------------------------------------------------------------------

GPU = GpuUsage(3, "GPU-1", "NVIDIA H100", load=97, memory_used=40 << 30, memory_total=80 << 30, power=612.0)
READING = JobReading(
    run_id="1",
    script="/home/someone/train.py",
    host="here",
    node_rank=1,
    nodes=2,
    world_size=4,
    restarts=1,
    seconds=3725.0,
    launcher=42,
    ranks=(
        RankReading(2, 0, 100, "the backward pass", 1200, 0.25, 0.02, 0.5, 0.01, 3, 2 << 30, (GPU,)),
        RankReading(3, 1, 101, "data", 1200, 0.25, 0.5, 0.01, 0.02, None, 2 << 30),
    ),
)


def _shown(width: int, job: JobReading = READING) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(render(HostReadings((job,)), width))
    return captured.get()


def test_top_on_a_wide_terminal_shows_all_columns() -> None:
    lines = _shown(200).splitlines()
    assert lines[0].rstrip() == "train.py  4 ranks on node 1 of 2, for 1:02:05, 1 restart, launcher 42"
    for word in (
        "backward pass",
        "1200",
        "0.25",
        "50%",
        "rank 3",
        "2.00 GiB",
        "97 %",
        "40.0 of 80 GiB",
        "612 W",
        "0.0 s",
    ):
        assert word in lines[2], word
    assert "0.0 s" in lines[2]


def test_top_shows_a_column_of_the_mfu_where_it_is_known() -> None:
    assert "MFU" not in _shown(200)
    ranks = tuple(replace(each, mfu=0.431) for each in READING.ranks)
    _, header, first, *_ = _shown(200, replace(READING, ranks=ranks)).splitlines()
    at = header.index("MFU")
    assert first[at : at + 3] == "43%"


def test_top_on_a_narrow_terminal_still_names_the_straggler() -> None:
    title, header, first, *_ = _shown(40).splitlines()
    assert title.rstrip() == "train.py  4 ranks on node 1 of 2", "what does not fit is left out, and not cut"
    assert header.split() == ["rank", "phase", "step", "waits", "for"]
    assert first.split() == ["2", "backward", "pass", "1200", "rank", "3"]


@pytest.mark.parametrize("width", [200, 80, 40, 20])
def test_top_prints_no_line_longer_than_the_terminal(width: int) -> None:
    lines = _shown(width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines), lines
    assert lines[3].split()[0] == "3"
    assert len(lines) == 5, "no line is broken in two"


def test_top_shows_advice_of_any_rank_under_the_title() -> None:
    advised = replace(READING.ranks[1], advice="data 31%: raise data.num_workers (0)")
    lines = _shown(200, replace(READING, ranks=(READING.ranks[0], advised))).splitlines()
    assert lines[1].rstrip() == "advice: data 31%: raise data.num_workers (0)"
    assert lines[2].split()[:2] == ["rank", "pid"]


def _job_of(ranks: int, name: str) -> JobReading:
    of_ranks = tuple(
        RankReading(rank, rank % 8, 100 + rank, "data", 1200, 0.25, 0.02, 0.5, 0.01, 3, host=f"gpu{rank // 8}")
        for rank in range(ranks)
    )
    return replace(READING, script=name, ranks=of_ranks, world_size=ranks)


def _text(lines: list[list[Segment]]) -> list[str]:
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_screen_shows_the_same_lines_as_the_whole_text_from_any_line_on() -> None:
    console = Console(width=120, height=12, markup=False, emoji=False, force_terminal=True, file=io.StringIO())
    hosts = HostReadings((_job_of(30, "a.py"), _job_of(1, "b.py"), _job_of(3, "c.py")), ("gpu9: no answer",))
    whole = _text(console.render_lines(render(hosts, 120), pad=False))
    for above in (0, 1, 3, 4, 20, 30, 34, 37, len(whole) - 11, len(whole)):
        lines, first = screen(hosts, console, above)
        assert first == min(above, len(whole) - 11)
        assert _text(lines) == whole[first : first + 12]
    nothing, first = screen(HostReadings(()), console, 3)
    assert (first, "no running jobs" in _text(nothing)[0]) == (0, True)


@pytest.mark.parametrize("ranks", [64, 1024])
def test_screen_draws_no_more_ranks_than_it_shows(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=120, height=12, markup=False, emoji=False, force_terminal=True, file=io.StringIO())
    drawn = []
    add_row = Table.add_row
    monkeypatch.setattr(
        Table, "add_row", lambda table, *cells, **more: drawn.append(cells) or add_row(table, *cells, **more)
    )
    screen(HostReadings((_job_of(ranks, "a.py"), _job_of(ranks, "b.py"))), console, 20)
    assert len(drawn) == 12


@pytest.mark.parametrize("text", ["[/data/b]", "[red]a", ":smile:", "[link=x]a[/link]"])
def test_top_shows_any_text_as_it_is(text: str) -> None:
    ranks = tuple(replace(each, advice=f"advice {text}", host=f"{each.rank}{text}") for each in READING.ranks)
    job = replace(READING, script=f"{text.replace('/', '')}.py", arguments=("--name", text), folder=f"runs/{text}")
    console = Console(markup=False, emoji=False, width=400)  # as `ddpkit top` has it
    with console.capture() as captured:
        console.print(render(HostReadings((replace(job, ranks=ranks),), (f"problem {text}",)), 400))
    for shown in (f"problem {text}", f"advice {text}", f"in runs/{text}", f"2{text}", text.replace("/", "") + ".py"):
        assert shown in captured.get()
    assert text in captured.get().splitlines()[1]


def test_top_distinguishes_jobs_of_one_script_by_their_arguments() -> None:
    job = replace(READING, arguments=("--lr", "0.1", "--name", "a b"))
    assert _shown(200, job).splitlines()[0].startswith("train.py --lr 0.1 --name 'a b'  4 ranks on node 1 of 2, for 1:")
    title = _shown(50, job).splitlines()[0].rstrip()
    assert title == "train.py --lr 0.1 --name…  4 ranks on node 1 of 2"
    assert _shown(40, job).splitlines()[0].rstrip() == "train.py --lr 0…  4 ranks on node 1 of 2"


def test_top_shows_the_progress_of_a_run_under_the_title() -> None:
    ranks = tuple(replace(each, total=5000, loss=0.23456) for each in READING.ranks)
    job = replace(READING, ranks=ranks, folder="/runs/7")
    assert _shown(80, job).splitlines()[1].rstrip() == (
        "step 1,200 of 5,000 (24%), loss 0.2346, 0:15:50 left, in /runs/7"
    )
    assert _shown(50, job).splitlines()[1].rstrip() == "step 1,200 of 5,000 (24%), loss 0.2346"
    without_total = replace(job, ranks=tuple(replace(each, total=None) for each in ranks), folder="")
    assert _shown(80, without_total).splitlines()[1].rstrip() == "loss 0.2346"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"age": 48.0}, {"age": 50.0}, "all ranks are in data after step 9; `py-spy dump --pid 100`"),
        ({"age": 48.0, "beats": 9}, {"age": 50.0}, "rank 1, which is in data after step 9; `py-spy dump --pid 101"),
        ({"age": 48.0}, {"phase": "ended"}, "rank 1 has ended, and the other ranks may be waiting for it"),
        ({"age": 48.0}, {"age": 1.0}, None),
        ({"age": 48.0, "seconds_per_step": 6.0}, {"age": 50.0}, None),
        ({"age": 48.0}, {"age": 50.0, "phase": "the script, between two steps"}, None),
    ],
    ids=["all", "one-behind", "ended", "moves", "long-steps", "own-code"],
)  # fmt: skip
def test_top_explains_a_hang(first: dict[str, Any], second: dict[str, Any], said: str | None) -> None:
    ranks = [replace(_rank(0), **first), replace(_rank(1), **second)]
    (job,) = merged([_job("a", *ranks, nodes=1)])
    shown = _shown(200, job)
    assert ("no progress for 0:00:48: " in shown) == (said is not None)
    assert said is None or said in shown


def test_top_removes_escape_sequences_of_a_job() -> None:
    attack = "\x1b]0;owned\x07\ud800"
    ranks = tuple(replace(each, host=f"{attack}{each.rank}", advice=attack, phase=attack) for each in READING.ranks)
    job = replace(READING, script=f"/x/{attack}.py", arguments=(attack,), folder=attack, ranks=ranks)
    console = Console(width=200, force_terminal=False)
    with console.capture() as captured:
        console.print(render(HostReadings((job,), (f"gpu1: {attack}",)), 200))
    assert r"\x1b]0;owned\x07\ud800" in captured.get()
    assert "\x1b" not in captured.get()


@pytest.mark.parametrize("wrong", ['{"ranks": 3}', "[1]", '[{"run_id": 7}]', "no JSON"])
def test_reading_with_values_of_wrong_types_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="valid"):
        from_json(wrong)


@pytest.mark.parametrize("noted", ["", "run/record", "nothing/record"])
def test_top_knows_the_folder_of_a_run_once_its_record_exists(
    noted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "record").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / RECORD_NOTE).write_text(noted)
    file = RoundFile(tmp_path)
    worker = WorkerRecord(0, 0, os.getpid(), str(tmp_path / "attempt_0" / "0" / "error.json"))
    file.write(RoundRecord("mine", "train.py", "here", 0, 1, 1, 0, 0.0, (worker,), ("--lr", "0.1")))
    (job,) = (each for each in readings() if each.run_id == "mine")
    file.close()
    assert (job.folder, job.arguments) == ("run" if noted == "run/record" else "", ("--lr", "0.1"))
