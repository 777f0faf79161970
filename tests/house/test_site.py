"""The documentation site: it builds without a warning, and can be searched and read if it is opened from a folder."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HIDDEN = """() => [...document.querySelectorAll('pre > code')]
    .filter(code => code.scrollWidth > code.clientWidth).map(code => code.innerText)"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    build = run(*command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    api = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def test_documentation_site_builds_without_a_warning(site: Path) -> None:
    """Every link, anchor and page of the navigation is there."""
    assert (site / "index.html").exists()


def test_documentation_site_loads_nothing_from_other_hosts_and_its_search_works_from_files(
    site: Path, browser: Any
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    for name in ("index.html", "reference/api.html"):
        page, asked = browser.new_page(), list[str]()
        page.on("request", lambda request: asked.append(request.url))  # noqa: B023
        page.goto((site / name).as_uri())
        page.fill("input.md-search__input", "set_epoch")
        expect(page.locator(".md-search-result__item").first).to_be_visible()
        page.locator(".md-search-result__item a").first.click()
        expect(page.locator("article")).to_contain_text("set_epoch")
        assert all(url.startswith(site.as_uri()) for url in asked), asked


@pytest.mark.parametrize("width", [1300, 1000, 390])
def test_documentation_site_hides_no_part_of_a_line_of_code(site: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        page.goto(path.as_uri(), wait_until="domcontentloaded")
        assert page.evaluate(HIDDEN) == [], path.name
