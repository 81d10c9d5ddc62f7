"""`ckpt diff --html`: one page that needs nothing else, says what `--json` says, and obeys no name."""

import base64
import hashlib
import json
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.registry import writable
from damage import NOT_FOUND, OUTPUT, SAMPLES, ckpt
from held import checkpoint, everything, parameter
from pages import Page

NAMES = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><!-- {{facts}} {{script}}",
    "layers.0.\u202etxet",
    "layers.1.a\nb\x1b[31m&amp;",
    "\u2028'`${x}`",
]


def written(source: Checkpoint, target: Path) -> Path:
    save(source, target, writable("torch"))
    return target


def page(folder: Path, first: Path, second: Path, *options: object, code: int = 1) -> str:
    done = ckpt("diff", first, second, "--html", folder / "diff.html", *options)
    assert done.code == code, done.err
    assert f"page: {folder / 'diff.html'}" in done.err.splitlines()
    return (folder / "diff.html").read_text("ascii")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints that differ in every way that there is, under names of strangers."""
    folder, rng = tmp_path_factory.mktemp("pair"), np.random.default_rng(0)
    values = {name: rng.normal(size=(5, 4)).astype(np.float32) for name in NAMES}
    ours = [parameter(name, {"model": v, "exp_avg": v + 1}, step=1) for name, v in values.items()]
    theirs = [parameter(name, {"model": v * 1.5, "exp_avg": v + 1}, step=2) for name, v in values.items()]
    ours.append(parameter("gone.0.w", {"model": values[NAMES[0]]}))
    theirs.append(parameter("new.0.w", {"model": values[NAMES[0]]}))
    ours.append(parameter("other", {"model": np.zeros(3, np.float32)}))
    theirs.append(parameter("other", {"model": np.zeros(4, np.float32)}))
    extras = {"<b>epoch</b>": 1, "note": "</script><script>alert(3)</script>"}
    first, second = checkpoint(ours, extras=extras), checkpoint(theirs, extras={**extras, "<b>epoch</b>": "<i>2</i>"})
    return written(first, folder / "a.pt"), written(second, folder / "b.pt")


def test_the_page_says_what_json_says(pair: tuple[Path, Path], tmp_path: Path) -> None:
    facts = Page(page(tmp_path, *pair)).facts()
    report = json.loads(ckpt("diff", *pair, "--json").out)
    assert {pair["kind"] for pair in report["tensors"]} == {"equal", "changed", "missing", "added", "reshaped"}
    for row in report["tensors"]:
        del row["histogram"]
    report["values"] = [value["text"] for value in report["values"]]
    assert report.pop("notes") == []  # the page does not have them: they are printed when it is written
    assert {key: facts[key] for key in report} == report
    for name, by in {"cells": ["layer", "role", "state"], "roles": ["role", "state"], "states": ["state"]}.items():
        options = [word for how in by for word in ("--by", how)]
        assert facts[name] == json.loads(ckpt("diff", *pair, "--json", *options).out)["groups"]


def test_the_page_needs_nothing_else(pair: tuple[Path, Path], tmp_path: Path) -> None:
    text = page(tmp_path, *pair)
    parsed = Page(text)
    links = [a[k] for _, a in parsed.elements for k in ("src", "href", "action", "data", "srcset") if k in a]
    assert all(link and link.startswith("#") for link in links)
    assert not any(key.startswith("on") or key == "style" for _, a in parsed.elements for key in a)
    assert set(re.findall(r"https?://[^\"'\s]+", re.sub(r"<script type=.*?</script>", "", text, flags=re.DOTALL))) == {
        "http://www.w3.org/2000/svg"  # the name of a namespace
    }
    assert "@import" not in text


def test_page_of_diff_runs_its_own_script_and_style_only(pair: tuple[Path, Path], tmp_path: Path) -> None:
    parsed = Page(page(tmp_path, *pair))
    (policy,) = (str(a["content"]) for _, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    _, script = parsed.texts("script")
    (style,) = parsed.texts("style")
    allowed = {part.split()[0]: part.split()[1:] for part in policy.split(";")}
    assert allowed["default-src"] == ["'none'"]
    for kind, content in (("script-src", script), ("style-src", style)):
        assert allowed[kind] == [f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"]


def test_names_are_text_whatever_they_are(pair: tuple[Path, Path], tmp_path: Path) -> None:
    parsed = Page(page(tmp_path, *pair))
    assert len(parsed.texts("script")) == 2
    assert {row["name"] for row in parsed.facts()["tensors"]} >= set(NAMES)
    (data,) = (text for text in parsed.texts("script")[:1])
    assert not set("<>&") & set(data)


def test_the_script_makes_text_and_never_markup(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, script = Page(page(tmp_path, *pair)).texts("script")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "setTimeout(\"",
                "fetch(", "XMLHttpRequest", "import(", "</script"):  # fmt: skip
        assert way not in script, way


def test_the_script_finds_what_it_asks_for(pair: tuple[Path, Path], tmp_path: Path) -> None:
    parsed = Page(page(tmp_path, *pair))
    ids, (_, script) = {a["id"] for _, a in parsed.elements if "id" in a}, parsed.texts("script")
    assert set(re.findall(r'by\("([\w-]+)"\)', script)) <= ids
    assert {a["aria-labelledby"] for _, a in parsed.elements if "aria-labelledby" in a} <= ids


def test_the_same_checkpoints_make_the_same_page(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert page(tmp_path, *pair, "--workers", 1) == page(tmp_path, *pair, "--workers", 4)


def test_checkpoints_of_other_formats_and_nothing_to_compare(tmp_path: Path) -> None:
    facts = Page(page(tmp_path, SAMPLES / "dcp-2.13-fsdp2-w2", next(SAMPLES.glob("deepspeed-*-zero1-*")))).facts()
    assert facts["formats"] == ["dcp", "deepspeed"]
    one = written(checkpoint([parameter("a", {"model": np.ones(2, np.float32)})]), tmp_path / "a.pt")
    other = written(checkpoint([parameter("b", {"model": np.ones(2, np.float32)})]), tmp_path / "b.pt")
    assert Page(page(tmp_path, one, other)).facts()["cells"] == []
    assert Page(page(tmp_path, one, one, code=0)).facts()["same"]


def test_a_difference_too_large_for_a_number_is_null_in_the_page(tmp_path: Path) -> None:
    top = np.array([np.finfo(np.float64).max])
    one, other = (
        written(checkpoint([parameter("w.0.v", {"model": v})]), tmp_path / f"{i}.pt") for i, v in enumerate((top, -top))
    )
    (row,) = Page(page(tmp_path, one, other)).facts()["cells"]
    assert (row["max"], row["histogram"]) == (None, {"lowest": 1024, "counts": [1]})


def test_approximate_states_are_counted(pair: tuple[Path, Path]) -> None:
    from ckpt.compare import compare, pair_tensors
    from ckpt_cli.views.diff import page_of

    source = everything()
    lossy = replace(source, path=pair[1], errors={("layers.0.w", "master"): {"largest": 1e-3}})
    exact = replace(source, path=pair[0])
    facts = Page(page_of(exact, lossy, compare(pair_tensors(exact, lossy), Execution()))).facts()
    assert facts["approximate"] == [0, 1]


def test_a_page_takes_the_place_of_a_page_and_of_nothing_else(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first = page(tmp_path, *pair)
    assert page(tmp_path, *pair, "--state", "model") != first
    for name, make in (("model.pt", lambda p: p.write_text("precious")), ("folder", lambda p: p.mkdir())):
        make(tmp_path / name)
        done = ckpt("diff", *pair, "--html", tmp_path / name)
        assert done.code in (2, OUTPUT), done.err
    assert (tmp_path / "model.pt").read_text() == "precious"
    dangling = tmp_path / "link.html"
    dangling.symlink_to(tmp_path / "nowhere")
    assert ckpt("diff", *pair, "--html", dangling).code == OUTPUT
    assert ckpt("diff", *pair, "--html", tmp_path / "no" / "folder.html").code == OUTPUT
    assert ckpt("diff", pair[0], tmp_path / "none", "--html", tmp_path / "none.html").code == NOT_FOUND
    assert not (tmp_path / "none.html").exists()


def test_a_page_that_does_not_fit_leaves_the_one_before(pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = page(tmp_path, *pair)
    with files_of_at_most(10_000):
        done = ckpt("diff", *pair, "--html", tmp_path / "diff.html", "--state", "model")
    assert done.code == OUTPUT, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["diff.html"]
    assert (tmp_path / "diff.html").read_text("ascii") == before


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Within, no longer file can be written by this process."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
