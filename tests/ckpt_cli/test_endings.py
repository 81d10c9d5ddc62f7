"""The target's ending says its format, and a file that is compressed stays a file."""

import json
import shutil
from pathlib import Path

import pytest

from ckpt_formats.containers.safetensors import read_header
from ckpt_formats.registry import FORMATS
from ckpt_formats.registry.endings import ENDINGS, SINGLE_UNIVERSAL
from ckpt_formats.registry.location import detect
from ckpt_formats.universal.single_file import is_single
from damage import SAMPLES, ckpt

ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("ending", [ending for ending in ENDINGS if ending != ".gguf"])  # which holds few models
def test_the_ending_decides(ending: str, here: Path) -> None:
    done = ckpt("convert", ZERO1, f"out{ending}", "--model-only")
    assert done.code == 0, done.err
    assert (here / f"out{ending}").is_file()
    assert detect(here / f"out{ending}").name == ENDINGS[ending]
    assert "ending" not in done.err


@pytest.mark.parametrize("name", ["out", "out.d/", "step-1.5", "out.pt/"])
def test_a_name_without_such_an_ending_is_a_folder(name: str, here: Path) -> None:
    assert ckpt("convert", ZERO1, name).code == 0
    assert (here / name / "manifest.json").is_file()


def test_named_format_wins_over_the_ending_with_a_note(here: Path) -> None:
    done = ckpt("convert", ZERO1, "out.safetensors", "--to", "torch")
    assert done.code == 0
    assert "note: out.safetensors is written in format torch, but its ending is that of format safetensors" in done.err
    assert "ending" not in ckpt("convert", ZERO1, "out.pt", "--to", "torch").err


def test_the_ending_of_what_is_not_written_is_refused(here: Path) -> None:
    done = ckpt("convert", ZERO1, "out.npz", "--json")
    assert json.loads(done.out)["error"]["code"] == done.code == 22
    assert ".npz is the ending of arrays of NumPy" in done.err
    assert list(here.iterdir()) == []


def test_a_file_in_gives_a_file_out(here: Path) -> None:
    ckpt("convert", ZERO1, "a.pt")
    assert "wrote small.ucp: " in ckpt("compress", "a.pt", "small").out
    assert "wrote back.pt: " in ckpt("decompress", "small.ucp", "back").out
    assert ckpt("diff", "a.pt", "back.pt").code == 0
    assert "the target is other.ucp" in ckpt("compress", "a.pt", "other.pt").err
    (here / "into").mkdir()
    assert "wrote into/a.ucp: " in ckpt("compress", "a.pt", "into").out
    ckpt("compress", "a.pt", "folder/")
    assert (here / "folder" / "manifest.json").is_file()
    ckpt("convert", ZERO1, "plain.ucp")
    shutil.rmtree(here / "folder")
    assert "wrote plain2.ucp: " in ckpt("compress", "plain.ucp", "plain2").out


def test_states_are_tensors_of_a_file_of_weights(here: Path) -> None:
    assert ckpt("convert", ZERO1, "a.safetensors", "--with-optimizer").code == 0
    names = read_header(here / "a.safetensors").tensors
    assert {"head.weight", "optimizer.fp32.head.weight", "optimizer.exp_avg.head.weight"} <= names.keys()
    report = json.loads(ckpt("diff", ZERO1, "a.safetensors", "--json").out)
    assert all(tensor["kind"] == "equal" for tensor in report["tensors"])
    assert [value["kind"] for value in report["values"]] == ["extra"]  # groups, steps and roles are the same
    assert ckpt("convert", "a.safetensors", "again.safetensors").code == 0  # as the source
    assert (here / "again.safetensors").read_bytes() == (here / "a.safetensors").read_bytes()
    done = ckpt("convert", ZERO1, "folder", "--to", "safetensors", "--with-optimizer")
    assert (done.code, "single file" in done.err) == (22, True)
    (here / "hf").mkdir()
    shutil.copy(here / "a.safetensors", here / "hf" / "model.safetensors")
    done = ckpt("inspect", "hf")
    assert (done.code, "states of an optimizer" in done.err) == (22, True)


def test_endings_are_those_by_which_files_are_found() -> None:
    for ending, name in ENDINGS.items():
        assert f"*{ending}" in FORMATS[name].marks.files
    assert is_single(Path(f"a{SINGLE_UNIVERSAL}"))


def test_names_are_changed_on_the_way(here: Path) -> None:
    done = ckpt(
        "convert", ZERO1, "a.pt", "--strip-prefix", "blocks.", "--rename", r"norm(\d)=ln\1", "--add-prefix", "m."
    )
    assert done.code == 0, done.err
    assert "m.0.ln1.weight" in {one["name"] for one in json.loads(ckpt("inspect", "a.pt", "--json").out)["parameters"]}
    assert ckpt("reshard", ZERO1, "b", "--dp", 1, "--add-prefix", "module.").code == 0
    assert ckpt("reshard", "b", "c", "--dp", 2, "--strip-prefix", "module.").code == 0
    assert ckpt("diff", ZERO1, "c", "--tensors-only").code == 0
    for wrong in ("norm", "(=x", r"norm=\7"):
        assert ckpt("convert", ZERO1, "d", "--rename", wrong).code == 2
    assert ckpt("convert", ZERO1, "d", "--rename", r"^.*\.=").code == 2  # two with one name
    done = ckpt("convert", "a.pt", "b.pt", "c.pt", "d")
    assert (done.code, "4 paths are given: a.pt, b.pt, c.pt, d" in done.err) == (2, True)


def test_the_library_takes_the_format_from_the_ending_too(here: Path) -> None:
    import ckpt as library

    weights = library.open(ZERO1).weights_only()
    library.save(weights, "a.safetensors")
    library.save(weights, here / "b")
    assert [detect(here / name).name for name in ("a.safetensors", "b")] == ["safetensors", "universal"]
    with pytest.raises(library.UnsupportedError, match=r"\.npz"):
        library.save(weights, "c.npz")


HOSTILE: dict[str, object] = {
    "no object": [],
    "no groups": {"groups": None},
    "a group of an unknown name": {"groups": [{"options": {}, "names": ["gone"]}]},
    "options that are not an object": {"groups": [{"options": 3, "names": []}]},
    "values of an unknown name": {"values": {"gone": {}}},
    "values that are not an object": {"values": {"w": 3}},
    "an unknown role": {"roles": {"w": "king"}},
    "two masters": {"masters": ["w"]},
    "a step that is none": {"step": -1},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_whose_states_do_not_fit_is_damaged(name: str, here: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    import numpy as np

    good: dict[str, object] = {"groups": [], "values": {}, "roles": {}, "masters": [], "step": 1}
    change = HOSTILE[name]
    facts = {**good, **change} if isinstance(change, dict) else change
    arrays = {"w": np.ones(2, np.float32), "optimizer.fp32.w": np.ones(2, np.float32)}
    save_file(arrays, "a.safetensors", metadata={"ckpt.optimizer": json.dumps(facts)})
    refused = ckpt("inspect", "a.safetensors")
    assert refused.code == 20
    assert ("names a parameter that is not in the file" in refused.err) == name.endswith("unknown name")
    save_file(arrays, "b.safetensors", metadata={"ckpt.optimizer": json.dumps(good)})
    assert ckpt("inspect", "b.safetensors").code == 0
    save_file({"optimizer.fp32.x": arrays["w"]}, "c.safetensors", metadata={"ckpt.optimizer": json.dumps(good)})
    assert ckpt("inspect", "c.safetensors").code == 20
