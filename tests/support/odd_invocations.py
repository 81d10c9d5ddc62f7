"""Wrong and odd invocations, and what must be in their messages. `python tests/support/odd_invocations.py` prints all messages.

They are run in a folder that `make_places` fills. A new one is a line here; `tests/ckpt_cli/test_odd_invocations.py` runs
them all. Whoever changes a message reads all of them in one go.
"""
# ruff: noqa: E501 -- a table is read along its lines

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch

sys.path[:0] = [str(Path(__file__).parents[2] / part) for part in (".", "formats", "codecs", "tests/support")]
from damage import SAMPLES, ckpt  # noqa: E402

ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"


class Odd(NamedTuple):
    """An invocation, its exit code, and words of its message."""

    arguments: str
    code: int
    says: tuple[str, ...]


def make_places(folder: Path) -> None:
    """What the invocations speak of."""
    shutil.copytree(ZERO1, folder / "run", ignore=shutil.ignore_patterns("truth.safetensors"))
    shutil.copytree(SAMPLES / "universal-1-delta", folder / "run.chain")
    shutil.copytree(SAMPLES / "damaged", folder / "damaged")
    shutil.copytree(SAMPLES / "dcp-2.13-fsdp2-w2", folder / "fsdp")
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, folder / "a.pt")
    torch.save({"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(2)}, folder / "other.pt")
    torch.save({"x": torch.ones(2)}, folder / "third.pt")
    torch.save({"w": torch.ones(2, 3), "b": torch.ones(2)}, folder / "epoch1.ckpt")
    (folder / "several").mkdir()
    for name in ("epoch1.ckpt", "epoch2.ckpt"):
        shutil.copy(folder / "epoch1.ckpt", folder / "several" / name)
    (folder / "cut.pt").write_bytes((folder / "a.pt").read_bytes()[:300])
    (folder / "notes.txt").write_text("no checkpoint")
    (folder / "config.json").write_text("{}")
    (folder / "empty.pt").touch()
    (folder / "empty.safetensors").touch()
    (folder / "EMPTY").mkdir()
    with zipfile.ZipFile(folder / "weights.npz", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("w.npy", bytes(200))
    (folder / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\1" + bytes(7) + b"\xff" * 40)
    (folder / "model.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    (folder / "model.onnx").write_bytes(b"\x08\x07\x12\x07pytorch" + bytes(64))
    (folder / "x.safetensors").write_text("<!DOCTYPE html><html>404</html>")
    (folder / "lfs.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    (folder / "rules.toml").write_text("[[rule]]\nmatch = 3\n")
    (folder / "link").symlink_to("nowhere")
    ckpt("convert", folder / "a.pt", folder / "u")
    ckpt("compress", folder / "a.pt", folder / "small.ucp")


ODD: dict[str, Odd] = {
    # words of the command line
    "a mistyped command": Odd("convrt a.pt b", 2, ("'convrt'", "ckpt convert")),
    "an unknown command": Odd("banana", 2, ("'banana'", "ckpt --help")),
    "no arguments": Odd("convert", 2, ("CKPT", "ckpt convert --help")),
    "a folder without checkpoints": Odd("latest EMPTY", 10, ("EMPTY", "holds no checkpoint", "Name the folder")),
    "a wrong rule of what to keep": Odd("prune damaged --keep newest:3", 2, ("last:N", "newest:3")),
    "a watch of itself": Odd(
        "watch damaged damaged/copies --once", 2, ("in the folder of the run", "outside of the run")
    ),
    "the root as a target": Odd("clean /", 2, ("the root of the file system",)),
    "the current folder as a target": Odd("convert a.pt .", 30, ("exists already", "--overwrite")),
    "a chain that is not there": Odd("log gone", 10, ("nothing at this path", "ckpt append CHAIN CKPT")),
    "a run that is not there": Odd("prune damage --keep last:1", 10, ("nothing at this path", "Did you mean damaged")),
    "no files of ranks": Odd("index a.pt", 22, ("a.pt", "format torch", "ckpt convert a.pt TARGET --to dcp")),
    "a chain that has a retention": Odd("prune run.chain --keep last:3", 2, ("run.chain", "ckpt compact")),
    "parity of a single file by folders": Odd("protect a.pt --by folder", 2, ("parts of its own", "Leave out --by")),
    "a repair without parity": Odd("repair fsdp", 10, ("has no parity", "ckpt protect")),
    "an average of more than there is": Odd("average run.chain out --last 99", 10, ("not 99", "--last ")),
    "a chain after its checkpoint": Odd(
        "append fsdp run.chain", 2, ("the chain comes first", "ckpt append run.chain fsdp")
    ),
    "nothing to copy": Odd("copy gone x", 10, ("gone",)),
    "no target": Odd("convert a.pt", 2, ("TARGET", "CKPT TARGET")),
    "several sources": Odd("convert a.pt other.pt third.pt out", 2, ("4 paths", "third.pt", "ckpt average")),
    "a mistyped option": Odd("inspect a.pt --josn", 2, ("--josn", "--json")),
    "an option without its value": Odd("convert a.pt out --to", 2, ("--to",)),
    "a shard that is not there": Odd("convert a.pt out --shard 8/8", 2, ("no shard 8 of 8", "from 0 to N-1")),
    "no shards to commit": Odd("commit nowhere", 10, ("no shards have written", "--shard")),
    "an unknown executor": Odd("convert a.pt out --executor slurm://x", 2, ("slurm://x", "dask://HOST:PORT")),
    "an unknown format": Odd("convert a.pt out --to pytorch", 2, ("'pytorch'", "'torch'")),
    "a format that is none": Odd(
        "convert a.pt out --to zip", 2, ("'zip'", "that ckpt writes. There are: universal, deep")
    ),
    "a format that is only read": Odd(
        "convert a.pt out --to chain", 22, ("chain can be read, not written", "ckpt append")
    ),
    "an option of another format": Odd("convert a.pt out.pt --tp 2", 2, ("format torch has no option --tp",)),
    "a type that is none": Odd("convert a.pt out --dtype banana", 2, ("'banana'", "bf16")),
    "a type of integers": Odd("convert a.pt out --dtype int8", 2, ("'int8'", "bf16")),
    "a size that is none": Odd("convert a.pt out --memory lots", 2, ("'lots'", "512M")),
    "a number of ranks below one": Odd("reshard run out --dp 0", 2, ("--dp", "1<=x")),
    "a number that is none": Odd("reshard run out --dp two", 2, ("--dp", "'two'")),
    "a pattern that is none": Odd("convert a.pt out --only (", 2, ("--only", "not a regular expression")),
    "a pattern that takes for ever": Odd("convert a.pt out --only (a+)+$", 21, ("(a+)+$", "too long")),
    "a pattern that fits nothing": Odd("convert a.pt out --only decoder", 10, ("`decoder`", "ckpt inspect")),
    "a prefix that fits nothing": Odd("convert a.pt out --strip-prefix module.", 10, ("`module.`", "--strip-prefix")),
    "a renaming without =": Odd("convert a.pt out --rename module", 2, ("PATTERN=NEW",)),
    "a renaming onto one name": Odd("convert a.pt out --rename .=w", 2, ("w and b would both become w",)),
    "a pipe as source": Odd("convert - out", 2, ("a pipe cannot be used",)),
    "a pipe as target": Odd("convert a.pt -", 2, ("a pipe cannot be used",)),
    "weights for other sources": Odd("average a.pt a.pt out --weights 1,2,3", 2, ("3 numbers for 2",)),
    "a decay of one": Odd("average a.pt a.pt out --ema 1", 2, ("--ema",)),
    "an average of one": Odd("average a.pt out", 2, ("several",)),
    "a duration that is none": Odd("plan --step fast --mtbf 3h", 2, ("'fast'", "40ms")),
    "a plan without failures": Odd("plan --step 1s", 2, ("--mtbf",)),
    "an unknown shell": Odd("completion tcsh", 2, ("'tcsh'", "bash")),
    "a model of no known family": Odd("check a.pt --like config.json", 22, ("model_type", "ckpt formats --families")),
    "a tensor with another name": Odd("extract a.pt v", 10, ("no tensor is called `v`", "ckpt inspect")),
    "figures in two forms": Odd("stats a.pt --csv --json", 2, ("--csv", "--json")),
    "options that contradict": Odd("verify run.chain --quick --replay", 2, ("--quick", "--replay")),
    "a page in a store": Odd("inspect a.pt --html s3://bucket/a.html", 22, ("--html", "s3://bucket/a.html", "upload")),
    "figures in a store": Odd("diff a.pt a.pt --csv s3://bucket/a.csv", 22, ("--csv", "s3://bucket/a.csv", "upload")),
    "a tensor in a store": Odd("extract a.pt w s3://bucket/w.npy", 22, ("TARGET", "s3://bucket/w.npy", "upload")),
    "rules in a store": Odd(
        "inspect a.pt --rules s3://bucket/r.toml", 22, ("--rules", "s3://bucket/r.toml", "Copy it")
    ),
    "a configuration without a name": Odd("convert a.pt out --to hf --config=", 2, ("--config", "the path is empty")),
    "rules without a name": Odd("inspect a.pt --rules=", 2, ("--rules", "the path is empty")),
    "an order in a store with a place": Odd("inspect a.pt --param-order s3://b/x=o.txt", 22, ("s3://b/x=o.txt",)),
    "an order in a store": Odd("inspect a.pt --param-order x=s3://b/o.txt", 22, ("--param-order", "s3://b/o.txt")),
    "a followed chain in a store": Odd("follow run.chain s3://bucket/x", 22, ("TARGET", "s3://bucket/x", "local path")),
    # what is not there, or is no checkpoint
    "nothing there": Odd("inspect gone", 10, ("gone", "nothing at this path")),
    "a mistyped name": Odd("inspect fsdpp", 10, ("fsdpp", "fsdp")),
    "a link to nothing": Odd("inspect link", 10, ("link",)),
    "a text file": Odd("inspect notes.txt", 10, ("notes.txt", "ckpt formats")),
    "an empty file": Odd("inspect empty.pt", 20, ("empty.pt", "empty")),
    "an empty file of safetensors": Odd("inspect empty.safetensors", 20, ("the file is empty", "download it again")),
    "a watch of a file": Odd("watch a.pt copies --once", 10, ("is a file", "Name the folder")),
    "a URL without its second slash": Odd("inspect s3:/bucket/a.pt", 22, ("a slash is missing", "s3://bucket/a.pt")),
    "an empty folder": Odd("inspect EMPTY", 10, ("EMPTY", "it is empty")),
    "a configuration": Odd("inspect config.json", 10, ("config.json",)),
    "arrays of NumPy": Odd("inspect weights.npz", 22, ("weights.npz", "NumPy", "savez_compressed")),
    "a GGUF file": Odd("inspect model.gguf", 20, ("model.gguf", "the header needs", "copy")),
    "an HDF5 file": Odd("inspect model.h5", 22, ("model.h5", "HDF5")),
    "an ONNX file": Odd("inspect model.onnx", 22, ("model.onnx", "ONNX")),
    "a page in place of a file": Odd("inspect x.safetensors", 20, ("x.safetensors", "HTML")),
    "a pointer of Git LFS": Odd("inspect lfs.safetensors", 20, ("lfs.safetensors", "git lfs pull")),
    "several models in a folder": Odd("verify several", 10, ("epoch1.ckpt", "epoch2.ckpt", "Name one")),
    "one file of a rank": Odd(
        "inspect run/global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        22,
        ("one of several files", "folder"),
    ),
    "a part of DCP": Odd("inspect fsdp/__0_0.distcp", 10, ("fsdp", "folder")),
    "a step that a chain lacks": Odd("inspect run.chain@99", 10, ("99", "ckpt log")),
    "too far before the last": Odd("inspect run.chain@last~50", 10, ("run.chain", "ckpt log")),
    "a step of what is no chain": Odd("inspect run@5", 10, ("run@5", "is not a chain")),
    "an address that is none": Odd("inspect run.chain@newest", 10, ("called newest", "@last")),
    "a log of what is no chain": Odd("log run", 10, ("not a chain", "ckpt append")),
    "a store without a bucket": Odd("inspect s3://", 22, ("s3://BUCKET/KEY",)),
    "an unknown store": Odd("inspect ftp://host/a.pt", 22, ("ftp://host/a.pt", "s3://BUCKET/KEY")),
    # damage
    "a file that was cut off": Odd("verify cut.pt", 20, ("cut.pt", "truncated")),
    "a missing rank": Odd(
        "convert damaged/missing-rank out", 20, ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is missing",)
    ),
    "mixed steps": Odd("convert damaged/mixed-steps out", 20, ("`step`", "mixed")),
    "a pointer to nothing": Odd("inspect damaged/wrong-latest", 10, ("latest", "global_step9")),
    # targets
    "a target that exists": Odd("convert a.pt u", 30, ("u", "exists already")),
    "a target that is the source": Odd("convert a.pt a.pt", 30, ("a.pt", "exists already")),
    "a target in no folder": Odd("convert a.pt no/where/out", 30, ("no/where", "does not exist")),
    "a tensor in no folder": Odd("extract a.pt w no/w.npy", 30, ("where: no\n", "does not exist", "Create it first")),
    "a table in no folder": Odd("diff a.pt third.pt --csv no/w.csv", 30, ("where: no\n", "Create it first")),
    "a target within the source": Odd("convert run run/out", 30, ("inside the source",)),
    "a target of another kind": Odd("convert a.pt out.onnx", 22, (".onnx", "--to")),
    "states in a folder of weights": Odd(
        "convert run out --to safetensors --with-optimizer", 22, ("single file", ".safetensors")
    ),
    "tensor parallelism without rules": Odd("reshard run out --tp 2", 23, ("rule", "--rules")),
    "rules that are none": Odd("inspect a.pt --rules rules.toml", 23, ("rules.toml", "match")),
    # several checkpoints
    "a diff of other models": Odd("diff a.pt third.pt", 1, ("different",)),
    "a merge without its base": Odd("merge a.pt a.pt out --method ties --density 0.2", 2, ("ties needs the base",)),
    "a merge without its share": Odd("merge a.pt out --method ties --base a.pt", 2, ("needs density",)),
    "an arc of three": Odd("merge a.pt a.pt a.pt out --method slerp --t 0.5", 2, ("two models, not 3",)),
    "a share above one": Odd("merge a.pt out --method ties --base a.pt --density 2", 2, ("above 0 and at most 1",)),
    "no setting": Odd("merge a.pt a.pt out --method slerp --t 1 --where w t:1", 2, ("'t:1' is not a setting",)),
    "an average of other shapes": Odd("average a.pt other.pt out", 22, ("[3, 2] instead of [2, 3]",)),
    "an average of other models": Odd("average a.pt third.pt out", 20, ("lacks", "third.pt")),
    "an adapter without tensors": Odd("merge-lora a.pt adapter out", 20, ("adapter", "adapter_model")),
    "a model as an adapter": Odd("merge-lora a.pt other.pt out", 10, ("other.pt", "adapter_config.json")),
    "a delta against a file of torch": Odd("diff a.pt epoch1.ckpt -o out", 22, ("a.pt", "ckpt compress")),
    "an earlier step at the end of a chain": Odd("append run.chain run.chain@12", 22, ("12", "16")),
    "steps published into a chain of checkpoints": Odd(
        "publish a.pt run.chain --names as-is --step 3", 22, ("append",)
    ),
    "a chain that is not published is followed": Odd("follow run.chain served --once", 10, ("--once",)),
    "names that are not known": Odd("publish a.pt new.chain --step 3", 22, ("--config", "--names as-is")),
    "a chain of another model": Odd("append run.chain a.pt", 22, ("--step",)),
    "a state where a chain must be": Odd("compact u --keep last:1", 10, ("not a chain", "ckpt append")),
}


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        make_places(Path(folder))
        os.chdir(folder)
        for name, odd in ODD.items():
            done = ckpt(*odd.arguments.split())
            mark = (
                ""
                if done.code == odd.code and all(words in done.err + done.out for words in odd.says)
                else "   <-- NOT AS STATED"
            )
            print(f"--- {name}{mark}\n$ ckpt {odd.arguments}      [{done.code}]\n{done.out}{done.err}")


if __name__ == "__main__":
    main()
