"""Look-ups in JSON of files: what is missing or of another type is refused with its name."""

from pathlib import Path

import pytest

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.core.errors import CorruptError

FIELDS = FieldReader(Path("run/manifest.json"))


@pytest.mark.parametrize("fields", [{}, {"b": 1}, None, [], "a"])
def test_get_names_a_key_that_is_missing(fields: object) -> None:
    with pytest.raises(CorruptError, match="the manifest is not valid: a is missing") as refused:
        FIELDS.get(fields, "a")
    assert str(refused.value.where) == "run/manifest.json"
    assert FIELDS.get({"a": None}, "a") is None


@pytest.mark.parametrize("items", [["a", 1], [None], [["a"]], [b"a"]])
def test_texts_refuses_what_is_no_text(items: list[object]) -> None:
    with pytest.raises(CorruptError, match="names are not all texts"):
        FIELDS.texts(items, "names")
    assert FIELDS.texts(iter(["a", ""]), "names") == ("a", "")
