"""Manifests and chains of unreleased versions of ckpt. This program recognises them, to refuse them in plain words."""

from pathlib import Path

from ckpt_formats.core.errors import Unsupported

COMMIT = "357a565"
"""The last commit of ckpt that reads the earlier forms."""


def earlier_form(path: Path) -> Unsupported:
    """The error for a file in an earlier form."""
    return Unsupported(
        f"written by an unreleased version of ckpt, whose form only commit {COMMIT} of ckpt still reads",
        where=path,
        hint=f"With the program of commit {COMMIT}, convert it to another format, for example `--to torch`.",
    )
