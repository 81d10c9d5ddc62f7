"""Tiny installed packages that provide formats: a module and the metadata that an installer writes."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-format.md"


def install(folder: Path, package: str, entry_points: str, group: str = "ckpt.formats", **modules: str) -> None:
    """Put version 1.0 of a package into a folder of the path: its modules by name, and its entry points as text."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)


def install_format_of_the_page(folder: Path) -> None:
    """The format that docs/adding-a-format.md adds, as the package `npy-ckpt`."""
    page = PAGE.read_text("utf-8")
    (code,) = re.findall(r"<!-- file: npy_folder.py -->\n```python\n(.*?)```", page, re.DOTALL)
    (entry,) = re.findall(r'<!-- entry point -->\n```toml\n\[project.entry-points."ckpt.formats"\]\n(.*?)\n```', page)
    name, place = re.fullmatch(r'(\w+) = "([\w.:]+)"', entry).groups()
    install(folder, "npy-ckpt", f"{name} = {place}", npy_folder=code)
