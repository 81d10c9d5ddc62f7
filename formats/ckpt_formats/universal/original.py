"""The form of the file that a checkpoint was read from: JSON in a file of its own, which only `decompress` needs."""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import xxhash

from ckpt_formats.containers.json_checks import FieldReader
from ckpt_formats.containers.safetensors import parse_json
from ckpt_formats.containers.sealed_json import hash_number, hash_text
from ckpt_formats.containers.typed_json import decode, encode
from ckpt_formats.core.checkpoint import OriginalForm
from ckpt_formats.core.claims import MAX_FILE_NAME
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import read_range
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.values import Value
from ckpt_formats.universal.single_file import FileRange

NAME = "original.json"


def dump(original: OriginalForm | None) -> tuple[dict[str, Any] | None, bytes | None]:
    """The field `original` of the manifest, and the bytes of the file with the form; None for what there is not."""
    if original is None:
        return None, None
    fields: dict[str, Any] = {"format": original.format}
    if original.file is not None:
        fields["file"] = original.file
    if original.form is None:
        return fields, None
    fields["form"], data = None, None
    with suppress(
        UnsafeError, UnsupportedError
    ):  # without a form that is too large or too deep, the file cannot be restored as it was
        data = json.dumps(encode(original.form()), separators=(",", ":"), allow_nan=False).encode()
        fields["form"] = {"nbytes": len(data), "checksum": hash_text(xxhash.xxh3_128_intdigest(data))}
    return fields, data


def load(fields: Mapping[str, Any], check: FieldReader, at: FileRange | None) -> OriginalForm | None:
    """The original form by the manifest's field. Its bytes are read when the form is needed. Raises `CorruptError`.

    `at`: where these are, if they are anywhere; with the length -1 for a file of its own.
    """
    if fields.get("original") is None:
        return None
    original = check.mapping(fields, "original")
    file = original.get("file")
    is_valid = file is None or (isinstance(file, str) and _is_file_name(file))
    check.true(is_valid, "original.file is not the name of a file")
    form = None
    if "form" in original:
        seal = _seal(original["form"], check, at)
        form = partial(_form, seal)
    return OriginalForm(check.text(original, "format"), file, form)


def seal(original: OriginalForm | None) -> Seal | None:
    """The checksum of the file with the form, if `load` gave it one."""
    form = None if original is None else original.form
    stated = form.args[0] if isinstance(form, partial) and form.func is _form else None
    return stated if isinstance(stated, Seal) else None


def _seal(stated: Any, check: FieldReader, at: FileRange | None) -> Seal | None:
    if stated is None:
        return None
    check.true(at is not None, "original: the file has no form")
    assert at is not None
    nbytes, checksum = check.of("original").natural(stated, "nbytes"), check.of("original").hash(stated, "checksum")
    check.true(at.nbytes in (-1, nbytes), "original: the length of the form")
    return Seal(at.path, at.offset, nbytes, "xxh3-128", hash_number(checksum), NAME)


def _form(seal: Seal | None) -> Value:
    if seal is None:
        return None
    data = read_range(seal.path, seal.offset, seal.nbytes)
    if xxhash.xxh3_128_intdigest(data) != seal.digest:
        raise CorruptError("the form of the original file does not fit its checksum", where=seal.path)
    return decode(parse_json(data, seal.path, finite=True), seal.path)


def _is_file_name(text: str) -> bool:
    nbytes = len(text.encode("utf-8", "surrogatepass"))
    return 0 < nbytes <= MAX_FILE_NAME and not {"/", "\0"} & set(text) and text not in (".", "..")
