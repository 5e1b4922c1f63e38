"""How fast a page of trajectories is drawn: `python -m benchmarks.viewer outputs/view/ppo.html`.

Opens the file in headless Chromium, on a laptop's and on a phone's screen, several times. Prints the page's size, the
seconds from its opening until list and first conversation are drawn, and the seconds that it takes to draw the
conversations of all its trajectories one after the other; the median and the largest.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

SCREENS: dict[str, dict[str, Any]] = {
    "laptop": {"viewport": {"width": 1440, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
ALL_IN_TURN = """() => {
  const rows = [...document.querySelectorAll("#list .row")];
  const started = performance.now();
  for (const row of rows) {
    row.click();
    document.getElementById("columns").getBoundingClientRect();
  }
  return [rows.length, (performance.now() - started) / 1000];
}"""


def main(file: Path, repeats: int) -> None:
    """Prints a line per figure."""
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for screen, options in SCREENS.items():
            measured = [measure(browser, file, options) for _ in range(repeats)]
            count = measured[0][0]
            print(f"{screen}: first drawn after {told([first for _, first, _ in measured])}")
            print(f"{screen}: all {count} one after the other in {told([all_ for _, _, all_ in measured])}")
        browser.close()


def measure(browser: Browser, file: Path, options: dict[str, Any]) -> tuple[int, float, float]:
    """Trajectories, seconds until the first is drawn, seconds for all."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(file.absolute().as_uri(), wait_until="commit")
    page.wait_for_selector("html[data-ready=true]")
    first_s = page.evaluate("performance.now() / 1000")
    count, all_s = page.evaluate(ALL_IN_TURN)
    context.close()
    return count, first_s, all_s


def told(seconds: list[float]) -> str:
    """Median and largest."""
    return f"{statistics.median(seconds):.2f} s (at most {max(seconds):.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Times a page of trajectories in headless Chromium.")
    parser.add_argument("file", type=Path, help="that `agent-r1 view` has made")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.file, arguments.repeats)
