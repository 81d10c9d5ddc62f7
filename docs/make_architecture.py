"""Writes the page of rooms and nouns, docs/modules.md, from docstrings. Git does not have it; the site does.

A room is a module or package directly in one of the seven packages. A noun is a class that several rooms import.
The source is parsed, never imported.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
PACKAGES = (
    "ckpt_cli",
    "formats/ckpt_recorder",
    "formats/ckpt_serving",
    "formats/ckpt_training",
    "formats/ckpt",
    "formats/ckpt_formats",
    "codecs/ckpt_codecs",
)
"""From the top to the bottom: each imports only what is below it."""
FEWEST_ROOMS = 3
"""A class that fewer other rooms import is no noun."""
HEAD = """# Rooms and nouns

Generated from docstrings by `python docs/make_architecture.py`.
[Architecture](architecture.md) says how they fit together.
"""


@dataclass(frozen=True)
class Room:
    """A module or package directly in a package, and the first paragraph of its docstring."""

    package: str
    name: str
    what: str


@dataclass(frozen=True)
class Noun:
    """A class that several rooms import, its module, and the first paragraph of its docstring."""

    name: str
    module: str
    what: str


def rooms() -> list[Room]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).iterdir()):
            source = path / "__init__.py" if path.is_dir() else path
            if not path.name.startswith("_") and source.suffix == ".py" and source.exists():
                found.append(Room(package.rpartition("/")[2], path.stem, _summary(_parse(source))))
    return found


def nouns() -> list[Noun]:
    classes: dict[tuple[str, str], ast.ClassDef] = {}
    importers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for module, path in _modules():
        tree = _parse(path)
        classes |= {(module, node.name): node for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    importers[node.module, alias.name].add(_room(module))
    return [
        Noun(name, module, _summary(node))
        for (module, name), node in classes.items()
        if not name.startswith("_") and len(importers[module, name] - {_room(module)}) >= FEWEST_ROOMS
    ]


def page() -> str:
    lines = [HEAD]
    for package in PACKAGES:
        lines += [f"## {package}/\n", "| room | what it is for |", "|---|---|"]
        lines += [f"| `{room.name}` | {room.what} |" for room in rooms() if package.endswith(room.package)]
        lines.append("")
    lines += ["## Nouns\n", f"Classes that at least {FEWEST_ROOMS} other rooms import.\n"]
    lines += ["| noun | module | what it is |", "|---|---|---|"]
    lines += [f"| `{noun.name}` | `{noun.module}` | {noun.what} |" for noun in nouns()]
    return "\n".join(lines) + "\n"


def _modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to((ROOT / package).parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _summary(node: "ast.Module | ast.ClassDef") -> str:
    """The first paragraph of a docstring, as a cell of a table."""
    text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    return text.replace("|", "\\|").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
