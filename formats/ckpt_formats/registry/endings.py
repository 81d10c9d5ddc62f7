"""The format that the ending of a target says, such as `.safetensors`."""

from pathlib import Path

from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.registry import FORMATS

ENDINGS = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
    ".ucp": "universal",
    ".msgpack": "flax",
    ".gguf": "gguf",
}
"""Formats by the ending of a single file."""
SINGLE_UNIVERSAL = ".ucp"
"""By its ending, a single file of the universal format is known."""
_SIMILAR = 0.8
"""How much of two endings is the same if one is probably a typing error of the other."""
_OF_OTHERS = {
    ".npz": "arrays of NumPy",
    ".npy": "an array of NumPy",
    ".h5": "HDF5",
    ".hdf5": "HDF5",
    ".keras": "Keras",
    ".ggml": "llama.cpp's GGML",
    ".onnx": "ONNX",
    ".pb": "TensorFlow",
    ".tflite": "TensorFlow Lite",
    ".mlmodel": "Core ML",
    ".pkl": "pickles",
    ".pickle": "pickles",
    ".tar": "archives",
    ".gz": "archives",
    ".zip": "archives",
    ".zst": "archives",
    ".csv": "tables",
    ".tsv": "tables",
    ".parquet": "tables",
    ".arrow": "tables",
    ".json": "text",
    ".jsonl": "text",
    ".yaml": "text",
    ".yml": "text",
    ".toml": "text",
    ".xml": "text",
    ".txt": "text",
    ".log": "text",
    ".md": "text",
    ".html": "pages",
    ".py": "programs",
    ".sh": "programs",
}
"""What files of other endings hold, which ckpt does not write."""


def format_of_ending(target: Path) -> str | None:
    """The format that the target's ending says; None if it says none: then the target is a folder.

    Raises `UnsupportedError` for the ending of a format that ckpt does not write, `InvalidArgumentError` for an ending
    that is like a known one.
    """
    ending = target.suffix.lower()
    if ending in _OF_OTHERS:
        raise UnsupportedError(
            f"{ending} is the ending of {_OF_OTHERS[ending]}, which ckpt does not write",
            where=printable(str(target)),
            hint=f"Known endings: {', '.join(ENDINGS)}; a name without one is a folder. --to names a format.",
        )
    if ending and ending not in ENDINGS and (meant := _similar(ending)):
        raise InvalidArgumentError(
            f"{printable(ending)} is not the ending of a format; did you mean {meant}?",
            where=printable(str(target)),
            hint=f"Write {printable(target.stem)}{meant}, or name the format: --to universal writes a folder.",
        )
    return ENDINGS.get(ending)


def _similar(ending: str) -> str | None:
    """The known ending that was probably meant."""
    from difflib import get_close_matches  # only endings that are not known need it

    close = get_close_matches(ending, ENDINGS, 1, _SIMILAR)
    return close[0] if close else None


def notices_of_content(source: Path, format_name: str) -> tuple[Notice, ...]:
    """A notice if a single file is by its content of another format than its ending says."""
    expected = ENDINGS.get(source.suffix.lower())
    if expected == format_name or not (_has_start(format_name) and _has_start(expected)):
        return ()
    from ckpt_formats.containers.contents import other_ending  # only few files need it

    return (other_ending(source, format_name),)


def _has_start(format_name: str | None) -> bool:
    """Whether files of a format are known by their first bytes, whatever their ending."""
    return format_name in FORMATS and FORMATS[format_name].marks.starts is not None


def notices_of_ending(target: Path, format_name: str) -> tuple[Notice, ...]:
    """A notice if the target's ending is that of another format than the one in which it is written."""
    expected = ENDINGS.get(target.suffix.lower())
    if expected is None or expected == format_name:
        return ()
    text = (
        f"{printable(target.name)} is written in format {format_name}, but its ending is that of format {expected}, "
        "by which programs know a file"
    )
    return (Notice(text, weight=Weight.UNSURE),)
