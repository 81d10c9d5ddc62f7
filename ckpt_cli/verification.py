"""`ckpt verify`: a checkpoint, a chain, or what is left of either."""

import time
from pathlib import Path

from ckpt_cli import notes, report, work
from ckpt_cli.chains import verify as chains
from ckpt_cli.checks import amount, changed, examine
from ckpt_cli.options import Reading
from ckpt_cli.pipeline import Effort
from ckpt_cli.progress import progress
from ckpt_cli.savings import is_coded
from ckpt_cli.survey import survey
from ckpt_formats.chain import index
from ckpt_formats.errors import Corrupt, Incomplete


def verify(path: Path, reading: Reading, effort: Effort, replay: bool, as_json: bool) -> bool:
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


def _verify(path: Path, reading: Reading, effort: Effort, as_json: bool) -> bool:
    checkpoint = work.open_source(str(path), reading)
    notes.note(*checkpoint.notices)
    notes.flush()
    if is_coded(checkpoint):
        work.load_kernels()
    began = time.monotonic()
    with progress("verifying", amount(checkpoint)) as moved:
        findings = [*examine(checkpoint, effort, moved), *changed(checkpoint)]
    report.findings(checkpoint, findings, time.monotonic() - began, as_json)
    return not findings
