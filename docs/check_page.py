"""Looks at the page of `ckpt diff --html` in a real browser, and makes docs/diff.png.

    python docs/check_page.py FIRST SECOND

It compares two checkpoints of a run, opens the page in headless Chromium, in light and in
dark, wide and narrow, and uses it as a reader would: points, chooses, sorts, filters, walks by
keyboard. Any message of the browser and any request is an error. Not part of
`make check`, since a browser does not come from pip: it needs `playwright` and a Chromium,
its own or the one that CHROMIUM names.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).with_name("diff.png")
SCHEMES = ("light", "dark")


def main(first: str, second: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "diff.html"
        subprocess.run(
            [sys.executable, "-m", "ckpt_cli", "diff", first, second, "--html", page, "--top", "1"], check=False
        )
        browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        for scheme in SCHEMES:
            for width in (1180, 390):
                tab, wrong = opened(browser, page, scheme, width)
                check(tab)
                assert not wrong, wrong
        tab, _ = opened(browser, page, "light", 1180)
        tab.locator(".cell").nth(21).hover()
        tab.screenshot(path=PICTURE)
        browser.close()


def opened(browser: Any, page: Path, scheme: str, width: int) -> tuple[Any, list[str]]:
    """The page in a fresh tab, and a list of what goes wrong in it."""
    wrong: list[str] = []
    tab = browser.new_page(viewport={"width": width, "height": 1560}, color_scheme=scheme)
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: request.url == page.as_uri() or wrong.append(request.url))
    tab.goto(page.as_uri())
    return tab, wrong


def check(tab: Any) -> None:
    def focused() -> str:
        return str(tab.evaluate("document.activeElement.getAttribute('aria-label')"))

    def count() -> str:
        return str(tab.locator("#count").inner_text())

    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
    every = count()
    cell = tab.locator(".cell").first
    cell.hover()
    assert tab.locator("#tip").is_visible()
    cell.focus()
    before = focused()
    tab.keyboard.press("ArrowDown")
    assert focused() != before
    tab.keyboard.press("Enter")
    assert count() != every
    tab.locator("#unselect").click()
    assert count() == every
    for state in tab.locator("#states button").all():
        state.click()
    for grouping in ("layers", "states", "roles"):
        tab.select_option("#grouping", grouping)
        assert tab.locator("#histograms svg").count() == 1
    for measure in ("rms", "max", "share", "relative"):
        tab.select_option("#measure", measure)
    tab.locator('[data-sort="name"]').click()
    assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    tab.fill("#filter", "no such tensor")
    assert count().startswith("0 of ")
    tab.fill("#filter", "")
    tab.locator("#states button").first.click()
    tab.evaluate("scrollTo(0, 0)")


if __name__ == "__main__":
    main(*sys.argv[1:])
