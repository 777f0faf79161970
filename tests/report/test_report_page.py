"""The page of `ddpkit report` in a real browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.report.command import run as report
from ddp_kit.terminal import Terminal
from tests.support.recorded_run import START, begin, end, evaluation, row, sample, write_record

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two runs: one restarted, one is still training."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [row(i, rank_memory=[i << 30, 1 << 30], loss=float(i)) for i in range(1, 1001)]
    rows += [evaluation(100 * i, loss=1 / i) for i in range(1, 11)]
    failed = end(exit_code=1, text="rank 1 failed first: exit code 1", stacks={"1": "Thread 0 (idle)"})
    attempts = [begin(), failed, begin("job.1", step=500, time=START + 60), end("job.1")]
    runs = [write_record(folder / "first", attempts, rows, [sample(i) for i in range(20)])]
    runs += [write_record(folder / "second", [begin(config={"epochs": 2})], rows[:500])]
    assert report([*map(str, runs), "--out", str(folder / "report.html")], Terminal({})) == 0
    return folder / "report.html"


@pytest.fixture
def page(browser: Any, path: Path) -> Iterator[Any]:
    """The page; it may neither write to the console nor ask for anything but itself."""
    troubles: list[str] = []
    opened = browser.new_page(viewport={"width": 1400, "height": 900})
    opened.on("console", lambda message: troubles.append(message.text))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda request: troubles.append(request.url) if request.url != path.as_uri() else None)
    opened.goto(path.as_uri())
    opened.wait_for_selector("#loss .u-legend")
    yield opened
    opened.close()
    assert troubles == []


def legend(page: Any, chart: str) -> dict[str, str]:
    """What the legend of a chart shows: the value next to each label."""
    names = page.locator(f"#{chart} .u-legend .u-series:visible .u-label").all_inner_texts()
    values = page.locator(f"#{chart} .u-legend .u-series:visible .u-value").all_inner_texts()
    return dict(zip(names, values, strict=True))


def test_report_page_shows_values_under_the_pointer_or_the_last_ones(page: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    step_shown = page.locator("#loss .u-value").first
    expect(step_shown).to_have_text("1,000")
    assert legend(page, "loss")["second: loss"] == "499.5", "the mean of the last two steps"
    plot = page.locator("#loss .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    expect(step_shown).not_to_have_text("1,000")
    shown = legend(page, "loss")
    step = float(shown["step"].replace(",", ""))
    assert 240 < step < 262
    assert float(shown["first: loss"]) == pytest.approx(step, abs=3)
    assert float(shown["second: loss"]) == pytest.approx(step, abs=3)
    assert legend(page, "memory-0").keys() == {"step", "rank 0", "rank 1"}
    assert legend(page, "memory-0")["rank 1"] == "1 GiB"


def test_report_page_can_hide_a_run(page: Any) -> None:
    assert "first: loss" in legend(page, "loss")
    page.get_by_label("first").uncheck()
    assert set(legend(page, "loss")) == {"step", "second: loss"}
    assert not page.locator("#run-0").is_visible()
    page.get_by_label("first").check()
    assert "first: loss" in legend(page, "loss")
    page.get_by_label("logarithmic").check()
    page.locator("summary", has_text="Stacks of 1 ranks").click()
    assert page.get_by_text("Thread 0 (idle)").is_visible()


def rows_of(page: Any, table: str) -> list[str]:
    """The names of the runs in the visible rows of a table."""
    return [text.split()[0] for text in page.locator(f"[aria-label={table}] tbody tr:visible").all_inner_texts()]


def test_report_page_sorts_and_filters_runs(page: Any) -> None:
    sort = page.locator("[aria-label=Runs]").get_by_role("button", name="loss", exact=True)
    sort.click()
    assert rows_of(page, "Runs") == ["second", "first"]
    sort.click()
    assert rows_of(page, "Runs") == ["first", "second"]
    page.get_by_label("filter runs").fill("EXIT failed")
    assert rows_of(page, "Runs") == ["first"], "in its row of findings"
    page.get_by_label("filter runs").fill("exit nothing")
    assert rows_of(page, "Runs") == []
    page.get_by_label("filter runs").fill("finished")
    assert rows_of(page, "Runs") == rows_of(page, "Differences") == ["first"]
    assert "second: loss" not in legend(page, "loss")
    assert not page.locator("#run-1").is_visible()
    page.get_by_label("filter runs").fill("")
    assert rows_of(page, "Differences") == ["first", "second"]
    assert "second: loss" in legend(page, "loss")


def test_report_page_changes_the_x_axis_and_smooths_curves(page: Any) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    shown = page.locator("#loss .u-value").first
    page.get_by_label("x axis").select_option("samples")
    expect(shown).to_have_text("64,000")
    page.get_by_label("x axis").select_option("running time")
    expect(shown).to_have_text("1.667")
    assert legend(page, "loss")["first: loss"] == "998.5"
    page.get_by_label("smoothing").fill("0.9")
    expect(shown).to_have_text("1.667")
    smoothed = legend(page, "loss")
    assert 900 < float(smoothed["first: loss"]) < 999, "it lags"
    assert smoothed["first: evaluation"] == "0.1", "there are too few evaluations to smooth"


@pytest.mark.parametrize("width", [320, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_page_fits_every_width_and_is_accessible(page: Any, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs pip install axe-playwright-python")
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # it is drawn
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    found = axe.Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
