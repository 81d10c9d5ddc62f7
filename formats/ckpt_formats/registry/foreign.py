"""Checkpoints of other frameworks. They are not read; their file names tell what they are, for the error message."""

import re
from collections.abc import Iterable
from pathlib import Path

from ckpt_formats.containers.file_starts import HEAD_NBYTES, PICKLE, SAFETENSORS, TAR, ZIP, is_npz, is_stable_baselines
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.text import printable

_GGUF = "a model of llama.cpp (GGUF)"
_KINDS = (
    (r".*\.h5|.*\.hdf5|.*\.keras", "weights of Keras or TensorFlow (HDF5)"),
    (r".*\.ckpt\.(index|meta)|.*\.data-\d{5}-of-\d{5}|saved_model\.pb|.*\.tflite", "a checkpoint of TensorFlow"),
    (r".*\.gguf", _GGUF),
    (r"ggml-.*\.bin", "weights of llama.cpp (GGML)"),
    (r".*\.onnx|.*\.onnx_data", "a graph of ONNX"),
    (r".*\.npz", "an archive of NumPy"),
    (r".*\.npy", "an array of NumPy"),
    (r".*\.pdparams|.*\.pdopt|.*\.pdmodel", "a checkpoint of PaddlePaddle"),
    (r".*\.nemo", "an archive of NeMo"),
    (r".*\.ot", "weights of rust-bert"),
    (r".*\.mlmodel|.*\.mlpackage", "a model of Core ML"),
    (r".*\.engine|.*\.plan|.*\.trt", "an engine of TensorRT"),
    (r".*\.joblib|.*\.pickle", "a pickle of Python objects"),
    (r".*(?<!\.pt)(?<!\.pth)\.(zip|tar|tgz|gz|bz2|xz|zst|7z)", "an archive"),
)
_HINTS = {
    "an archive of NeMo": "It is a compressed tar archive: unpack it, and name the file of weights in it.",
    "an archive": "Unpack it, and name the folder of the checkpoint.",
    _GGUF: "Name the file: by itself, it is read.",
    "an archive of NumPy": "Name the file: by itself, it is read.",
    "an array of NumPy": "Save the arrays as safetensors: safetensors.numpy.save_file.",
}
_HINT = "Save them there as safetensors, which is read."
_ARCHIVES = "an archive", "an archive of NeMo"
_OF_TORCH = (".tar", ".pickle")


def check_file(path: Path) -> None:
    """Raise an error for a file of another framework: by its content, or by its name if the content tells nothing."""
    head, kind = _head(path), _kind_of(path.name)
    if SAFETENSORS.match(head) or TAR.match(head) or (path.suffix.lower() in _OF_TORCH and PICKLE.match(head)):
        return
    if ZIP.match(head):
        if kind is None or (error := _archive_error(path)) is None:
            return  # `model.pth.tar`, `model.zip` and `model.pickle` are names for files of torch.save, too
        if kind == "an archive of NumPy" or (kind in _ARCHIVES and isinstance(error, UnsupportedError)):
            raise error
    if kind not in _ARCHIVES:
        from ckpt_formats.containers.contents import check_content  # only what is not read needs it

        check_content(head, path)
    if kind is not None and kind != _GGUF:
        raise UnsupportedError(f"{kind}, which is not read", where=printable(str(path)), hint=_HINTS.get(kind, _HINT))


def check_folder(path: Path, names: Iterable[str]) -> None:
    """Raise `UnsupportedError` for a folder with files of other frameworks. Call it if no reader knows the folder."""
    for name in sorted(names):
        if (kind := _kind_of(name)) is not None:
            raise UnsupportedError(
                f"{printable(name)} is {kind}, which is not read",
                where=printable(str(path)),
                hint=_HINTS.get(kind, _HINT),
            )


def _kind_of(name: str) -> str | None:
    return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, name, re.IGNORECASE)), None)


def _archive_error(path: Path) -> CkptError | None:
    """Why a zip archive is none that is read, by its directory; None if it is."""
    from ckpt_formats.containers.torchfile.file_window import Window  # only a file with an unusual name needs them
    from ckpt_formats.containers.torchfile.zip_archive import read_directory, read_members

    try:
        with Window(path) as window:
            names = read_members(window, deflated=True).directory.names
            if not (is_npz(names) or is_stable_baselines(names)):
                read_directory(window)
    except CkptError as error:
        return error
    return None


def _head(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(HEAD_NBYTES)
    except CkptError:
        return b""  # the reader of the file reports the error
