"""The structure of the packages: how many rooms each has, and how many arrows lead from room to room."""

import re
from pathlib import Path

import grimp
import pytest

from ckpt_formats.core import claims

FORMATS = Path(claims.__file__).parents[1]

LIMITS = {
    "ckpt_cli": (8, 14),  # `main` tells notes and progress to be quiet; views of peers open what holders have
    # `planning` stands alone; `doctor` also says what parity there is; `shadow` adds bases to chains, runs jobs, is
    # read as a checkpoint; `copying` runs the pipeline on files, not on tensors, and changes chains
    # `partial` mixes two states, for chains and for whoever lost blocks; `reading` writes nothing
    # `serving` sends the files of chains; where and to whom, shadows decide alike
    # `publishing` and `following` write and read published chains: the one needs nothing of the other
    # `runs` is about the checkpoints of a run: it finds, verifies and removes them; `watch` stores each in a chain or
    # as a copy, and compares values before it removes one; `publishing` follows a run by the same loop
    # `protection` writes parity beside files of any format, and repairs them
    # `holding` keeps pieces of logs in memory for other hosts, and lets peers in as `shadow` does
    "ckpt": (22, 37),
    # `parity` is about blocks of files, whatever their format is
    "ckpt_formats": (9, 20),  # `stores` reads what lies in buckets; `registry` lists the folder of a run there
    "ckpt_codecs": (14, 51),  # `quantised` gives the values of weights that other libraries quantised
}
"""Rooms and arrows. A room is a module or a package directly in the package; an arrow, that one imports another."""
NAMES_ONLY = frozenset({"ckpt.errors", "ckpt.ext", "ckpt.types"})
"""Modules with names of other modules, as `ckpt` itself: nothing imports them, and they are no rooms."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*LIMITS, cache_dir=None)


@pytest.mark.parametrize("package", LIMITS)
def test_rooms_and_arrows(graph: grimp.ImportGraph, package: str) -> None:
    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    rooms = graph.find_children(package) - NAMES_ONLY
    arrows = {
        (room(importer), room(imported))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if {room(importer), room(imported)} <= rooms and room(importer) != room(imported)
    }
    assert not [name for name in NAMES_ONLY & graph.modules if graph.find_modules_that_directly_import(name) - {"ckpt"}]
    max_rooms, max_arrows = LIMITS[package]
    assert len(rooms) <= max_rooms, sorted(rooms)
    assert len(arrows) <= max_arrows, sorted(arrows)


def test_bounds_of_claims_stand_in_one_module() -> None:
    bounds = {name for name in vars(claims) if name.startswith("MAX_")} - {"MAX_DEPTH", "MAX_NAMES", "MAX_RANKS"}
    own = re.compile(rf"^_?(?:{'|'.join(sorted(bounds))}) *=", re.MULTILINE)
    modules = {module: module.read_text() for module in FORMATS.rglob("*.py") if module.name != "claims.py"}
    assert [f"{module}: {found[0]}" for module, text in modules.items() if (found := own.search(text))] == []


def circular(graph: grimp.ImportGraph) -> set[tuple[str, str]]:
    """The imports, each a pair of modules, of which the other one imports the first again, maybe through others."""
    return {
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if graph.chain_exists(importer=imported, imported=importer)
    }


@pytest.mark.parametrize(
    "package", ["ckpt", "ckpt_cli", "ckpt_recorder", "ckpt_serving", "ckpt_training", "ckpt_codecs"]
)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    assert circular(grimp.build_graph(package, cache_dir=None)) == set()


def test_circles_of_imports_in_formats_begin_with_edits_of_checkpoints() -> None:
    """Types alone aside: a method of `Checkpoint` imports what makes another checkpoint, or its page in a notebook."""
    graph = grimp.build_graph("ckpt_formats", cache_dir=None, exclude_type_checking_imports=True)
    for imported in ("edits", "notebook", "quantised.quantise"):
        graph.remove_import(importer="ckpt_formats.core.checkpoint", imported=f"ckpt_formats.core.{imported}")
    assert circular(graph) == set()
