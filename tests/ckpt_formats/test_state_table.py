"""Tables of states: what columns say is what the parameters say, and no parameter is made for it."""

import shutil
from pathlib import Path

import pytest

from ckpt.sizes import state_sizes as sizes
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.state_table import table_of
from ckpt_formats.registry.encoded import uses_codecs
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import read_states
from damage import SAMPLES, ckpt


@pytest.mark.parametrize("sample", ["universal-1-plain", "universal-1-coded", "universal-1-delta"])
def test_the_columns_say_what_the_parameters_say(sample: str) -> None:
    paths = sorted(path.parent for path in (SAMPLES / sample).rglob("manifest.json"))
    assert paths
    for path in paths:
        checkpoint = open_checkpoint(path)
        table = sizes.table(checkpoint)
        computed = table_of(checkpoint.parameters.values(), lambda: False, sizes.stored)
        assert list(table.names) == list(computed.names)
        for name in ("role", "first", "rank", "dims", "fragments", "derived", "elements", "nbytes", "weight"):
            assert getattr(table, name).tolist() == getattr(computed, name).tolist(), name
        for name, of in (("state", "states"), ("dtype", "dtypes"), ("value", "values")):
            own, other = ([getattr(t, of)[n] for n in getattr(t, name).tolist()] for t in (table, computed))
            assert own == other or name == "value", name
        assert table.coding.nbytes.tolist() == computed.coding.nbytes.tolist()
        codecs = [[t.coding.codecs[n] for n in t.coding.codec.tolist()] for t in (table, computed)]
        assert codecs[0] == codecs[1]
        assert table.uses_codecs() == uses_codecs(checkpoint)


def test_no_parameter_is_made_for_plain_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, names = tmp_path / "first", list[str]()
    assert ckpt("convert", SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", source, "--model-only").code == 0
    shutil.copytree(source, tmp_path / "second")
    read = read_states.read_parameter

    def counted(folder: Path, entry: object, parent: Parameter | None = None) -> Parameter:
        names.append(entry.name)  # type: ignore[attr-defined]
        return read(folder, entry, parent)  # type: ignore[arg-type]

    monkeypatch.setattr(read_states, "read_parameter", counted)
    assert ckpt("inspect", source).code == ckpt("inspect", source, "--json").code == 0
    assert ckpt("verify", source).code == 0
    assert ckpt("diff", source, tmp_path / "second").code == 0
    assert names == []

    pack = next((tmp_path / "second" / "packs").iterdir())
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    assert ckpt("verify", tmp_path / "second").code == 20
    assert len(set(names)) == 1
    names.clear()
    assert ckpt("diff", source, tmp_path / "second").code == 1  # although the checksums in both indexes are equal
    assert len(set(names)) == 1
