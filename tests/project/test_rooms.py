"""The structure of the packages: how many rooms each has, and how many arrows lead from room to room."""

import grimp
import pytest

LIMITS = {
    "ckpt_cli": (8, 12),
    # `doctor` and `planning` stand alone; `shadow` adds bases to chains, runs jobs, is read as a checkpoint; `copying`
    # runs the pipeline on files, not on tensors, and changes chains
    # `errors` has the names of all errors, of `core`
    "ckpt": (16, 18),
    "ckpt_formats": (8, 17),  # `stores` reads what lies in buckets: paths and files of `core`
    "ckpt_codecs": (13, 48),
}
"""Rooms and arrows. A room is a module or a package directly in the package; an arrow, that one imports another."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*LIMITS, cache_dir=None)


@pytest.mark.parametrize("package", LIMITS)
def test_rooms_and_arrows(graph: grimp.ImportGraph, package: str) -> None:
    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    rooms = graph.find_children(package)
    arrows = {
        (room(importer), room(imported))
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if {room(importer), room(imported)} <= rooms and room(importer) != room(imported)
    }
    max_rooms, max_arrows = LIMITS[package]
    assert len(rooms) <= max_rooms, sorted(rooms)
    assert len(arrows) <= max_arrows, sorted(arrows)
