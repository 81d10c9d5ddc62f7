"""Run `append` and `diff -o`, and show their results."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ckpt.chains import append as chain_append
from ckpt.chains.trials import AcceptedStep, Trial
from ckpt.chains.write import AppendResult, DeltaPolicy, parent_folder
from ckpt.chains.write import write_delta as write_delta_file
from ckpt.pipeline import Execution, plan
from ckpt_cli import notes
from ckpt_cli.options.delta import AppendOptions, DeltaFile
from ckpt_cli.progress import doing, progress_bar
from ckpt_cli.views import report
from ckpt_cli.views.chain_log import accuracy, times
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.parity.blocks import has_parity
from ckpt_formats.stores.location import listed_again, target_path
from ckpt_formats.universal import Universal


def run(
    chain: Path, sources: Sequence[Checkpoint], options: AppendOptions, resources: Execution, as_json: bool
) -> None:
    """Append one state or several, or show what would be appended. Raises `UsageError` for options of one state."""
    for source in sources:
        note_warnings(options.policy, source)
    if len(sources) > 1 and (options.dry_run or options.step is not None or options.parent is not None):
        raise click.UsageError("--dry-run, --step and --parent are about one state: append the checkpoints one by one.")
    if len(sources) > 1:
        append_each(chain, sources, options, resources, as_json)
    elif options.dry_run:
        show_plan(chain, sources[0], options, resources, as_json)
    else:
        append(chain, sources[0], options, resources, as_json)


def append(chain: Path, source: Checkpoint, options: AppendOptions, resources: Execution, as_json: bool) -> None:
    """Append to a chain, or create one, with a progress bar; show what was written."""
    notes.flush()
    with progress_bar("appending") as progress:
        policy = with_trials(options.policy)
        parent = options.open_parent()
        result = chain_append.append(chain, source, options.step, policy, resources, progress, parent)
    protect_member(chain, result, options, resources)
    show(result, chain, as_json)


def protect_member(chain: Path, result: AppendResult, options: AppendOptions, resources: Execution) -> None:
    """Write parity for a state that was appended, if the user wants it, or states of the chain have it in groups."""
    if options.protect is None and not has_parity(listed_again(chain)):
        return
    from ckpt_cli.views.protect import protect_states

    try:
        protect_states(chain, options.protect, (result.member.folder,), resources)
    except CkptError:
        notes.note(f"{result.member.label} was appended, and has no parity yet; the next append with parity adds it")
        raise


def append_each(
    chain: Path, sources: Sequence[Checkpoint], options: AppendOptions, resources: Execution, as_json: bool
) -> None:
    """Append several states in their order. If one fails, those before it stay in the chain."""
    with report.gathered() as objects:
        for source in sources:
            append(chain, source, options, resources, as_json)
    if as_json:
        report.data({"target": str(chain), "appended": objects})


def show_plan(chain: Path, source: Checkpoint, options: AppendOptions, resources: Execution, as_json: bool) -> None:
    """Show what would be appended, and about how many bytes it would take."""
    policy = options.policy
    with doing(f"reading the chain {printable(str(chain))}"):
        parent = options.open_parent()
        step, kind, earlier, notices = chain_append.plan_append(chain, source, options.step, policy, parent)
    notes.note(*notices)
    costs = estimate(policy, source, earlier, policy.base == "coded", resources)
    _show_estimate({"chain": str(chain), "step": step, "kind": kind, **costs}, as_json)


def write_delta(first: Checkpoint, second: Checkpoint, delta: DeltaFile, resources: Execution, as_json: bool) -> None:
    """Write the second checkpoint as a delta against the first, or only plan this; show the result."""
    note_warnings(delta.policy, second)
    parent, target = parent_folder(first), target_path(delta.output)
    if delta.dry_run:
        plan(second, target, Universal())
        costs = estimate(delta.policy, second, first, False, resources)
        _show_estimate({"target": str(target), "parent": str(parent), **costs}, as_json)
        return
    step = second.origin.step if delta.step is None else delta.step
    notes.flush()
    with progress_bar("writing the delta") as progress:
        policy = with_trials(delta.policy)
        result = write_delta_file(second, target, step or 0, first, parent, policy, resources, progress)
    show(result, target, as_json)


def note_warnings(policy: DeltaPolicy, source: Checkpoint) -> None:
    """Note the warnings of the codec for this checkpoint."""
    notes.note(*policy.warnings(source))


def with_trials(policy: DeltaPolicy) -> DeltaPolicy:
    """The policy, which shows each trial of its evaluation."""
    if policy.evaluation is None:
        return policy
    return replace(policy, evaluation=replace(policy.evaluation, on_trial=_show_trial))


def _show_trial(trial: Trial) -> None:
    if trial.step_size is None:
        report.say(f"trial: the exact state, loss {trial.loss:.6g}")
    else:
        report.say(f"trial: step {trial.step_size:.3g}, loss {trial.loss:.6g}, {trial.increase:+.3g}")


def show(written: AppendResult, target: Path, as_json: bool, parent: str | None = None) -> None:
    """Show a state that was written. `parent`: the name of a model's parent in a family."""
    member, accepted, result = written.member, written.accepted, written.result
    notes.note(*written.notes)
    if as_json:
        report.data(
            {
                "target": str(target),
                "step": member.step,
                **({} if member.name is None else {"name": member.name, "parent": parent}),
                "kind": member.kind,
                "folder": member.folder,
                "content": member.content,
                "codecs": list(member.codecs),
                "raw_nbytes": member.raw_nbytes,
                "stored_nbytes": member.stored_nbytes,
                **({"shared_nbytes": member.shared_nbytes} if member.shared else {}),
                "ratio": round(member.raw_nbytes / member.stored_nbytes, 4),
                "exact": member.exact,
                "errors": {state: dict(error) for state, error in member.errors.items()},
                "seconds": round(result.seconds, 3),
                "checksums_verified": result.checksums,
                **({} if accepted is None else {"evaluation": _accepted_json(accepted)}),
            }
        )
        return
    kind = f"{member.kind} of {parent}" if parent else member.kind
    report.conclude(
        f"{printable(str(target))}: {member.label}, {kind}, {format_nbytes(member.stored_nbytes)} for "
        f"{format_nbytes(member.raw_nbytes)}, {times(member.raw_nbytes, member.stored_nbytes)}, {accuracy(member)}"
    )
    if member.shared:
        folders = ", ".join(one.folder for one in member.shared)
        report.conclude(
            f"not stored again: {format_nbytes(member.shared_nbytes)} of states that did not change, in {folders}"
        )
    if accepted is not None:
        report.conclude(f"evaluated: loss {accepted.loss:.6g}, of the exact state {accepted.exact:.6g}")
    resumed = f"; {format_nbytes(result.resumed_nbytes)} of it by an earlier run" if result.resumed else ""
    report.conclude(f"wrote {report.file_count(result.files)} in {result.seconds:.1f} s{resumed}")


def _accepted_json(accepted: AcceptedStep) -> dict[str, float]:
    return {"step": accepted.step_size, "loss": accepted.loss, "exact": accepted.exact}


def _show_estimate(fields: dict[str, Any], as_json: bool) -> None:
    if as_json:
        report.data(fields)
        return
    place = fields.get("chain") or fields["target"]
    kind = f"step {fields['step']}, {fields['kind']}" if "step" in fields else f"a delta against {fields['parent']}"
    lossy = f", approximate by codec {fields['approximate']}" if "approximate" in fields else ""
    raw, stored = fields["raw_nbytes"], fields["stored_nbytes"]
    sizes = f"about {format_nbytes(stored)} for {format_nbytes(raw)}, {times(raw, stored)}"
    click.echo(printable(f"{place}: {kind}, {sizes}{lossy}"))
    report.conclude("estimated from some chunks; nothing was written")


def estimate(
    policy: DeltaPolicy, source: Checkpoint, earlier: Checkpoint | None, coded: bool, resources: Execution
) -> dict[str, Any]:
    """About how many bytes a state takes against an earlier one, as fields of `--json`. `coded`: whether a state
    without a parent gets the policy's codec."""
    from ckpt.chains.estimate import stored_nbytes  # an append estimates nothing

    raw = sum(parameter.nbytes for parameter in source.parameters.values())
    with doing("encoding some chunks of each kind of state"):
        stored = stored_nbytes(source, earlier, coded, policy, resources)
    fields = {"estimate": True, "raw_nbytes": raw, "stored_nbytes": stored, "ratio": round(raw / max(stored, 1), 4)}
    lossy = not policy.delta_codec.lossless and (earlier is not None or coded)
    return fields | ({"approximate": policy.delta_codec.name} if lossy else {})
