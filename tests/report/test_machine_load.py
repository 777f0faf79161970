"""The load of machines in a report: the same points from many samples as from few, for one node or for hundreds."""

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.report import run_history
from ddp_kit.report.charts import charts_of_run
from ddp_kit.report.findings import findings
from ddp_kit.report.machine_load import machine_load
from ddp_kit.report.run_history import read_runs
from tests.support.recorded_run import START, begin, end, row, sample, write_record


def write_samples(run: Path, node: int, samples: list[dict[str, Any]]) -> None:
    path = run / "record" / f"samples-{node}.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in samples))


def test_load_of_a_part_is_the_mean_of_its_seconds_and_the_peak_of_the_memory() -> None:
    idle = {**sample(0, load=0.0), "memory": 100 << 30}
    busy = {**sample(4, load=1.0), "seconds": 3, "memory_peak": 400 << 30}
    load = machine_load({"0": iter([idle, busy, *(sample(8192 * number) for number in range(1, 2000))])})
    assert load.nodes["0"].gpus["load"][0][0] == 0.75
    assert load.nodes["0"].fullest == 0.8
    assert len(load.times) == 1001
    assert load.times[:2] == (START + 4, START + 16384)


def test_load_takes_memory_for_its_points_not_for_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_kit.report.machine_load._MOST_PARTS", 100)
    monkeypatch.setattr("ddp_kit.report.machine_load._LEAST_PARTS", 100)

    def peak(seconds: int) -> int:
        tracemalloc.start()
        load = machine_load({"0": (sample(second) for second in range(seconds))})
        assert 50 <= len(load.times) <= 101
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(8000) < 2 * peak(1000)


def test_load_of_nodes_has_the_same_points_for_all_nodes() -> None:
    load = machine_load({"0": [sample(0), sample(1)], "1": (sample(second) for second in range(3000)), "2": []})
    (few, _), (many, _) = (load.nodes[node].gpus["load"] for node in ("0", "1"))
    assert len(few) == len(many) == len(load.times)
    assert [value == value for value in few[:2]] == [True, False], "the node has no later samples"
    assert "2" not in load.nodes


def test_report_of_many_nodes_draws_their_range_and_names_one_that_is_idle(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run", [begin(nodes=20, ranks=40), end()], [row(1)])
    for node in range(20):
        load = 0.9 if node < 2 else 0.01 * node
        write_samples(run, node, [{**sample(second, load=load), "cpu": node / 100} for second in range(3)])
    (history,) = read_runs([run])
    charts = {chart.name: chart for chart in charts_of_run([history], 0)}
    assert [name for name in charts if name.startswith(("gpu", "host"))] == [
        "gpu-load-all", "gpu-memory-all", "gpu-power-all", "gpu-temperature-all", "host-all",
    ]  # fmt: skip
    assert charts["gpu-load-all"].title == "Load of the GPUs on 20 nodes"
    curves = {curve.label: curve.values for curve in charts["gpu-load-all"].groups[0].curves}
    assert curves == {"highest of 40": [90.0] * 3, "median": [11.5] * 3, "lowest of 40": [2.0] * 3}
    host = {curve.label: curve.values for curve in charts["host-all"].groups[0].curves}
    assert host["processors: highest of 20"] == [19.0] * 3
    idle = [finding.text for finding in findings(history) if "were busy" in finding.text]
    assert len(idle) == 1
    assert idle[0].startswith("The GPUs of node 2, and of 17 other nodes that are alike, were busy for 2% of the time")


@pytest.mark.parametrize("most", [10, 100, 100_000])
def test_report_reads_a_part_of_a_long_file_of_an_earlier_version(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_record(tmp_path / "run", [begin(), end()], samples=[sample(second) for second in range(1000)])
    decoded: list[dict[str, Any]] = []
    real = run_history.machine_load
    monkeypatch.setattr(run_history, "_SAMPLE_LINES", most)
    monkeypatch.setattr(
        run_history,
        "machine_load",
        lambda samples: real({node: decoded.extend(lines := [*each]) or lines for node, each in samples.items()}),
    )
    read_runs([run])
    assert 0.9 * min(most, 1000) <= len(decoded) <= min(most + 1, 1000)
    assert decoded[0]["time"] == START
    assert decoded[-1]["time"] >= START + 890


def test_report_shows_an_old_run_as_running_between_its_rare_samples(tmp_path: Path) -> None:
    now = time.time()
    coarse = {**sample(0), "time": now - 1500, "seconds": 1024}
    run = write_record(tmp_path / "run", [begin(time=now - 9e6)], samples=[coarse])
    (history,) = read_runs([run])
    assert history.is_live
    write_samples(run, 0, [{**coarse, "time": now - 2100}])
    (history,) = read_runs([run])
    assert not history.is_live
