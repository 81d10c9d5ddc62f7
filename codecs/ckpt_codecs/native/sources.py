"""The hash of the C sources: the build stores it in the library, and a checkout compares it with its own sources.

The build hook runs this file before any package is installed, so it imports the standard library only.
"""

import zlib
from pathlib import Path


def find_sources() -> Path | None:
    """Return the folder of the C sources in a checkout; None in an installed package."""
    folder = Path(__file__).resolve().parents[2] / "kernels"
    return folder if (folder / "level.c").is_file() else None


def hash_sources(folder: Path) -> int:
    """Return the CRC-32 of the names and contents of all files that the library is built from.

    Programs that test the kernels, like `fuzz.c`, are not part of the library.
    """
    crc = 0
    for path in sorted(folder.glob("*.[ch]")):
        if not path.name.startswith("fuzz"):
            crc = zlib.crc32(path.read_bytes().replace(b"\r\n", b"\n"), zlib.crc32(path.name.encode(), crc))
    return crc
