"""`ckpt verify`: check a checkpoint or a chain, or the files of one that cannot be opened."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.chains.verify import ChainReport, verify_chain
from ckpt.findings.checks import changed, find_problems, holes_of, nbytes_to_read, problems_of_headers
from ckpt.findings.float_scan import FloatScan
from ckpt.findings.not_finite import find_not_finite, not_finite_notice
from ckpt.findings.part import part_to_check
from ckpt.findings.report import Finding
from ckpt.findings.survey import survey
from ckpt.job import count_to, load_kernels
from ckpt.pipeline import Resources
from ckpt_cli import notes
from ckpt_cli.options.exit_codes import DAMAGED, exit_code
from ckpt_cli.options.source import left_out
from ckpt_cli.options.verify import How
from ckpt_cli.progress import doing, progress_bar
from ckpt_cli.views import report
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, InvalidArgumentError, NotFoundError
from ckpt_formats.core.text import counted, list_names, printable
from ckpt_formats.core.zero_values import zero_notices
from ckpt_formats.parity.blocks import protected_folders
from ckpt_formats.registry.opening import open_checkpoint as open_any
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.states import all_steps

_MAX_STEPS = 10


def verify(
    path: Path, open_checkpoint: Callable[[], Checkpoint], resources: Resources, how: How, as_json: bool
) -> bool:
    """Check everything with a progress bar, and show the findings. Returns whether there are none.

    If there is parity, of the path or of members of a chain, all files are compared with it, too. `open_checkpoint` is
    called if the path is not a chain.
    """
    protected = [] if how.quick else protected_folders(path)
    if not protected:
        return _verify_files(path, open_checkpoint, resources, how, as_json)
    from ckpt_cli.views.protect import verify_parity

    with report.gathered() as objects:
        try:
            ok = _verify_files(path, open_checkpoint, resources, how, as_json)
        except NotFoundError as error:  # the files by which a format is known may be lost
            report.unreadable(path, error, [Finding("unreadable", error.what, str(path))], 0.0, as_json)
            ok = False
    return verify_parity(protected, resources, ok, objects[0] if as_json else None)


def _verify_files(
    path: Path, open_checkpoint: Callable[[], Checkpoint], resources: Resources, how: How, as_json: bool
) -> bool:
    started = time.monotonic()
    try:
        if (path / chain_file.NAME).is_file():
            _check_chain(path, how)
            return _quick_chain(path, as_json) if how.quick else _verify_chain(path, resources, how.replay, as_json)
        if how.quick:
            return _quick(*_part(open_checkpoint(), how), as_json)
        return _verify(*_part(open_checkpoint(), how), resources, how.values, as_json)
    except (CorruptError, IncompleteError) as error:
        with progress_bar("looking for more damage"):
            problems = survey(path, error, resources)
        report.unreadable(path, error, problems, time.monotonic() - started, as_json)
        return False


def verify_each(
    checkpoints: Sequence[tuple[Path, Callable[[], Checkpoint]]], resources: Resources, how: How, as_json: bool
) -> int:
    """Verify checkpoints one after another, also after one that is damaged or cannot be opened, and count these.

    checkpoints: the path of each, and what opens it. Returns the exit code: 20 for damage, else that of the first
    error, 0 without one. The error of a single checkpoint is raised.
    """
    if len(checkpoints) == 1:
        return 0 if verify(*checkpoints[0], resources, how, as_json) else DAMAGED
    damaged: list[Path] = []
    errors: dict[Path, CkptError] = {}
    with report.gathered() as objects:
        for path, open_checkpoint in checkpoints:
            error = _error_of(path, open_checkpoint, resources, how, as_json)
            if isinstance(error, CkptError):
                errors[path] = error
            elif error:
                damaged.append(path)
    bad = [*damaged, *errors]
    if as_json:
        report.data({"ok": not bad, "damaged": list(map(str, bad)), "checkpoints": objects})
        return _exit_code(damaged, errors)
    names = (list_names(list(map(str, some)), printable, max_count=_MAX_STEPS) for some in (damaged, [*errors]))
    texts = [
        f"{head}: {len(some)} of {len(checkpoints)} checkpoints: {own}"
        for head, some, own in zip(("DAMAGED", "NOT VERIFIED"), (damaged, errors), names, strict=True)
        if some
    ]
    for text in texts or [f"ok: all {len(checkpoints)} checkpoints"]:
        report.conclude(text)
    return _exit_code(damaged, errors)


def _error_of(
    path: Path, open_checkpoint: Callable[[], Checkpoint], resources: Resources, how: How, as_json: bool
) -> CkptError | bool:
    """Verify one of several. Returns the error if it cannot be verified, else whether it is damaged."""
    try:
        return not verify(path, open_checkpoint, resources, how, as_json)
    except CkptError as error:
        problems = [Finding("unreadable", error.what, error.where or str(path))] if as_json else []
        report.unreadable(path, error, problems, 0, as_json)
        return error


def _exit_code(damaged: Sequence[Path], errors: Mapping[Path, CkptError]) -> int:
    if damaged:
        return DAMAGED
    return exit_code(next(iter(errors.values()))) if errors else 0


def _part(whole: Checkpoint, how: How) -> tuple[Checkpoint, report.CheckedPart]:
    """What is checked of a checkpoint."""
    if not how.choice:
        return whole, report.CheckedPart(len(whole.parameters))
    part = part_to_check(whole, how.choice.only, how.choice.skip)
    notes.note(left_out(whole, part))
    return part, report.CheckedPart(len(part.parameters), len(whole.parameters) - len(part.parameters))


def _check_chain(path: Path, how: How) -> None:
    """Raise `InvalidArgumentError` for what can be asked of one state only."""
    options = {"--values": how.values, "--only": how.choice.only, "--skip": how.choice.skip}
    given = next((name for name, value in options.items() if value), None)
    if given is not None:
        hint = (
            f"Name the step, or the model of a family: CHAIN@STEP {given}{' PATTERN' if given != '--values' else ''}."
        )
        raise InvalidArgumentError(f"{given} is about one state, and this is a chain", where=path, hint=hint)


def _verify(
    checkpoint: Checkpoint, part: report.CheckedPart, resources: Resources, values: bool, as_json: bool
) -> bool:
    notes.flush()
    load_kernels()
    started = time.monotonic()
    zeros = holes_of(checkpoint)
    scan = None if values else FloatScan(checkpoint)
    with progress_bar("verifying") as progress:
        count_bytes = count_to(nbytes_to_read(checkpoint), progress)
        problems = find_problems(checkpoint, resources, count_bytes, note_zeros=zeros.extend, scan=scan)
        findings = [*problems, *changed(checkpoint)]
    strange = None
    if not findings and scan is None:
        with progress_bar("reading the values") as progress:
            strange = find_not_finite(checkpoint, resources, progress, zeros.extend)
    elif not findings and scan is not None and checkpoint.seals:
        strange = find_not_finite(checkpoint, resources, only=scan.names)
    notes.note(*not_finite_notice(strange or ()))
    notes.note(*zero_notices(checkpoint, zeros))
    report.findings(checkpoint, part, findings, time.monotonic() - started, as_json, strange, has_read_all=values)
    return not findings


def _quick(checkpoint: Checkpoint, part: report.CheckedPart, as_json: bool) -> bool:
    started = time.monotonic()
    with doing("comparing headers"):
        findings = problems_of_headers(checkpoint)
    report.quick(checkpoint.path, findings, time.monotonic() - started, "its headers agree", as_json, part)
    return not findings


def _quick_chain(run: Path, as_json: bool) -> bool:
    """Check the headers of all stored states of a chain."""
    started = time.monotonic()
    chain = chain_file.read(run)
    steps: Sequence[int | str] = (
        all_steps(run, chain) if chain.is_published else [member.name or member.step for member in chain.members]
    )
    findings: list[Finding] = []
    with doing(f"comparing the headers of {len(steps)} states"):
        for step in steps:
            state = run.with_name(f"{run.name}@{step}")
            try:
                findings += problems_of_headers(open_any(state))
            except (CorruptError, IncompleteError) as error:
                findings.append(Finding("unreadable", error.what, error.where or str(state)))
    text = f"the headers of {len(steps)} states agree"
    report.quick(run, list(dict.fromkeys(findings)), time.monotonic() - started, text, as_json)
    return not findings


def _verify_chain(run: Path, resources: Resources, replay: bool, as_json: bool) -> bool:
    started = time.monotonic()
    with progress_bar("verifying") as progress:
        result = verify_chain(run, resources, progress, replay)
    seconds = time.monotonic() - started
    notes.note(*result.notes)
    if as_json:
        report.data(_json(run, result, seconds))
        return not result.findings
    report.print_findings(result.findings)
    if result.findings:
        names = {member.step: member.name or str(member.step) for member in result.chain.members}
        bad = [names.get(step, str(step)) for step in result.bad_steps]
        steps = ", ".join(bad[:_MAX_STEPS]) + ("…" if len(bad) > _MAX_STEPS else "")
        what = "models" if result.chain.is_family else "steps"
        lost_steps = f"; {what} that cannot be restored: {steps}" if bad else ""
        count = len(result.findings)
        report.conclude(f"DAMAGED: {printable(str(run))}: {count} finding{'s' * (count != 1)}{lost_steps}")
        return False
    states = counted(len(result.steps), "model" if result.chain.is_family else "state")
    matching = f"{counted(result.checksums, 'checksum')} match{'es' * (result.checksums == 1)}"
    facts = [f"{states} complete, {matching}"] if result.steps else []
    if result.segments:
        logged = sum(one.last - one.logged.first for one in result.segments if one.last is not None)
        facts.append(f"{logged} steps of gradients complete{' and replayed' if replay else ''}")
    report.conclude(f"ok: {printable(str(run))}: {', '.join(facts)} ({seconds:.1f} s)")
    return True


def _json(run: Path, result: ChainReport, seconds: float) -> dict[str, Any]:
    names = {member.step: member.name for member in result.chain.members}
    models = {"models": list(names.values()), "damaged_models": [names[step] for step in result.bad_steps]}
    return report.findings_json(run, result.findings, seconds) | {
        "steps": list(result.steps),
        "approximate_steps": [member.step for member in result.chain.members if not member.exact],
        "damaged_steps": list(result.bad_steps),
        "not_finite": [{"step": one.step, **report.counts_json(one.counts)} for one in result.not_finite],
        **(models if result.chain.is_family else {}),
    }
