"""A headless Chromium and axe-core, with which tests and pictures look at pages.

    python tests/support/browsing.py

installs both: Chromium with apt-get, if no browser is here and the user is root; axe-core with npm, into this
environment. What cannot be installed is said; `missing` says it again to the tests.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = "4.14.1"
AXE = Path(sys.prefix) / f"axe-core-{VERSION}" / "axe.min.js"
SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
"""Of `axe.min.js`. It is under the MPL-2.0, and used for tests only."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")


def find_chromium() -> str | None:
    """The path of a Chromium: the one that CHROMIUM names, else the first on the path."""
    given = os.environ.get("CHROMIUM")
    return given or next((path for name in BROWSERS if (path := shutil.which(name))), None)


def missing() -> str | None:
    """What is missing to look at pages, and how to get it; None if nothing is."""
    absent = [name for name, here in (("Chromium", find_chromium()), ("axe-core", AXE.exists())) if not here]
    return f"NOT TESTED: {' and '.join(absent)} missing; `make browser` installs them" if absent else None


def install() -> None:
    """Install what is missing. Prints what could not be installed, and why."""
    if find_chromium() is None:
        if os.geteuid() or shutil.which("apt-get") is None:
            print("Chromium: install it, or name one with CHROMIUM; only root can with apt-get", file=sys.stderr)
        else:
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
                subprocess.run(["apt-get", "-qq", *command], check=False, stdout=subprocess.DEVNULL, env=environment)
    if not AXE.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = ["npm", "pack", "--silent", "--pack-destination", folder, f"axe-core@{VERSION}"]
            try:
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"axe-core: npm could not fetch it: {error}", file=sys.stderr)
                return
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                member = archive.extractfile("package/axe.min.js")
                assert member is not None
                content = member.read()
        assert hashlib.sha256(content).hexdigest() == SHA256, "axe-core: another file than expected"
        AXE.parent.mkdir(exist_ok=True)
        AXE.write_bytes(content)


@dataclass
class Tab:
    """A page in a tab of its own, and all that went wrong in it: messages, errors, dialogs, requests."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """What axe-core finds: the rule, and the elements."""
        self.page.evaluate(AXE.read_text("utf-8"))
        result = self.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
        assert len(result["passes"]) > 15, "axe did not look at the page"
        return [
            f"{one['id']} ({one['impact']}): {[node['html'][:200] for node in one['nodes'][:3]]}"
            for one in result["violations"]
        ]

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def focused(self) -> str:
        """The text of the element that has the focus, or its label."""
        return str(
            self.page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = [
            "--no-sandbox",
            "--force-device-scale-factor=1",
            "--font-render-hinting=none",
            "--disable-lcd-text",
            "--renderer-process-limit=1",
        ]
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=options)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, path: Path, width: int = 1280, scheme: str = "light", height: int = 900) -> Iterator[Tab]:
    """A page in a fresh tab. Its only request may be that for itself."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    tab = Tab(page)
    page.on("console", lambda message: tab.wrong.append(message.text))
    page.on("pageerror", lambda error: tab.wrong.append(str(error)))
    page.on("dialog", lambda dialog: (tab.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: request.url == path.as_uri() or tab.wrong.append(request.url))
    try:
        page.goto(path.as_uri())
        yield tab
    finally:
        page.close()


if __name__ == "__main__":
    install()
    print(missing() or f"{find_chromium()}, {AXE}")
