"""The version of this program, in one place."""

VERSION = "1.0.0rc2"
WRITTEN_BY = f"ckpt {VERSION}"
