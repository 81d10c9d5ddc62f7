"""The version of this program, in one place."""

VERSION = "0.8.0"
WRITTEN_BY = f"ckpt {VERSION}"
