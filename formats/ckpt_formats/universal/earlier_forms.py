"""Manifests and chains of unreleased versions of ckpt. This program recognises them, to refuse them in plain words."""

from pathlib import Path

from ckpt_formats.core.errors import Unsupported

COMMIT = "357a565"
"""The last commit of ckpt that reads versions 2 and 3."""
COMMIT_OF_FILES = "fc24d33"
"""The last commit of ckpt that reads a version 1 with a file for each parameter."""


def earlier_form(path: Path, commit: str = COMMIT) -> Unsupported:
    """The error for a file in an earlier form. `commit`: the last one of ckpt that reads it."""
    return Unsupported(
        f"written by an unreleased version of ckpt, whose form only commit {commit} of ckpt still reads",
        where=path,
        hint=f"With the program of commit {commit}, convert it to another format, for example `--to torch`.",
    )
