"""The identity of the C sources: the build stores it in the library, and a checkout compares it.

The build hook runs this file before any package is there, so it imports nothing of ckpt's and nothing installed.
"""

import zlib
from pathlib import Path


def find_sources() -> Path | None:
    """The folder of the C sources if this is a checkout; an installed package has none."""
    folder = Path(__file__).resolve().parents[2] / "kernels"
    return folder if (folder / "level.c").is_file() else None


def hash_sources(folder: Path) -> int:
    """CRC-32 of the names and contents of all files that the library is built from.

    Programs that try the kernels, like `fuzz.c`, are no part of the library.
    """
    crc = 0
    for path in sorted(folder.glob("*.[ch]")):
        if not path.name.startswith("fuzz"):
            crc = zlib.crc32(path.read_bytes().replace(b"\r\n", b"\n"), zlib.crc32(path.name.encode(), crc))
    return crc
