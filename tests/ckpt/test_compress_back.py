"""What `ckpt decompress` gives back: the file that was compressed, as torch and safetensors see it."""

import argparse
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.torchfile import StorageView, open_file, reading_chunks, write_file
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest, original
from damage import BROKEN, SAMPLES, UNSAFE, Ran, ckpt
from held import contents


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 5), nn.Linear(30, 5, bias=False))


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """After two real steps; matrices decay, vectors do not."""
    model = net()
    weights = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": weights}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    result = kind(groups, lr=0.01, **options)
    for _ in range(2):
        result.zero_grad()
        sum(p.square().sum() for p in model.parameters()).backward()
        result.step()
    return result


def tied() -> dict[str, Any]:
    table, buffer = torch.randn(7, 6), torch.randn(40)
    first, second = buffer[:24].view(4, 6), buffer[24:]
    return {
        "embed": table,
        "head": table,
        "flat": table.view(-1),
        "turned": table.t(),
        "row": table[3],
        "parts": {"a": first, "b": second},
        "alone": torch.randn(2),
    }


def lightning() -> dict[str, Any]:
    adam = optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(adam, 2)
    return {
        "epoch": 3,
        "global_step": 120,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": OrderedDict((f"model.{name}", value) for name, value in net().state_dict().items()),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4, "done": None}}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_score": torch.tensor(0.5), "k": (1, 2.5)}},
        "optimizer_states": [adam.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
        "hyper_parameters": {"lr": 1e-3, "betas": [0.9, 0.95], "name": None, "flags": {"a": True}},
    }


FILES: dict[str, Callable[[], Any]] = {
    "flat": lambda: {name: value.clone() for name, value in net().state_dict().items()},
    "a module's own, with its versions": lambda: net().state_dict(),
    "the same twice": lambda: (lambda sd: {"model": sd, "ema": dict(sd), "step": 3})(net().state_dict()),
    "model, optimizer, epoch": lambda: {
        "epoch": 3,
        "model": net().state_dict(),
        "optimizer": optimizer().state_dict(),
        "note": ("a", 1.5, None, [True, {"b": 2}]),
    },
    "momentum": lambda: {"net": net().state_dict(), "optim": optimizer(torch.optim.SGD, momentum=0.9).state_dict()},
    "nothing is numbered": lambda: {"model": net().state_dict(), "optimizer": optimizer(torch.optim.SGD).state_dict()},
    "an optimizer alone": lambda: optimizer().state_dict(),
    "lightning": lightning,
    "two networks": lambda: {
        "generator": net().state_dict(),
        "discriminator": net().state_dict(),
        "config": {"lr": 0.1, "k": [1]},
        "opt_g": optimizer().state_dict(),
        "opt_d": optimizer(torch.optim.RMSprop).state_dict(),
    },
    "between the tensors": lambda: {"a": {"w": torch.ones(3), "n": 5, "l": [1], "t": (torch.ones(2), 5)}, "top": 5},
    "nested twice": lambda: {"module": {"encoder": net().state_dict(), "step": 5}, "count": 7},
    "tied, and views": tied,
    "channels last": lambda: {"w": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)},
    "parameters": lambda: {"w": nn.Parameter(torch.randn(4, 4)), "g": torch.randn(3, requires_grad=True)},
    "keys that are no texts": lambda: {0: torch.randn(3), 1: {"a": torch.ones(2), 2: "two"}},
    "a list": lambda: [torch.randn(3), {"x": torch.ones(2)}, "end"],
    "one tensor": lambda: torch.randn(4),
    "types": lambda: {
        "half": torch.randn(300, 100).half(),
        "brain": torch.randn(300, 100).bfloat16(),
        "small": torch.randn(300).to(torch.float8_e4m3fn),
        "ids": torch.arange(5000),
        "mask": torch.rand(300, 3) > 0.5,
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5),
        "odd": torch.tensor([float("nan"), float("-inf"), -0.0]),
    },
}


def done(ran: Ran) -> str:
    assert ran.code == 0, ran.err
    return ran.err


def back(source: Path, target: Path, *options: str) -> str:
    """Compress and decompress; what was said of the latter."""
    done(ckpt("compress", source, f"{source.parent / 'small'}/"))
    return done(ckpt("decompress", source.parent / "small", target, *options))


def assert_same(one: Any, other: Any, at: str = "") -> None:
    """Equal in everything: types, keys, their order, and tensors by their bits."""
    assert type(one) is type(other), at
    if isinstance(one, torch.Tensor):
        facts = [(t.dtype, t.shape, t.stride(), t.requires_grad, t.device) for t in (one, other)]
        assert facts[0] == facts[1], at
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        assert torch.equal(*raw), at
    elif isinstance(one, dict):
        assert list(one) == list(other), at
        for key in one:
            assert_same(one[key], other[key], f"{at}/{key}")
        assert_same(getattr(one, "_metadata", None), getattr(other, "_metadata", None), f"{at}._metadata")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), at
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{at}/{index}")
    else:
        assert one == other, at


def lying(value: Any) -> list[tuple[int, int]]:
    """Of each tensor, the number of its storage, and where in it it begins."""
    storages: dict[int, int] = {}

    def places(value: Any) -> list[tuple[int, int]]:
        if isinstance(value, torch.Tensor):
            return [(storages.setdefault(value.untyped_storage().data_ptr(), len(storages)), value.storage_offset())]
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [place for item in inner for place in places(item)]

    return places(value)


@pytest.mark.quick(4)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_torch_is_what_it_was(kind: str, legacy: bool, tmp_path: Path) -> None:
    held = FILES[kind]()
    if kind == "types" and legacy:
        del held["small"]  # which torch itself cannot write so
    torch.save(held, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
    back(tmp_path / "file.pt", tmp_path / "again.pt")
    actual, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("again.pt", "file.pt"))
    assert_same(actual, expected)
    assert lying(actual) == lying(expected)


def test_restored_file_is_the_original_when_only_a_trusting_load_takes_it(tmp_path: Path) -> None:
    held = {
        "model": {"w": torch.randn(300, 10)},
        "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "rng": ("MT19937", np.arange(624, dtype=np.uint32), 5),
        "loss": np.float64(0.25),
        "seen": {1, 2},
    }
    torch.save(held, tmp_path / "file.pt")
    back(tmp_path / "file.pt", tmp_path / "again.pt")
    loaded = torch.load(tmp_path / "again.pt", weights_only=False)
    assert list(loaded) == list(held)
    assert_same(loaded["model"], held["model"])
    assert (loaded["args"], loaded["loss"], loaded["seen"]) == (held["args"], held["loss"], held["seen"])
    assert type(loaded["loss"]) is np.float64
    assert loaded["rng"][1].tobytes() == held["rng"][1].tobytes()


def test_the_device_is_told_again(tmp_path: Path) -> None:
    views = {
        name: StorageView(Tensor.of(ArrayBlob(np.arange(4.0))), 0, (4,), location=device)
        for name, device in [("a", "cuda:0"), ("b", "cuda:0"), ("c", "cpu")]
    }
    write_file(tmp_path / "file.pt", views, reading_chunks(Reader()))
    back(tmp_path / "file.pt", tmp_path / "again.pt")
    root = open_file(tmp_path / "again.pt").root
    assert {name: ref.storage.location for name, ref in root.items()} == {"a": "cuda:0", "b": "cuda:0", "c": "cpu"}


def test_elements_that_no_tensor_shows_are_not_kept(tmp_path: Path) -> None:
    """torch saves all of a storage; of a row of a large table, we keep the row."""
    torch.save({"row": torch.randn(500, 1000)[7], "gap": torch.randn(400, 1000)[:, :3]}, tmp_path / "file.pt")
    back(tmp_path / "file.pt", tmp_path / "again.pt")
    actual, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("again.pt", "file.pt"))
    assert {name: value.tolist() for name, value in actual.items()} == {n: v.tolist() for n, v in expected.items()}
    assert (tmp_path / "again.pt").stat().st_size < 20_000


@pytest.mark.parametrize(
    "metadata",
    [None, {"format": "pt"}, {"format": "tf", "author": "me"}, {"note": "größer", "step": "7"}],
    ids=["none", "pt", "others", "no format"],
)
def test_a_file_of_safetensors_is_the_same_byte_for_byte(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    held = FILES["types"]() | {"schicht.größe": torch.randn(5)}
    save_file({name: value.contiguous() for name, value in held.items()}, tmp_path / "model.safetensors", metadata)
    back(tmp_path / "model.safetensors", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_a_tie_in_the_metadata_stays_one(tmp_path: Path) -> None:
    save_file({"a": torch.randn(50, 3)}, tmp_path / "model.safetensors", {"b": "a", "who": "me"})
    back(tmp_path / "model.safetensors", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("sample", sorted(p.name for p in SAMPLES.iterdir() if p.is_dir() and p.name != "damaged"))
@pytest.mark.slow
def test_decompressed_checkpoint_has_its_original_format(sample: str, tmp_path: Path) -> None:
    source = open_checkpoint(SAMPLES / sample)
    done(ckpt("compress", SAMPLES / sample, f"{tmp_path / 'small'}/"))
    output = done(ckpt("decompress", tmp_path / "small", tmp_path / "again"))
    (again,) = tmp_path.glob("again*")  # a file gets the ending that it had
    reopened = open_checkpoint(again)
    assert contents(reopened) == contents(source)
    if sample.startswith("transformers"):  # its folder, as we write it, has no place for the optimizer
        assert "universal, since hf cannot hold all of it: optimizer states" in output
        assert (tmp_path / "again" / manifest.NAME).is_file()
    elif not sample.startswith(
        ("universal", "recorded-2", "recorded-3", "published")
    ):  # their first states are of no file
        assert reopened.original is not None
        assert source.original is not None
        assert reopened.original.format == source.original.format
        assert reopened.origin.layout == source.origin.layout


def test_the_name_of_a_file_is_what_one_expects(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(30, 40)}, tmp_path / "model.ckpt")
    (tmp_path / "folder").mkdir()
    back(tmp_path / "model.ckpt", tmp_path / "folder")
    for typed in ("again", "again.pth"):
        done(ckpt("decompress", tmp_path / "small", tmp_path / typed))
    done(ckpt("decompress", tmp_path / "small", tmp_path / "step", "--to", "torch"))
    done(ckpt("decompress", tmp_path / "small", tmp_path / "weights.safetensors"))
    done(ckpt("decompress", tmp_path / "small", tmp_path / "plain", "--to", "universal"))
    names = {"folder/model.ckpt", "again.ckpt", "again.pth", "step", "weights.safetensors", "plain"}
    assert {str(path.relative_to(tmp_path)) for path in [*tmp_path.iterdir(), *(tmp_path / "folder").iterdir()]} == {
        *{"model.ckpt", "small", "folder"},
        *names,
    }
    for name in names:
        assert contents(open_checkpoint(tmp_path / name)) == contents(open_checkpoint(tmp_path / "model.ckpt"))


def test_checkpoint_goes_through_other_commands_and_back(tmp_path: Path) -> None:
    """Written plain, compressed again: it is known what it was. Once a tensor is missing, it cannot be that."""
    held = FILES["model, optimizer, epoch"]()
    torch.save(held, tmp_path / "file.pt")
    done(ckpt("convert", tmp_path / "file.pt", tmp_path / "plain"))
    done(ckpt("compress", tmp_path / "plain", f"{tmp_path / 'small'}/"))
    done(ckpt("decompress", tmp_path / "small", tmp_path / "again"))
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True), held)
    done(ckpt("convert", tmp_path / "small", tmp_path / "less", "--skip", "^0.weight$"))
    done(ckpt("decompress", tmp_path / "less", tmp_path / "less.pt"))
    assert set(torch.load(tmp_path / "less.pt", weights_only=True)) == {"model", "optimizer", "extras"}


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], int]] = {
    "a call": (
        lambda form: form["tree"].update(x={"$object": {"class": ["os", "system"], "args": ["true"]}}),
        UNSAFE,
    ),
    "a call in an attribute": (
        lambda form: form["views"][0].update(attrs={"a": {"$global": ["builtins", "eval"]}}),
        UNSAFE,
    ),
    "itself": (lambda form: form["views"][0].update(attrs={"a": {"$tensor": "/0"}}), BROKEN),
    "a view of nothing": (lambda form: form["tree"].update(x={"$tensor": "/99"}), BROKEN),
    "a storage of nothing": (lambda form: form["views"][0].update(storage=99), BROKEN),
    "outside": (lambda form: form["views"][0].update(offset=1 << 40), BROKEN),
    "strides": (lambda form: form["views"][0].update(strides=[-1, 1]), BROKEN),
    "strides without end": (lambda form: form["views"][0].update(strides=[1 << 70, 1]), BROKEN),
    "other fields": (lambda form: form["views"][0].update(base="a"), BROKEN),
    "no tree": (lambda form: form.pop("tree"), BROKEN),
}
"""Changes of the form of the original file."""
HOSTILE_FIELDS: dict[str, tuple[Callable[[dict[str, Any]], object], int]] = {
    "a form of text": (lambda original: original.update(form="a"), BROKEN),
    "a form without a checksum": (lambda original: original["form"].pop("checksum"), BROKEN),
    "a form of another checksum": (lambda original: original["form"].update(checksum=f"xxh3-128:{0:032x}"), BROKEN),
    "a form of another length": (lambda original: original["form"].update(nbytes=7), BROKEN),
    "a path": (lambda original: original.update(file="../../model.pt"), BROKEN),
    "no format": (lambda original: original.pop("format"), BROKEN),
}
"""Changes of the field `original` of the manifest."""


@pytest.mark.parametrize("kind", [*HOSTILE, *HOSTILE_FIELDS])
def test_a_hostile_form_is_refused_in_the_right_words(kind: str, tmp_path: Path) -> None:
    torch.save(tied(), tmp_path / "file.pt")
    done(ckpt("compress", tmp_path / "file.pt", f"{tmp_path / 'small'}/"))
    path, file = tmp_path / "small" / manifest.NAME, tmp_path / "small" / original.NAME
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    edit, code = (HOSTILE | HOSTILE_FIELDS)[kind]
    if kind in HOSTILE:
        form = json.loads(file.read_bytes())
        edit(form)
        data = json.dumps(form).encode()
        file.write_bytes(data)
        fields["original"]["form"] = {"nbytes": len(data), "checksum": f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"}
    else:
        edit(fields["original"])
    path.write_bytes(sealed_json.dump(fields))
    ran = ckpt("decompress", tmp_path / "small", tmp_path / "again.pt")
    assert ran.code == code, ran.err
    assert "Traceback" not in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.pt", "small"]


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_form_is_named(damage: str, tmp_path: Path) -> None:
    torch.save(tied(), tmp_path / "file.pt")
    done(ckpt("compress", tmp_path / "file.pt", f"{tmp_path / 'small'}/"))
    file = tmp_path / "small" / original.NAME
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        data[20] ^= 1
        file.write_bytes(data)
    verified = ckpt("verify", tmp_path / "small")
    assert verified.code == BROKEN
    assert original.NAME in verified.out + verified.err
    ran = ckpt("decompress", tmp_path / "small", tmp_path / "again.pt")
    assert ran.code == BROKEN, ran.err
    assert original.NAME in ran.err


def test_a_format_that_is_not_known_any_more_is_no_obstacle(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(30, 40)}, tmp_path / "file.pt")
    done(ckpt("compress", tmp_path / "file.pt", f"{tmp_path / 'small'}/"))
    path = tmp_path / "small" / manifest.NAME
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
    fields["original"] = {"format": "of tomorrow"}
    path.write_bytes(sealed_json.dump(fields))
    done(ckpt("decompress", tmp_path / "small", tmp_path / "again"))
    assert (tmp_path / "again" / manifest.NAME).is_file()


def test_a_file_that_cannot_come_back_as_it_was_says_so(tmp_path: Path) -> None:
    """A tensor and its conjugate are one storage, and only one of them is its values."""
    values = torch.randn(4, dtype=torch.complex64)
    torch.save({"w": values, "conjugate": values.conj()}, tmp_path / "file.pt")
    output = back(tmp_path / "file.pt", tmp_path / "again.pt")
    assert "note: the layout of the original file is unknown" in output
    assert torch.equal(torch.load(tmp_path / "again.pt", weights_only=True)["model"]["w"], values)


def test_checkpoint_with_its_form_comes_back_without_a_note(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "file.pt")
    done(ckpt("convert", tmp_path / "file.pt", tmp_path / "ours.pt", "--to", "torch"))
    assert "note:" not in back(tmp_path / "ours.pt", tmp_path / "again.pt")
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "ours.pt").read_bytes()
