"""`--html` of `inspect` and `log`: what `--json` says, on pages that need nothing else and obey no name."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest

import page_samples as samples
from damage import OUTPUT, SAMPLES, ckpt
from pages import Page

RECORDED = SAMPLES / "recorded-1" / "run.chain"
CHECKPOINTS = ("deepspeed-0.19-zero3-bf16-dp4-tied-frozen", "dcp-2.13-fsdp2-w2", "megatron-0.16-tp2-pp2-dist")


def page(command: str, source: Path, folder: Path) -> Page:
    done = ckpt(command, source, "--html", folder / "page.html")
    assert done.code == 0, done.err
    return Page((folder / "page.html").read_text("ascii"))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages of names of strangers."""
    chain = tmp_path_factory.mktemp("log") / "run.chain"
    texts = {
        "inspect": samples.inspect(samples.model(2, 4, 0, samples.NAMES)),
        "run": samples.run(),
        "log": samples.log(chain, RECORDED),
    }
    for text in texts.values():
        text.encode("ascii")
    return {name: Page(text) for name, text in texts.items()}


@pytest.mark.parametrize("sample", CHECKPOINTS)
def test_the_page_of_a_checkpoint_has_all_that_json_has(sample: str, tmp_path: Path) -> None:
    facts = page("inspect", SAMPLES / sample, tmp_path).facts()
    fields = json.loads(ckpt("inspect", SAMPLES / sample, "--json").out)
    origin = fields["origin"]
    assert {key: facts[key] for key in ("engine", "version", "step")} == {
        key: origin[key] for key in facts if key in origin and key != "layout"
    }
    assert (facts["path"], facts["format"]) == (fields["path"], fields["format"])
    assert len(facts["groups"]) == len(fields["groups"])
    assert dict(facts["aliases"]) == fields["aliases"]
    assert [(one["file"], one["nbytes"]) for one in facts["files"]] == [
        (Path(one["file"]).name, one["nbytes"]) for one in fields["files"]
    ]
    for (name, form, _, blocks), expected in zip(facts["tensors"], fields["parameters"], strict=True):
        own = facts["forms"][form]
        assert (name, own["role"]) == (expected["name"], expected["role"])
        assert blocks == max(state["blocks"] for state in expected["states"].values())
        assert [(one["state"], one["dtype"], one["shape"], one["nbytes"]) for one in own["states"]] == [
            (state, one["dtype"], one["shape"], one["nbytes"]) for state, one in expected["states"].items()
        ]
        assert own["states"][own["weight"]]["state"] in ("model", "master", *list(expected["states"])[:1])
    total = sum(prod(one["shape"]) for parameter in fields["parameters"] for one in parameter["states"].values())
    assert sum(row["elements"] for row in facts["sizes"]) == total
    assert len(facts["forms"]) < len(facts["tensors"]) or len(facts["tensors"]) < 10


def test_the_page_of_a_chain_says_what_json_says(tmp_path: Path) -> None:
    facts = page("log", RECORDED, tmp_path).facts()
    fields = json.loads(ckpt("log", RECORDED, "--json").out)
    del fields["notes"]
    assert facts == {"chain": str(RECORDED), **fields}
    assert len(facts["segments"]) == 2


@pytest.mark.parametrize("name", ["inspect", "run", "log"])
def test_pages_need_nothing_else_and_only_their_own_script_may_run(name: str, hostile: dict[str, Page]) -> None:
    parsed = hostile[name]
    links = [a[k] for _, a in parsed.elements for k in ("src", "href", "action", "data", "srcset") if k in a]
    assert links
    assert all(link and link.startswith("#") for link in links)
    assert not any(key.startswith("on") or key == "style" for _, a in parsed.elements for key in a)
    data, script = parsed.texts("script")
    assert not set("<>&") & set(data)
    (style,) = parsed.texts("style")
    assert "@import" not in style
    assert set(re.findall(r"https?://[^\"'\s]+", script + style)) == {"http://www.w3.org/2000/svg"}
    (policy,) = (str(a["content"]) for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    allowed = {part.split()[0]: part.split()[1:] for part in policy.split(";")}
    assert allowed["default-src"] == ["'none'"]
    for kind, text in (("script-src", script), ("style-src", style)):
        assert allowed[kind] == [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "XMLHttpRequest"):
        assert way not in script
    ids = {a["id"] for _, a in parsed.elements if "id" in a}
    assert set(re.findall(r'by\("([\w-]+)"\)', script)) <= ids
    assert {a["aria-labelledby"] for _, a in parsed.elements if "aria-labelledby" in a} <= ids


def test_the_page_of_a_run_has_all_that_json_has(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (5, 10):  # the files of the second one are of another step than its name says
        shutil.copytree(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2" / "global_step5", run / f"global_step{step}")
    fields = json.loads(ckpt("inspect", run, "--json").out)
    assert [one["whole"] for one in fields["checkpoints"]] == [True, False]
    del fields["notes"]
    assert page("inspect", run, tmp_path).facts() == fields
    target = tmp_path / "several.html"
    several = ckpt("inspect", *(run / f"global_step{step}" for step in (5, 10)), "--json", "--html", target)
    report = json.loads(several.out)
    del report["notes"]
    assert Page(target.read_text("ascii")).facts() == report
    assert (report["kind"], [one["name"] for one in report["checkpoints"]]) == (
        "several",
        [str(run / f"global_step{step}") for step in (5, 10)],
    )


@pytest.mark.parametrize(("command", "source"), [("inspect", SAMPLES / CHECKPOINTS[0]), ("log", RECORDED)])
def test_a_page_takes_the_place_of_a_page_of_its_command_only(command: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    for _ in range(2):
        page(command, source, tmp_path)
    target.write_text("<!doctype html>\n<!-- Made by ckpt diff. -->\n")
    done = ckpt(command, source, "--html", target)
    assert done.code == OUTPUT
    assert f"not a page of `ckpt {command}`" in done.err
    assert ckpt(command, source, "--html", tmp_path / "none" / "page.html").code == OUTPUT


def test_equal_checkpoints_give_equal_pages() -> None:
    first, second = (samples.inspect(samples.model(1, 4)) for _ in range(2))
    assert first == second


TEMPLATES = """
import sys
from ckpt_cli.main import run
for arguments in (["inspect", sys.argv[1]], ["inspect", sys.argv[1], "--html", sys.argv[2]]):
    sys.argv[1:], kept = arguments, sys.argv[1:]
    try:
        run()
    except SystemExit as end:
        assert not end.code, end.code
    sys.argv[1:] = kept
    print("jinja2" in sys.modules, file=sys.stderr)
"""


def test_templates_are_imported_only_where_a_page_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TEMPLATES, str(SAMPLES / CHECKPOINTS[1]), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line in ("True", "False")] == ["False", "True"]
