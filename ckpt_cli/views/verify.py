"""`ckpt verify`: a checkpoint, a chain, or what is left of either."""

import time
from pathlib import Path

from ckpt.chains import verify as chains
from ckpt.pipeline import Resources
from ckpt.sizes import is_coded
from ckpt.survey import survey
from ckpt.verify import changed, find_problems, nbytes_to_read
from ckpt_cli import notes, work
from ckpt_cli.options import SourceOptions
from ckpt_cli.progress import progress
from ckpt_cli.views import report
from ckpt_formats.core.errors import Corrupt, Incomplete
from ckpt_formats.universal.chain import file as index


def verify(path: Path, reading: SourceOptions, effort: Resources, replay: bool, as_json: bool) -> bool:
    """Check all that can be checked, with a bar, and say what was found. Is all well?

    With `replay`, the steps that a chain's log of gradients has are done again, and compared with what the run had.
    """
    began = time.monotonic()
    try:
        if (path / index.NAME).is_file():
            return chains.verify(path, effort, replay, as_json)
        return _verify(path, reading, effort, as_json)
    except (Corrupt, Incomplete) as error:
        report.unreadable(path, error, survey(path, error, effort), time.monotonic() - began, as_json)
        return False


def _verify(path: Path, reading: SourceOptions, effort: Resources, as_json: bool) -> bool:
    checkpoint = work.open_source(str(path), reading)
    notes.note(*checkpoint.notices)
    notes.flush()
    if is_coded(checkpoint):
        work.load_kernels()
    began = time.monotonic()
    with progress("verifying", nbytes_to_read(checkpoint)) as moved:
        findings = [*find_problems(checkpoint, effort, moved), *changed(checkpoint)]
    report.findings(checkpoint, findings, time.monotonic() - began, as_json)
    return not findings
