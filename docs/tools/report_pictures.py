"""Write docs/images/report-*.png: the report of a real run, in which one of two workers is killed, in a browser.

python docs/tools/report_pictures.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from recording import DOCS, killed_and_restarted

SETTINGS = {
    "wide": {"viewport": {"width": 1400, "height": 1300}},
    "narrow": {"viewport": {"width": 400, "height": 1300}},
    "dark": {"viewport": {"width": 1400, "height": 1300}, "color_scheme": "dark"},
}


def take(browser: Browser, page: Path, images: Path) -> None:
    """The pictures: what a screen shows without scrolling, and the first printed page."""
    for name, settings in SETTINGS.items():
        opened = browser.new_page(**settings)
        opened.goto(page.as_uri())
        opened.wait_for_selector("#loss .u-legend")
        opened.screenshot(path=images / f"report-{name}.png")
    opened = browser.new_page(viewport={"width": 800, "height": 1130})
    opened.emulate_media(media="print")
    opened.goto(page.as_uri())
    opened.wait_for_selector("#loss .u-legend")
    opened.screenshot(path=images / "report-print.png")


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "there is no Chromium on this machine"
    with tempfile.TemporaryDirectory() as folder:
        killed_and_restarted(Path(folder))
        ddpkit = Path(sys.executable).with_name("ddpkit")
        print(subprocess.run([ddpkit, "report", "run"], cwd=folder, check=True, capture_output=True, text=True).stdout)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            take(browser, Path(folder, "report.html"), DOCS / "images")
            browser.close()


if __name__ == "__main__":
    main()
