"""Samples of the campaigns with hostile quantised models and files of llama.cpp."""

from pathlib import Path

import pytest

from campaigning import campaign


@pytest.mark.slow
@pytest.mark.parametrize("work", ["quantised_models", "gguf_files"])
def test_hostile_bytes_end_in_values_or_in_an_error_of_ckpt(work: str, tmp_path: Path) -> None:
    seen = campaign(work, 120, tmp_path)
    assert {end.rpartition(": ")[2] for end in seen} >= {"values", "CorruptError", "UnsupportedError"}
