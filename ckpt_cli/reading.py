"""Open the checkpoints that the user names, with the options of readers."""

import gc
import json
import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckpt_cli import notes
from ckpt_cli.progress import doing
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, NotFoundError, RulesError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.registry.location import checkpoints_in
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import is_url, refuse_url, source_path

if TYPE_CHECKING:
    from ckpt.chains.restore import ChainState
    from ckpt_formats.core.layout import Rule
    from ckpt_formats.stores.http_client import Credentials

T = TypeVar("T")

_MAX_ORDER = 1 << 28
"""Maximum bytes of a file of names."""
_CONFIG = "config.json"
_OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
SHADOW, PEERS = "tcp://", "peers://"
"""How the address of a shadow begins."""


def open_source(path: str | Path, options: ReadOptions, accept_suspicious: bool = False) -> Checkpoint:
    """The checkpoint at a path; its notices become notes. Suspicions that are accepted become notes, too."""
    checkpoint = open_quietly(path, options)
    gc.freeze()  # the index lives as long as the process: the collector need not visit it
    if accept_suspicious:
        accepted = (Notice(suspicion, weight=Weight.UNSURE) for suspicion in checkpoint.suspicions)
        checkpoint = replace(checkpoint, suspicions=(), notices=(*checkpoint.notices, *accepted))
    return noted(checkpoint)


def open_readable(paths: Sequence[str], options: ReadOptions) -> tuple[tuple[Checkpoint, ...], dict[str, CkptError]]:
    """The checkpoints at some paths, and by path the errors of those that cannot be opened.

    Raises the error of the first, that of any of two, and that of another if no other can be opened.
    """
    first = open_source(paths[0], options)
    others = {path: _opened_or_error(path, options) for path in paths[1:]}
    errors = {path: one for path, one in others.items() if isinstance(one, CkptError)}
    if errors and len(errors) == len(others):
        raise next(iter(errors.values()))
    return (first, *(one for one in map(others.__getitem__, paths[1:]) if isinstance(one, Checkpoint))), errors


def _opened_or_error(path: str, options: ReadOptions) -> Checkpoint | CkptError:
    try:
        return open_source(path, options)
    except CkptError as error:
        return error


def with_checkpoints_inside(path: str) -> tuple[str | Path, list[Path]]:
    """The place that a path names, and the checkpoints in it if it is the folder of several. A store is listed once."""
    if path.startswith(SHADOW):
        return path, []
    with reading_headers(path):
        place = source_place(path)
        inside = checkpoints_in(place)
    return place, inside if len(inside) > 1 else []


def open_quietly(path: str | Path, options: ReadOptions) -> Checkpoint:
    """The checkpoint at a path or a URL, whose notices the user knows from when it was a source."""
    with reading_headers(path):
        if isinstance(path, str) and path.startswith(SHADOW):
            return open_from_shadow(path)
        return open_checkpoint(source_place(path), options)


def source_place(path: str | Path) -> Path:
    """The path of what a command reads; with `--anonymous`, requests to a store have no credentials.

    It is absolute if workers of a cluster read it, who run in other folders.
    """
    place = source_path(path, is_anonymous())
    return place.absolute() if click.get_current_context().params.get("executor") else place


def is_anonymous() -> bool:
    """Whether requests to stores have no credentials, by `--anonymous`."""
    return bool(click.get_current_context().meta.get("ckpt.anonymous"))


def open_live(path: str, options: ReadOptions) -> Checkpoint:
    """What survived of a checkpoint: files of tensors may be missing. Its notices become notes."""
    return noted(open_quietly(path, replace(options, missing_files=True)))


def note(*notices: Notice) -> None:
    """Notices become notes."""
    notes.note(*notices)


def noted(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint; its notices become notes."""
    notes.note(*checkpoint.notices)
    return checkpoint


def withdraw_missing_base() -> None:
    """Forget the note that an adapter is without its base model: the command has both."""
    from ckpt_formats.engines.hf.read import WITHOUT_BASE

    notes.withdraw(WITHOUT_BASE)


def expand_chain(path: str, last: int | None = None, runs: bool = False) -> tuple[str, ...]:
    """The addresses of all stored states of a chain, the oldest first; any other path alone.

    With `runs`, the folder of a run stands for its checkpoints, too. With `last`, only so many of the newest of either.
    Raises `NotFoundError` if there are fewer.
    """
    from ckpt_formats.universal.chain import chain_file
    from ckpt_formats.universal.chain.states import all_steps

    place = None if path.startswith(SHADOW) else source_place(path)
    if place is None or not (place / chain_file.NAME).is_file():
        inside = [] if place is None else checkpoints_in(place)
        if last is None and not (runs and len(inside) > 1):
            return (path,)
        newest = inside if last is None else _newest(inside, last, path)
        notes.note(Notice("these checkpoints of the run are read", tuple(one.name for one in newest)))
        return tuple(map(str, newest))
    chain = chain_file.load(place / chain_file.NAME)
    states: Sequence[int | str] = (
        all_steps(place, chain) if chain.is_published else [member.name or member.step for member in chain.members]
    )
    if last is not None:
        states = _newest(states, last, path)
    notes.note(f"{len(states)} stored states of the chain are read: {_brief(states)}")
    return tuple(f"{path.rstrip('/')}@{state}" for state in states)


def _newest(every: Sequence[T], last: int, path: str) -> list[T]:
    if len(every) < last:
        hint = f"Give --last {len(every)}, or less."
        raise NotFoundError(f"there are {len(every)} checkpoints, not {last}", where=path, hint=hint)
    return list(every[-last:])


def _brief(steps: Sequence[int | str]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 6 else f"{steps[0]}, {steps[1]}, …, {steps[-1]}"


def open_chain_state(chain: str, step: int | None, options: ReadOptions, other: str | None = None) -> "ChainState":
    """The state of a step of a chain; its notices become notes. `other`: another copy of a chain that peers hold."""
    from ckpt.chains.restore import open_step

    with reading_headers(chain):
        if chain.startswith(SHADOW):
            state = _open_shadow_state(chain, step)
        elif chain.startswith(PEERS):
            state = open_step(_open_peers(chain, other), step, options)
        else:
            state = open_step(source_place(chain), step, options)
    notes.note(*state.checkpoint.notices)
    return state


def open_from_shadow(addresses: str) -> Checkpoint:
    """The state of the shadow at `tcp://HOST:PORT`, or of those of all parts, frozen until the command ends."""
    from ckpt.shadow.joined import JoinedShadows
    from ckpt_formats.stores.wire import parse_addresses

    shadows = JoinedShadows(parse_addresses(addresses), shadow_credentials())
    click.get_current_context().call_on_close(shadows.close)
    return shadows.checkpoint


def shadow_credentials() -> "Credentials":
    """What the environment says of servers: the token, and the certificates to trust. Notes a token that others see."""
    from ckpt_formats.stores.http_client import TOKEN_FILE, Credentials

    credentials = Credentials.of_user()
    file = os.environ.get(TOKEN_FILE)
    if file and (mode := stat.S_IMODE(os.stat(file).st_mode)) & _OTHERS_READ:
        notes.note(
            f"other users can read the token in {printable(file)} (mode {mode:04o}): make it yours alone with "
            f"`chmod 600`",
            weight=Weight.UNSURE,
        )
    return credentials


def _open_peers(url: str, other: str | None) -> Path:
    """A chain in the memory of peers; what is to be known of it becomes notes."""
    from ckpt_formats.stores.peers_store import PeersStore, open_peers

    shadow_credentials()  # notes a token that others see
    path = open_peers(url, None if other is None else source_place(other))
    assert isinstance(path.store, PeersStore)
    notes.note(*path.store.notices)
    for holder, reason in path.store.silent.items():
        notes.note(f"{holder} does not answer: {printable(reason)}")
    return path


def _open_shadow_state(address: str, step: int | None) -> "ChainState":
    from ckpt.chains.restore import ChainState

    checkpoint = open_from_shadow(address)
    if step not in (None, checkpoint.step):
        raise NotFoundError(f"the shadow is at step {checkpoint.step}, not {step}", where=address)
    return ChainState(checkpoint, Path(address))


def reading_headers(path: str | Path) -> AbstractContextManager[None]:
    """Within the context, print on a terminal that headers are being read, if this takes long."""
    return doing(f"reading the headers of {printable(str(path))}")


def parse_read_options(rules: str | None, param_order: Sequence[str], shapes: str | None) -> ReadOptions:
    """The options of readers from `--rules`, `--param-order` and `--shapes`. Raises `CkptError`."""
    order: tuple[str, ...] = ()
    orders: dict[str, tuple[str, ...]] = {}
    for text in param_order:
        place, file = _place_and_file(text)
        if place in orders or (place is None and order):
            raise RulesError(f"--param-order names {'the optimizer' if place is None else printable(place)} twice")
        if place is None:
            order = names_in(file)
        else:
            orders[place] = names_in(file)
    other = None if shapes is None else open_checkpoint(source_place(shapes))
    return ReadOptions(_rules(rules) if rules else (), order, orders, other)


def open_model(like: str) -> "Checkpoint | dict[str, Any] | Sequence[str]":
    """What `--like` names: the names in a file, a configuration, or a checkpoint."""
    place = source_place(like)
    if place.suffix == ".txt":
        return names_in(place)
    if place.suffix == ".json":
        return _model_in_json(place)
    try:
        return open_quietly(like, ReadOptions())
    except NotFoundError:
        if (place / _CONFIG).is_file():
            return _model_in_json(place / _CONFIG)
        raise


def _model_in_json(path: Path) -> "dict[str, Any] | Sequence[str]":
    """A configuration, a list of names, or those in an index of safetensors."""
    try:
        value = json.loads(read_whole(path, _MAX_ORDER))
    except (ValueError, RecursionError) as error:
        raise RulesError(f"not valid JSON: {error}", where=path) from None
    if isinstance(value, list):
        return names_in(path)
    if not isinstance(value, dict):
        raise RulesError("neither a configuration nor a list of names", where=path)
    weights = value.get("weight_map")
    return list(weights) if isinstance(weights, dict) else value


def _rules(file: str) -> "tuple[Rule, ...]":
    from ckpt_formats.core.rules import read_rules  # few commands are given rules

    return read_rules(Path(file))


def _place_and_file(text: str) -> tuple[str | None, Path]:
    """The place and the file in `PLACE=FILE`; the place is None if the text is the name of an existing file."""
    place, mark, file = text.partition("=")
    if not mark or not place or is_url(text) or Path(text).exists():
        place, file = "", text
    refuse_url(file, "--param-order reads a file of this machine", "Copy it here, and name the copy.")
    return place or None, Path(file)


def names_in(path: Path) -> tuple[str, ...]:
    """The names in a file: a JSON list, or a name on each line."""
    try:
        text = read_whole(path, _MAX_ORDER).decode("utf-8")
        names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.splitlines()]
    except (ValueError, RecursionError) as error:
        raise RulesError(f"not a list of names: {error}", where=path) from None
    if not all(isinstance(name, str) for name in names):
        raise RulesError("not a list of names: it has items that are not strings", where=path)
    names = [name for name in names if name]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise RulesError(f"names `{printable(twice)}` twice", where=path)
    return tuple(names)
