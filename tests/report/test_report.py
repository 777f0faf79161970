"""`ddpkit report`: what it reads, what it finds, and which files it writes."""

import json
import random
import re
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_kit import __version__
from ddp_kit.cli.main import main
from ddp_kit.config.settings import ProfileConfig
from ddp_kit.errors import UsageError
from ddp_kit.report.charts import charts_of_run, comparing_charts
from ddp_kit.report.command import run as report
from ddp_kit.report.comparison import differences, first_differences
from ddp_kit.report.findings import findings, state
from ddp_kit.report.page import page
from ddp_kit.report.rows import Rows
from ddp_kit.report.run_history import RunHistory, read_runs
from ddp_kit.terminal import Terminal
from ddp_kit.trainer.profile import Recorder
from tests.support.launching import run
from tests.support.recorded_run import START, begin, end, evaluation, row, sample, write_record

GIB = 1 << 30
PHASES = ("data", "transfer", "forward", "backward", "communication", "optimizer", "other")
DONE = {
    "event": "done",
    "attempt": "job.0",
    "time": START + 100,
    "step": 1000,
    "seconds": 99.0,
    "loss": 0.1,
    "metrics": {},
}


def history(folder: Path, *attempts: Any, rows: Sequence[Any] = (), samples: Sequence[Any] = ()) -> RunHistory:
    (run,) = read_runs([write_record(folder / "run", attempts or [begin()], rows, samples)])
    return run


def texts(run: RunHistory) -> str:
    return "\n".join(finding.text for finding in findings(run))


def test_report_of_a_run_that_has_just_begun_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "run", [begin()])
    said: list[str] = []
    assert report(["run"], Terminal({}, said.append)) == 0
    assert said[0] == "run: no end recorded, 0 of 1,000 steps in 0 s"
    assert "it is still running, was killed, or was started without the launcher" in said[1]
    assert "No log point has been recorded yet." in (tmp_path / "report.html").read_text()


def test_report_finds_a_record_from_any_of_its_folders(tmp_path: Path) -> None:
    run = write_record(tmp_path / "logs" / "job_1", [begin()])
    for folder in (run, run / "record", tmp_path / "logs"):
        (found,) = read_runs([folder])
        assert found.name == "job_1"
    other = write_record(tmp_path / "old" / "job_1", [begin()])
    assert [each.name for each in read_runs([run, other, run])] == ["logs/job_1", "old/job_1"], "each once"


def damaged(write: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        run = write_record(folder / "run", [begin()], [row(1)])
        write(run / "record")
        return run

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nothing", "nothing is not a folder"),
        (lambda folder: folder, "has no record of a run"),
        (damaged(lambda it: (it / "attempts.jsonl").write_text("")), "is not the record of a run"),
        (damaged(lambda it: (it / "attempts.jsonl").write_bytes(b"\x80\x04\x00\n")), "is not the record of a run"),
        (damaged(lambda it: (it / "attempts.jsonl").write_text('{"event": "boot"}\n')), "is not the record of a run"),
        (
            damaged(lambda it: (it / "attempts.jsonl").write_text(json.dumps(begin(format=2)) + "\n")),
            "has format 2, but this version of ddpkit reads formats up to 1",
        ),
    ],
    ids=["no-folder", "no-record", "empty", "binary", "another-program", "newer"],
)
def test_report_of_something_other_than_a_record_is_refused(
    make: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        read_runs([make(tmp_path)])


def test_report_omits_an_unfinished_last_line_and_counts_broken_ones(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [begin()], [row(1), row(2)])
    path = run / "record" / "rows.jsonl"
    path.write_text(path.read_text() + 'not JSON\n{"event": "train"}\n[1]\n{"event": "train", "st')
    (found,) = read_runs([run])
    assert [*found.rows.steps] == [1, 2]
    assert "3 lines of the record cannot be read" in texts(found)


def test_report_names_failed_attempts_and_their_cost(tmp_path: Path) -> None:
    attempts = [
        begin(),
        end(exit_code=1, text="rank 1 failed first: exit code 1: ValueError: bad"),
        begin("job.1", step=500, time=START + 80),
        {**DONE, "attempt": "job.1"},
        end("job.1"),
    ]
    run = history(tmp_path, *attempts, rows=[row(400), row(500), row(900, attempt="job.1")])
    assert state(run) == "finished, 1,000 of 1,000 steps in 16 min 40 s"
    assert "Attempt 1 of 2: rank 1 failed first: exit code 1: ValueError: bad" in texts(run)
    assert "Failed attempts cost 30 s" in texts(run), "from step 500, at second 50, to the next begin, at second 80"


def test_report_does_not_count_time_between_two_commands(tmp_path: Path) -> None:
    attempts = [
        begin("a.0"), end("a.0", exit_code=75, step=100, time=START + 3),
        begin("b.0", step=100, time=START + 203), {**DONE, "attempt": "b.0", "step": 200, "time": START + 205},
        end("b.0", step=200, time=START + 206),
    ]  # fmt: skip
    rows = [row(99, attempt="a.0", time=START + 2), row(200, attempt="b.0", time=START + 205)]
    run = history(tmp_path, *attempts, rows=rows)
    assert state(run) == "finished, 200 of 1,000 steps in 6 s"
    assert "cost" not in texts(run), "the run stopped because it was asked to, and no step was repeated"


def test_report_of_a_job_requeued_under_its_id_has_two_attempts(tmp_path: Path) -> None:
    attempts = [
        begin("7.0"), end("7.0", exit_code=75, step=100, time=START + 3),
        begin("7.0", step=100, time=START + 203), end("7.0", step=200, time=START + 206),
    ]  # fmt: skip
    run = history(tmp_path, *attempts, rows=[row(200, attempt="7.0", time=START + 205)])
    assert [[each["exit_code"] for each in attempt.ends] for attempt in run.attempts] == [[75], [0]]
    assert state(run) == "finished, 200 of 1,000 steps in 6 s"


@pytest.mark.parametrize(
    ("ended", "resumed", "said"),
    [
        (500, 500, None), (510, 500, "Failed attempts cost 1 s, including repeated steps"),
        (None, 500, "Failed attempts cost 1 s, including repeated steps"),
    ],
)  # fmt: skip
def test_report_cost_of_a_failure_is_the_time_of_repeated_steps(
    ended: int | None, resumed: int, said: str | None, tmp_path: Path
) -> None:
    attempts = [
        begin("a.0"), end("a.0", exit_code=1, step=ended, time=START + 51, text="boom"),
        begin("b.0", step=resumed, time=START + 500),
    ]  # fmt: skip
    run = history(tmp_path, *attempts, rows=[row(500, attempt="a.0", time=START + 50)])
    assert [line for line in texts(run).splitlines() if "cost" in line] == ([said] if said else [])


def test_report_cost_of_a_failure_includes_the_restart(tmp_path: Path) -> None:
    failed = end("a.0", exit_code=1, step=500, time=START + 50, text="boom")
    run = history(tmp_path, begin("a.0"), failed, begin("a.1", step=500, time=START + 54))
    assert "Failed attempts cost 4 s" in texts(run).splitlines()


def test_report_of_many_failures_looks_at_each_row_a_few_times(tmp_path: Path) -> None:
    class CountedSteps(list[int]):
        def __getitem__(self, number: Any) -> Any:
            reads.append(number)
            return super().__getitem__(number)

    def rows_read(attempts: int) -> int:
        lines = []
        rows = []
        for number in range(attempts):
            lines += [begin(f"job.{number}", step=5 * number), end(f"job.{number}", exit_code=1)]
            rows += [row(5 * number + step, attempt=f"job.{number}") for step in range(1, 6)]
        run = history(tmp_path / str(attempts), *lines, rows=rows)
        run.rows.steps = CountedSteps(run.rows.steps)  # type: ignore[assignment]
        reads.clear()
        findings(run)
        return len(reads)

    reads: list[int] = []
    assert 80 <= rows_read(80) < 1.1 * 4 * rows_read(20)


def test_rows_have_the_recorded_values_in_columns() -> None:
    rows = Rows()
    rows.extend([row(1, loss=0.5, note="a", rank_seconds=[1, None]), row(2, loss=None)])
    rows.extend([row(3, loss=2, rank_seconds=[1.5, 2.5, 3.5]), row(4, attempt="job.1", own=7.0, loss=1.0)])
    assert [rows.values(name) for name in ("loss", "note", "own", "mfu")] == [
        [0.5, None, 2, 1.0],
        ["a", None, None, None],
        [None, None, None, 7.0],
        [None] * 4,
    ]
    assert [str(number) for number in rows.numbers("note")] == ["nan"] * 4
    assert [str(each[0]) for each in rows.items("rank_seconds")] == ["1.0", "nan", "nan"]
    assert {name: [*numbers] for name, numbers in rows.by_attempt.items()} == {"job.0": [0, 1, 2], "job.1": [3]}
    assert "own" in rows.names
    assert not {"rank_seconds", "step"} & {*rows.names}


def test_report_holds_a_row_in_less_than_600_bytes(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        rows = [row(step, ranks=8, samples_checksums=f"{step:080x}") for step in range(count)]
        run = write_record(tmp_path / str(count), [begin()], rows)
        tracemalloc.start()
        found = read_runs([run])
        page(found, {})
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return largest

    assert peak(3000) - peak(1000) < 2000 * 600


def test_report_of_a_stopped_run_has_its_last_step(tmp_path: Path) -> None:
    run = history(tmp_path, begin(), end(exit_code=75, step=295), rows=[row(280)])
    assert state(run).startswith("exit code 75, 295 of 1,000 steps")


@pytest.mark.parametrize(
    ("ago", "interval", "lives"),
    [(1.0, 0.1, True), (40.0, 0.1, False), (40.0, 20.0, True), (3600.0, 20.0, False)],
    ids=["now", "quiet", "rare", "over"],
)
def test_report_shows_a_run_that_still_writes_as_running(
    ago: float, interval: float, lives: bool, tmp_path: Path
) -> None:
    latest = time.time() - ago
    rows = [row(i, time=latest - (5 - i) * interval) for i in range(1, 6)]
    run = history(tmp_path, begin(time=rows[0]["time"]), rows=rows)
    assert state(run).startswith("running, 5 of 1,000 steps" if lives else "no end recorded, 5 of 1,000")
    assert ("it is still running, was killed" in texts(run)) != lives


def test_report_shows_a_run_as_running_while_samples_are_written(tmp_path: Path) -> None:
    samples = [{**sample(1), "time": time.time() - 2}]
    assert history(tmp_path, begin(time=time.time() - 300), samples=samples).is_live
    assert not history(tmp_path / "done", begin(time=time.time() - 300), DONE, samples=samples).is_live


def test_report_repeats_advice_with_its_step(tmp_path: Path) -> None:
    advice = {
        "event": "advice",
        "attempt": "job.0",
        "time": START,
        "step": 310,
        "text": "data 43%: raise data.num_workers (0)",
    }
    assert "data 43%: raise data.num_workers (0) (at step 310)" in texts(history(tmp_path, begin(), advice))


@pytest.mark.parametrize(
    ("rows", "samples", "facts", "said"),
    [
        ([row(1), row(2, loss=None)], [], {}, "not finite at 1 log point, first at step 2"),
        ([evaluation(i, loss=abs(i - 2) + 1.0) for i in (1, 2, 3)], [], {}, "lowest at step 2 (1) and has risen to 2"),
        ([row(i, compilations=1 + i // 5) for i in range(1, 21)], [], {}, "compiled 3 graphs after the first quarter"),
        ([row(i, samples_per_second=900 - 20 * i) for i in range(1, 31)], [], {}, "Throughput fell from 800 to 360"),
        ([row(1, rank_memory=[3 * GIB, 6 * GIB])], [], {"planned_memory": 4 * GIB}, "6.0 GiB of GPU memory; estimated"),
        ([], [sample(i, load=0.2) for i in range(5)], {}, "The GPUs of the machine were busy for 20% of the time"),
        ([], [{**sample(1), "memory": 499 << 30}], {}, "The host memory of the machine was 100% full"),
    ],
    ids=["nan", "overfit", "recompiles", "slower", "plan", "idle", "full"],
)  # fmt: skip
def test_report_finds_problems_of_the_whole_run(
    rows: list[Any], samples: list[Any], facts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in texts(history(tmp_path, begin(**facts), rows=rows, samples=samples))


def test_report_of_a_run_without_problems_has_no_findings(tmp_path: Path) -> None:
    rows = [row(10 * i, rank_memory=[4 * GIB] * 2, compilations=1) for i in range(1, 101)]
    rows += [evaluation(100 * i, loss=1 / i) for i in range(1, 11)]
    samples = [sample(i) for i in range(50)]
    assert texts(history(tmp_path, begin(planned_memory=4 * GIB), DONE, end(), rows=rows, samples=samples)) == ""


def test_report_has_a_chart_of_every_value(tmp_path: Path) -> None:
    rows = [row(i, rank_memory=[i * GIB, GIB], accuracy=0.5) for i in range(1, 4)] + [evaluation(3, loss=1.0, f1=0.7)]
    run = history(tmp_path, begin(planned_memory=GIB), rows=rows, samples=[sample(i) for i in range(3)])
    comparing = {chart.title: chart for chart in comparing_charts([run])}
    assert list(comparing) == [
        "Loss", "f1 (evaluation)", "accuracy", "Learning rate", "Samples per second", "Time per optimizer step",
        "Gradient norm",
    ]  # fmt: skip
    assert [curve.label for group in comparing["Loss"].groups for curve in group.curves] == ["loss", "evaluation"]
    own = {chart.name: chart for chart in charts_of_run([run], 0)}
    assert list(own) == [
        "phases", "ranks", "memory", "gpu-load-0", "gpu-memory-0", "gpu-power-0", "gpu-temperature-0", "host-0",
    ]  # fmt: skip
    memory = own["memory"].groups[0]
    assert {curve.label: curve.values for curve in memory.curves} == {
        "rank 0": [1.0, 2.0, 3.0], "rank 1": [1.0] * 3, "planned": [1.0] * 3,
    }  # fmt: skip
    assert own["gpu-load-0"].groups[0].x == [0.0, 0.016667, 0.033333]
    assert "rank 0: from 1 to 3 GiB, lowest 1, highest 3" in own["memory"].summary


def test_report_has_a_chart_of_the_mfu_where_it_is_known(tmp_path: Path) -> None:
    run = history(tmp_path, rows=[row(1), row(2, mfu=0.4), row(3, mfu=0.42)])
    (chart,) = (each for each in comparing_charts([run]) if each.title == "Model FLOPs utilisation")
    assert chart.unit == "%"
    assert chart.groups[0].curves[0].values == [None, 40.0, 42.0]


def test_report_has_no_chart_of_unmeasured_values_but_of_an_idle_gpu(tmp_path: Path) -> None:
    rows = [row(i, grad_norm=0.0, rank_seconds=[0.1]) for i in (1, 2)]
    run = history(tmp_path, rows=rows, samples=[sample(1, load=0.0), sample(2, load=0.0)])
    assert "Gradient norm" not in {chart.title for chart in comparing_charts([run])}
    own = {chart.name: chart for chart in charts_of_run([run], 0)}
    assert "ranks" not in own, "there is one"
    assert [curve.values for curve in own["gpu-load-0"].groups[0].curves] == [[0.0, 0.0]] * 2


def test_report_of_many_ranks_draws_their_range(tmp_path: Path) -> None:
    run = history(tmp_path, rows=[row(1, rank_seconds=[rank / 1000 for rank in range(1, 65)])])
    (curves,) = next(chart for chart in charts_of_run([run], 0) if chart.name == "ranks").groups
    assert {curve.label: curve.values for curve in curves.curves} == {
        "highest of 64": [64.0], "median": [32.5], "lowest of 64": [1.0],
    }  # fmt: skip


def test_report_of_very_many_ranks_draws_the_summaries_of_the_record(tmp_path: Path) -> None:
    rows = [row(1, rank_seconds_summary=[0.001, 0.002, 0.004], rank_memory_summary=[GIB, 2 * GIB, 3 * GIB])]
    for each in rows:
        each.pop("rank_seconds", None)
    run = history(tmp_path, rows=rows)
    found = {chart.name: chart.groups[0].curves for chart in charts_of_run([run], 0)}
    curves = {name: {curve.label: curve.values for curve in found[name]} for name in ("ranks", "memory")}
    assert curves["ranks"] == {"highest": [4.0], "median": [2.0], "lowest": [1.0]}
    assert curves["memory"] == {"highest": [3.0], "median": [2.0], "lowest": [1.0]}


def test_report_point_is_the_mean_of_its_steps_with_their_range(tmp_path: Path) -> None:
    run = history(tmp_path, rows=[row(i, loss=100.0 if i == 777 else 1.0) for i in range(1, 6001)])
    loss = comparing_charts([run])[0].groups[0]
    assert len(loss.x) == 600
    assert loss.x[-1] == 6000
    curve = loss.curves[0]
    assert curve.low is not None
    assert curve.high is not None
    point = next(i for i, step in enumerate(loss.x) if step >= 777)
    assert (curve.values[point], curve.low[point], curve.high[point]) == (10.9, 1.0, 100.0)


def test_report_shows_differing_settings(tmp_path: Path) -> None:
    first = write_record(
        tmp_path / "a", [begin(config={"epochs": 1}, environment={"MASTER_PORT": "1", "NCCL_DEBUG": "INFO"})]
    )
    second = write_record(tmp_path / "b", [begin(config={"epochs": 2}, environment={"MASTER_PORT": "2"})])
    assert differences(read_runs([first, second])) == [
        ("config.epochs", ("1", "2")), ("environment.NCCL_DEBUG", ("INFO", "")),
    ]  # fmt: skip


def test_report_compares_arguments_by_name_and_ignores_the_runs_folder(tmp_path: Path) -> None:
    def recorded(name: str, *arguments: str) -> Path:
        config = {"checkpoint": {"dir": f"runs/{name}"}}
        return write_record(tmp_path / name, [begin(command=["train.py", *arguments], config=config)])

    first = recorded("0.1", "--lr", "0.1", "--out=/data/0.1", "one")
    second = recorded("0.2", "--fast", "--out=/data/0.2", "--lr=0.2")
    assert differences(read_runs([first, second])) == [
        ("--lr", ("0.1", "0.2")), ("argument 4", ("one", "")), ("--fast", ("", "yes")),
    ]  # fmt: skip


def test_report_shows_a_problem_of_all_runs_once(tmp_path: Path) -> None:
    advice = [{**ADVICE, "text": f"data {share}%: raise data.num_workers"} for share in (31, 32, 33)]
    runs = [write_record(tmp_path / name, [begin(), line]) for name, line in zip("abc", advice, strict=True)]
    write_record(tmp_path / "d", [begin(), advice[0], end(exit_code=1, text="boom")])
    shown = page(read_runs([*runs, tmp_path / "d"]), {})
    findings_table = shown.partition("<h2>Findings</h2>")[2].partition("</section>")[0]
    assert findings_table.count("raise data.num_workers") == 1
    assert [name in findings_table for name in ("row>a<", "row>d<", "boom")] == [False, True, True]
    order = [shown.index(each) for each in ("<h2>Training", "<h2>Findings", "<h2>What differs", "<h2>a</h2>")]
    assert order == sorted(order), "the curves are first"


def test_report_of_ten_thousand_rows_of_eight_ranks_is_small(tmp_path: Path) -> None:
    noise = random.Random(0)
    names = ("loss", "grad_norm", "samples_per_second", "step_seconds", *(f"times.{name}" for name in PHASES))

    def bytes_of_gpu() -> int:
        return noise.randrange(80 * GIB)

    def noisy(step: int) -> dict[str, Any]:
        each_rank = {
            "rank_seconds": [noise.random() for _ in range(8)],
            "rank_memory": [bytes_of_gpu() for _ in range(8)],
        }
        return row(step, **each_rank, **{name: noise.random() for name in names})

    def gpu() -> dict[str, float]:
        return {"load": noise.random(), "memory": bytes_of_gpu(), "power": 700 * noise.random(), "temperature": 60}

    rows = [noisy(step) for step in range(1, 10_001)]
    samples = [{**sample(second), "gpus": [gpu() for _ in range(8)]} for second in range(1000)]
    run = write_record(tmp_path / "run", [begin(ranks=8)], rows, samples)
    assert report([str(run), "--out", str(tmp_path / "page.html")], Terminal({})) == 0
    assert (tmp_path / "page.html").stat().st_size <= 300_000


def test_report_escapes_text_of_a_run(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    attempts = [begin(command=[attack], model=attack), end(exit_code=1, text=attack, stacks={"0": attack})]
    write_record(tmp_path / attack.replace("/", "_"), attempts, [row(1, **{attack: 1.0})])
    assert report([str(tmp_path / attack.replace("/", "_")), "--out", str(tmp_path / "page.html")], Terminal({})) == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in page
    assert "<img" not in page


def test_report_command_writes_a_page_and_keeps_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "run", [begin(), DONE, end()], [row(i) for i in range(1, 1001)])
    assert main(["report", "run"]) == 0
    assert main(["report", "run"]) == 0, "a report may be made anew"
    page = (tmp_path / "report.html").read_text()
    assert f'content="ddpkit report {__version__}"' in page
    assert not re.search(r"(?:src|href)=", page), "it loads nothing"
    (tmp_path / "report.html").write_text("mine")
    assert main(["report", "run"]) == 2
    assert main(["report", "run", "--out", "."]) == 2
    assert main(["report", "run", "--out", "no/folder/r.html"]) == 2
    assert main(["report"]) == 2
    said = capsys.readouterr().err
    assert "--out report.html exists and is not a ddpkit report\n  hint: give the name of a new file" in said
    assert "--out . is a folder" in said
    assert "no/folder/r.html cannot be written: No such file or directory" in said
    assert (tmp_path / "report.html").read_text() == "mine"


def test_report_of_one_run_under_two_names_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_record(tmp_path / "run", [begin(), DONE, end()], [row(1)])
    Path("link").symlink_to(run)
    for other in ("run", "link", "run/record", str(run)):
        assert main(["report", "run", other]) == 0
        assert f"{other} is the same run as run: it is shown once\n" in capsys.readouterr().out
    write_record(tmp_path / "second", [begin(), DONE, end()], [row(1)])
    assert main(["report", "run", "second"]) == 0
    assert "the same run" not in capsys.readouterr().out


@pytest.mark.slow
def test_report_with_images_writes_all_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install matplotlib")
    rows = [row(i, rank_memory=[GIB, GIB]) for i in range(1, 9)]
    runs = [str(write_record(tmp_path / name, [begin()], rows, [sample(i) for i in range(3)])) for name in "ab"]
    words = [*runs, "--out", str(tmp_path / "r.html"), "--images", str(tmp_path / "plots")]
    assert report(words, Terminal({})) == 0
    written = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert "loss.svg" in written
    assert "phases-2.svg" in written
    assert all(path.read_text().startswith("<?xml") for path in (tmp_path / "plots").iterdir())


def test_report_reads_the_traces_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    recorder = Recorder(ProfileConfig(steps=(2, 3), dir=folder), rank=0)
    with recorder:
        for step in (1, 2, 3):
            recorder.before_step(step)
            torch.ones(64, 64) @ torch.ones(64, 64)
            recorder.after_step(step)
    (folder / "rank1_steps2-3.json.gz").write_bytes(b"torn")
    write_record(
        tmp_path / "run", [begin(folder=str(tmp_path), config={"profile": {"steps": [2, 3], "dir": "traces"}})]
    )
    said: list[str] = []
    assert report([str(tmp_path / "run"), "--out", str(tmp_path / "page.html")], Terminal({}, said.append)) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Profile of rank 0, steps 2 to 3 (rank0_steps2-3.json.gz)" in page
    assert "aten::mm" in page
    assert "  Profile of rank 0, steps 2 to 3 (rank0_steps2-3.json.gz):" in said
    assert "  Profile rank1_steps2-3.json.gz:" in said, said


def test_report_imports_no_torch() -> None:
    code = "import sys, ddp_kit.report.command; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert run(sys.executable, "-c", code).returncode == 0


# --- damaged records --------------------------------------------------------------------------------------------------

ABSENT = object()
WRONG = [ABSENT, None, 10**400, "a\0\x1b[31m\ud800/.."]
MORE_WRONG = [
    True, -1, 1e999, float("nan"), "", [], [None], ["x"], [[]], {}, {"x": None}, {"load": {}, "steps": [1], "dir": 7},
]  # fmt: skip
ADVICE = {"event": "advice", "attempt": "job.0", "time": START, "step": 310, "text": "data 43%"}
RECORDED: dict[str, list[dict[str, Any]]] = {
    "attempts": [
        begin(config={"profile": {"steps": [2, 3], "dir": "traces"}}, planned_memory=GIB, environment={"A": "1"}),
        ADVICE,
        end(exit_code=1, text="rank 1 failed", stacks={"1": "Thread 0"}, step=500),
        {"event": "stop", "attempt": "job.0", "time": START + 900, "step": 500},
        begin("job.1", step=400, time=START + 2000),
        {**DONE, "attempt": "job.1"},
        end("job.1", step=900),
    ],
    "rows": [
        row(i, rank_memory=[GIB, GIB], compilations=i, accuracy=0.5, weights_checksum="0a", samples_checksums="0" * 8)
        for i in range(1, 20)
    ]
    + [evaluation(i, loss=i, f1=0.5) for i in (1, 2, 3)],
    "samples": [sample(i) for i in range(3)],
}  # fmt: skip


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each field of a JSON value, with all fields inside it."""
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield (*path, name)
        yield from fields(inner, (*path, name))


def replaced(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """A copy of a JSON value in which one field is wrong, or absent."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) > 1:
        copy[path[0]] = replaced(copy[path[0]], path[1:], wrong)
    elif wrong is ABSENT:
        del copy[path[0]]
    else:
        copy[path[0]] = wrong
    return copy


def is_readable_or_refused(run: Path) -> bool:
    """Whether the run has a report, or is refused with words. Anything else is an exception of another class."""
    try:
        (history,) = read_runs([run])
    except UsageError as refused:
        assert str(refused).isprintable() or "\n" in str(refused)
        return False
    page((history,), {}).encode(errors="backslashreplace")
    first_differences(history, history)
    state(history)
    return True


@pytest.mark.parametrize("file", RECORDED)
@pytest.mark.parametrize(
    "wrong",
    [*WRONG, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_WRONG)],
    ids=lambda wrong: "absent" if wrong is ABSENT else repr(wrong)[:16],
)
def test_report_of_a_record_with_any_damaged_field_is_readable_or_refused(
    file: str, wrong: Any, tmp_path: Path
) -> None:
    run = write_record(tmp_path / "run", RECORDED["attempts"], RECORDED["rows"], RECORDED["samples"])
    path = next((run / "record").glob(f"{file}*"))
    seen = set()
    for number, line in enumerate(RECORDED[file]):
        for field in fields(line):
            if (line.get("event"), field) in seen:
                continue  # the same field of another line
            seen.add((line.get("event"), field))
            lines = [*RECORDED[file][:number], replaced(line, field, wrong), *RECORDED[file][number + 1 :]]
            path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
            try:
                is_readable_or_refused(run)
            except Exception as error:
                error.add_note(f"with {field} = {wrong!r}")
                raise


@given(data=st.data())
@settings(max_examples=25)
def test_report_of_a_record_with_damaged_bytes_is_readable_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = write_record(Path(folder) / "run", RECORDED["attempts"], RECORDED["rows"], RECORDED["samples"])
        for path in (run / "record").iterdir():
            content = path.read_bytes()
            begins = data.draw(st.integers(0, len(content)))
            ends = data.draw(st.integers(begins, len(content)))
            path.write_bytes(content[:begins] + data.draw(st.binary(max_size=9)) + content[ends:])
        is_readable_or_refused(run)


def test_report_counts_a_deeply_nested_line_as_unreadable(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [begin()], [row(1)])
    with (run / "record" / "rows.jsonl").open("a") as rows:
        rows.write('{"event": ' + "[" * 100_000 + "\n" + json.dumps(row(2)) + "\n")
    (found,) = read_runs([run])
    assert (len(found.rows), found.unreadable) == (2, 1)


def test_report_escapes_control_sequences_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attack = "\x1b]0;owned\x07\ud800"
    write_record(tmp_path / "\x1b[31mrun", [begin(), {**ADVICE, "text": attack}])
    out = str(tmp_path / "report.html")
    assert main(["report", str(tmp_path / "\x1b[31mrun"), "--out", out]) == 0
    assert main(["report", str(tmp_path / "\x1b[31mno"), "--out", out]) == 2
    said = capsys.readouterr()
    assert r"\x1b]0;owned\x07\ud800" in said.out
    assert "\x1b" not in said.out + said.err
