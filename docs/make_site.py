"""Makes the site, in site/, from docs/ and the pages at the top of the repository: `python docs/make_site.py`.

Nothing is written twice. Pages link as they do in the repository; here links between folders become links of the site,
and links to code become plain text. A comment in a page is filled in:

    <!-- api: Chains | Chain DeltaPolicy -->     names of the library, from their docstrings

Zensical makes the site of it, and stops at a link or a name that does not exist. mkdocs.yml says how; mkdocs with
mkdocs-material, whose successor it is, reads the same file.
"""

import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SOURCES = ROOT / ".site" / "docs"
"""As in mkdocs.yml."""
TOP = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
"""Pages at the top of the repository, and their names in the site."""
README = "index.md"
"""The page of the site that has the README's place."""
_CODE_BLOCK = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]\[]*(?:\[[^\]]*\])?[^\]\[]*)\]\(([^)\s]+)\)")
_ITEM = re.compile(r"^( {2,})(?=(?:[-*+]|\d+\.) )", re.MULTILINE)


def assemble(target: Path) -> None:
    """Write the sources of the site into a folder, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(DOCS.rglob("*")):
        relative = path.relative_to(DOCS)
        if path.suffix in (".png", ".svg", ".css"):
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / relative)
        elif path.suffix == ".md":
            (target / relative).write_text(page(path), "utf-8")
    rooms = runpy.run_path(str(DOCS / "make_architecture.py"))["page"]()
    (target / "modules.md").write_text(rooms, "utf-8")
    for name, new in TOP.items():
        (target / new).write_text(page(ROOT / name), "utf-8")


def page(path: Path) -> str:
    """A page as it is in the site."""
    text = path.read_text("utf-8")
    text = re.sub(r"^<!-- api: (.+) \| (.+) -->$", lambda found: _api(*found.groups()), text, flags=re.M)
    text = _outside_code(text, lambda prose: _LINK.sub(lambda found: _link(path, found), prose))
    # Python's Markdown wants four spaces for each level of a list, where GitHub takes two.
    return _outside_code(text, lambda prose: _ITEM.sub(lambda found: found[1] * 2, prose))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Change what lies between blocks of code."""
    parts, end = [], 0
    for block in _CODE_BLOCK.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def _api(title: str, names: str) -> str:
    return "\n\n".join([f"## {title}", *(f"::: ckpt.{name}" for name in names.split())])


def _link(path: Path, found: "re.Match[str]") -> str:
    """A link of a page of the repository as the site has it."""
    mark, text, link = found.groups()
    if "://" in link or link.startswith("#"):
        return found[0]
    name, sharp, anchor = link.partition("#")
    place = (path.parent / name).resolve()
    if text.endswith(".md") and not anchor and place.is_file():
        text = _title(place)
    if place.is_relative_to(DOCS) and place.suffix in (".md", ".png", ".svg"):
        return f"{mark}[{text}]({place.relative_to(DOCS)}{sharp}{anchor})"
    if place == ROOT / "README.md":
        return f"{mark}[{text}]({README}{sharp}{anchor})"
    if place.parent == ROOT and place.name in TOP:
        return f"{mark}[{text}]({TOP[place.name]}{sharp}{anchor})"
    return text  # code, which the site does not have


def _title(path: Path) -> str:
    """The title of a page, which says more to readers of the site than its path."""
    first = path.read_text("utf-8").partition("\n")[0]
    return first.removeprefix("# ")


def main() -> int:
    """Make the site. Returns the exit code of the program that makes it."""
    assemble(SOURCES)
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
