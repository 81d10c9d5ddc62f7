"""Models of Stable-Baselines3: a zip archive with files of `torch.save` and a JSON text in it. Read, not written.

    policy.pth, policy.optimizer.pth, ...    state dicts; SAC and TD3 have an optimizer each for actor and critic
    pytorch_variables.pth                    tensors that belong to no module
    data                                     the arguments of the algorithm as JSON, objects in it as pickles in base64

The pickles in `data` stay texts.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ckpt_formats.containers.file_starts import HEAD_NBYTES, ZIP, is_stable_baselines
from ckpt_formats.containers.torchfile import TensorRef, open_file
from ckpt_formats.containers.torchfile.file_window import Window
from ckpt_formats.containers.torchfile.zip_archive import Archive, read_members
from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.seals import crc32
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.state_dicts.optimizer_form import is_optimizer
from ckpt_formats.state_dicts.read import training_state

_POLICY, _OPTIMIZER, _DATA, _VERSION = "policy.pth", "policy.optimizer.pth", "data", "_stable_baselines3_version"
_OWNERS = {
    "optimizer": ("q_net.", "quantile_net.", ""),
    "actor.optimizer": ("actor.",),
    "critic.optimizer": ("critic.",),
}
"""By optimizer, how the names begin whose parameters it may be of: `_build` of the library's policies says so."""
_STEPS = "num_timesteps"
_TORCH = ".pth"
_MAX_TEXT = 64 << 20
"""Bytes of a member that is no file of torch."""
_MAX_FILES = 64


class StableBaselines3(Format):
    name = "stable-baselines3"
    summary = "models of Stable-Baselines3: the policy, its optimizers and the algorithm's arguments"

    def detect(self, path: Path) -> bool:
        try:
            if not path.is_file():
                return False
            with open_regular(path) as file:
                if ZIP.match(file.read(HEAD_NBYTES)) is None:
                    return False
            with Window(path) as window:
                return is_stable_baselines(read_members(window).directory.names)
        except (CkptError, OSError):
            return False

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        with Window(path) as window:
            archive = read_members(window)
            names = archive.directory.names
            if len(names) > _MAX_FILES:
                raise UnsafeError(f"has {len(names):,} members", where=path)
            texts = {name: _text(archive, name, window) for name in names if not name.endswith(_TORCH)}
        files = {name: open_file(path, *archive.place(name)) for name in names if name.endswith(_TORCH)}
        data = _json(texts.pop(_DATA, b"{}"), path)
        extras: dict[str, Value] = {_DATA: data} if data else {}
        version = texts.pop(_VERSION, b"").decode("utf-8", "replace").strip() or None
        extras |= {name: text.decode("utf-8", "replace") for name, text in texts.items()}
        root: dict[str, Value] = {}
        for name, file in files.items():
            key = {_POLICY: "model", _OPTIMIZER: "optimizer"}.get(name, name.removesuffix(_TORCH))
            root[key] = file.root
        orders = options.orders if options.order else {**_orders(root), **options.orders}
        state = training_state(root, path, options.order, orders, further_extras=extras)
        step = data.get(_STEPS)
        seals = [seal for file in files.values() for seal in file.seals()]
        own = (archive.seal(archive.index[name]) for name in names if name not in files)
        return Checkpoint(
            path=path,
            origin=Origin("stable-baselines3", version, step if is_natural(step) else None),
            parameters=state.parameters,
            groups=state.groups,
            extras=state.extras,
            aliases=state.aliases,
            files=(SourceFile(path, path.stat().st_size, "all"),),
            seals=(*seals, *filter(None, own)),
            notices=state.notices,
        )


def _orders(root: Mapping[str, Value]) -> dict[str, tuple[str, ...]]:
    """The names that each optimizer numbers, where the names and shapes of the policy fit the source of the library."""
    model = root.get("model")
    orders: dict[str, tuple[str, ...]] = {}
    if not isinstance(model, dict):
        return orders
    for key, owners in _OWNERS.items():
        optimizer = root.get(key)
        states: Value = optimizer.get("state") if isinstance(optimizer, dict) and is_optimizer(optimizer) else None
        if not isinstance(states, dict) or not states:
            continue
        for owner in owners:
            names = [name for name in model if isinstance(name, str) and name.startswith(owner)]
            if states.keys() == set(range(len(names))) and all(
                _shapes(states[number]) <= {_shape(model[name])} for number, name in enumerate(names)
            ):
                orders[key] = tuple(names)
                break
    return orders


def _shapes(state: Value) -> set[Shape | None]:
    """The shapes of an optimizer's states of one parameter, but of plain counts."""
    values = state.values() if isinstance(state, dict) else ()
    return {shape for value in values if (shape := _shape(value))}


def _shape(value: Value) -> Shape | None:
    return tuple(value.shape) if isinstance(value, TensorRef) else None


def _text(archive: Archive, name: str, window: Window) -> bytes:
    start, nbytes = archive.place(name)
    if nbytes > _MAX_TEXT:
        raise UnsafeError(f"has {nbytes:,} bytes: it would exhaust memory", where=f"{archive.path} ({name})")
    text, seal = window.at(start, nbytes), archive.seal(archive.index[name])
    if seal is not None and crc32(text) != seal.digest:
        raise CorruptError("the bytes do not match their checksum", where=f"{archive.path} ({name})")
    return text


def _json(text: bytes, path: Path) -> dict[str, Value]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"not valid JSON: {error}", where=f"{path} ({_DATA})") from None
    if not isinstance(data, dict):
        raise CorruptError("is not a dict of arguments", where=f"{path} ({_DATA})")
    return data
