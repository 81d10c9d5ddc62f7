"""The site is made without a warning, has all pages and all names of the library, and loads nothing from outside."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from public_names import PUBLIC

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"""<(?:script|img|iframe|source)[^>]*\bsrc=["']?https?:|<link[^>]*\bhref=["']?https?:""")


@pytest.fixture(scope="module")
def site() -> Path:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("make installs zensical")
    command = [sys.executable, ROOT / "docs" / "make_site.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return ROOT / "site"


@pytest.mark.slow  # 4 seconds of a processor: docstrings of the library, and pages of half a megabyte
def test_the_site_is_made_and_is_complete(site: Path) -> None:
    pages = {path.name: path.read_text("utf-8") for path in site.glob("*.html")}
    expected = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert expected | {"changelog.html", "contributing.html", "security.html"} <= set(pages)
    for name in PUBLIC:
        assert re.search(rf'id="ckpt[\w.]*\.{name.rpartition(".")[2]}"', pages["api.html"]), name
    for name, text in pages.items():
        assert not LOADED.findall(text), name
    linked = set(re.findall(r'href="\./([\w-]+\.html)"', pages["api.html"])) | {"api.html"}
    assert expected <= linked, "not in the navigation"
    for name in expected:
        for picture in re.findall(r'<img[^>]* src="?([^" >]+)', pages[name]):
            assert (site / picture).is_file(), picture


def test_pictures_load_nothing() -> None:
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        assert not re.search(r"url\(['\"]?http|href=|@import", picture.read_text("utf-8")), picture.name
