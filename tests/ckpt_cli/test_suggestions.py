"""Words of other tools lead to what ckpt has: commands, options, formats, types and places."""

from pathlib import Path

import click
import pytest

from ckpt_cli.main import COMMANDS, USAGE, cli
from ckpt_cli.options import suggestions
from ckpt_formats.registry import FORMATS
from damage import NOT_FOUND, SAMPLES, UNSUPPORTED, ckpt

PLAIN = SAMPLES / "universal-1-plain"


def options_of(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {option for one in command.params for option in one.opts if option.startswith("-")}


def test_tables_suggest_only_what_there_is_for_words_that_there_are_not() -> None:
    assert {name for names in suggestions.COMMANDS.values() for name in names} <= COMMANDS.keys()
    assert not suggestions.COMMANDS.keys() & COMMANDS.keys()
    options = set().union(*map(options_of, COMMANDS))
    assert {name for names in suggestions.OPTIONS.values() for name in names} <= options
    assert not suggestions.OPTIONS.keys() & options_of("convert")
    assert set(suggestions.FORMATS.values()) <= FORMATS.keys()
    assert not suggestions.FORMATS.keys() & FORMATS.keys()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("info run", "`ckpt inspect`"),
        ("ls", "`ckpt inspect`"),
        ("show run", "`ckpt inspect`"),
        ("forget run", "`ckpt prune`"),
        ("soup a b", "`ckpt average` or `ckpt merge`"),
        ("convrt a b", "`ckpt convert`"),
        (".", "ckpt inspect ."),
        ("convert a b --no-optimizer", "--drop-optimizer"),
        ("convert a b --gpus 8", "--dp"),
        ("convert a b --format hf", "--to"),
        ("convert a b --bf16", "--dtype"),
        ("reshard a b --stage 3", "Did you mean --zero?"),
        ("stats a --by-layer", "Did you mean --by?"),
        ("convert a b --silent", "--quiet"),
        ("inspect a --josn", "hint: Did you mean --json? "),
        ("convert a b --layout x", "hint: `ckpt convert --help`"),
        ("convert a b --quant q8_0", "Did you mean --quantise? "),
        ("convert a b --num_extract_workers 2", "Did you mean --workers? "),
        ("convert a b --TP 2", "Did you mean --tp? "),
        ("prune run --keep-last 3", "Did you mean --keep? "),
        ("sort run", "hint: `ckpt --help`"),
        ("convert a b --to fsdp", "Did you mean 'dcp'?"),
        ("convert a b --to torchtitan", "Did you mean 'dcp'?"),
        ("convert a b --to huggingface", "Did you mean 'hf'?"),
        ("convert a b --to HF", "Did you mean 'hf'?"),
        ("convert a b --to pytorch", "Did you mean 'torch'?"),
        ("convert SAMPLE b --dtype fp8", "float8_e4m3fn or float8_e5m2"),
        ("convert SAMPLE b --dtype fp8_e4m3fn", "called float8_e4m3fn"),
    ],
)
def test_wrong_words_get_what_was_meant(words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = ckpt(*(str(PLAIN) if word == "SAMPLE" else word for word in words.split()))
    assert done.code == USAGE
    assert says in done.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("inspect gpt2", NOT_FOUND, "hf://ORG/gpt2"),
        ("inspect meta-llama/Llama-3-8B", NOT_FOUND, "hf://meta-llama/Llama-3-8B"),
        ("inspect hf://gpt2", UNSUPPORTED, "hf://ORG/gpt2"),
        ("convert SAMPLE hf://me/model", UNSUPPORTED, "hf upload me/model"),
        ("inspect me@host:/data/run", UNSUPPORTED, "ssh me@host ckpt serve /data/run"),
        ("convert SAMPLE me@host:/data/run", UNSUPPORTED, "rsync"),
    ],
)
def test_places_that_are_not_there_get_what_was_meant(
    words: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ckpt(*(str(PLAIN) if word == "SAMPLE" else word for word in words.split()))
    assert (done.code, says in done.err) == (code, True), done.err
    assert not list(tmp_path.iterdir())


def test_quiet_prints_the_result_and_errors_and_no_notes(tmp_path: Path) -> None:
    run = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    assert "note: " in ckpt("convert", run, tmp_path / "loud.safetensors").err
    done = ckpt("convert", run, tmp_path / "quiet.safetensors", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("wrote ")
    assert "error: " in ckpt("inspect", tmp_path / "gone", "-q").err
