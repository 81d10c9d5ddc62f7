"""What objects show in a notebook, and in the kernel of a real one."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.chains.notebook import of_chain
from ckpt_formats.core.notebook import table, text
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from held import checkpoint, parameter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "library.md"
NAMES = ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a\u202eb\x1b[31m", "x" * 10_000, "", "ש.w"]


class Elements(HTMLParser):
    """The elements of a piece of HTML with their attributes, and its text. Each is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[tuple[str, str]] = set()
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {(tag, key) for key, _ in attrs} | {(tag, "")}
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


SAFE = {"div", "p", "strong", "br", "table", "caption", "thead", "tbody", "tr", "th", "td", "details", "summary"}


def pair(folder: Path) -> tuple[ckpt.Checkpoint, ckpt.Checkpoint]:
    """Two checkpoints under names of strangers that differ, and of which each has a parameter that the other lacks."""
    both = []
    for step, other in ((1, "only.first"), (2, "only.second")):
        values = {name: np.full((5, 4), i + step, np.float32) for i, name in enumerate([*NAMES, other])}
        saved = checkpoint(
            [parameter(name, {"model": v, "exp_avg": v}) for name, v in values.items()], extras={"n": step}
        )
        ckpt.save(saved, folder / f"{step}.pt", ckpt.Torch())
        both.append(ckpt.open(folder / f"{step}.pt"))
    return both[0], both[1]


def shown(html: str) -> str:
    """The text of a piece of HTML, which has none but harmless elements, attributes and characters."""
    elements = Elements(html)
    assert {tag for tag, _ in elements.attributes} <= SAFE
    assert {key for _, key in elements.attributes} <= {"", "style", "scope"}
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert len(html) < 20_000
    return elements.text


def test_a_checkpoint_shows_what_it_is_with_names_as_text(tmp_path: Path) -> None:
    first, _ = pair(tmp_path)
    page = shown(first._repr_html_())
    assert "1.pt" in page
    assert "exp_avg" in page
    assert "<script>alert(1)</script>" in page
    assert "140 elements" in page


def test_a_parameter_shows_its_states(tmp_path: Path) -> None:
    first, _ = pair(tmp_path)
    for name in NAMES:
        assert "float32[5, 4]80 B1" in shown(first[name]._repr_html_())


def test_a_diff_shows_the_verdict_and_the_most_changed(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    page = shown(ckpt.diff(first, second)._repr_html_())
    assert "12 of 12 tensors differ" in page
    assert "only.second" in page
    assert "n: 1 -> 2" in page
    assert "The same, bit for bit" in shown(ckpt.diff(first, first)._repr_html_())
    assert len(repr(ckpt.diff(first, second))) < 100


def test_a_chain_shows_its_states(tmp_path: Path) -> None:
    chain = ckpt.Chain(tmp_path / "<b>.chain")
    assert "0 steps can be restored" in shown(chain._repr_html_())
    for step, state in enumerate(pair(tmp_path), 1):
        chain.append(state, step=step)
    page = shown(chain._repr_html_())
    assert "2 steps can be restored" in page
    assert "<b>.chain" in page


def test_modules_are_those_below_the_prefix_that_all_names_share() -> None:
    names = ["model.layers.0.w", "model.layers.1.w", "model.head"]
    page = shown(checkpoint([parameter(name, {"model": np.ones(2, np.float32)}) for name in names])._repr_html_())
    assert "model.layers2" in page
    assert "model.head1" in page


def test_a_long_table_is_cut_and_says_so() -> None:
    assert table("t", ("n",), [(i,) for i in range(1000)]).endswith("<p>and 980 more</p>")
    assert len(text("y" * 10_000)) < 130


def test_progress_is_refused_outside_of_a_notebook() -> None:
    with pytest.raises(ckpt.UnsupportedError):
        ckpt.NotebookProgress()


def test_progress_shows_the_status_of_a_cluster_below_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.core.getipython
    import IPython.display

    pages: list[str] = []

    class Handle:
        def update(self, page: Any) -> None:
            pages.append(page._repr_html_())

    monkeypatch.setattr(IPython.core.getipython, "get_ipython", object)
    monkeypatch.setattr(IPython.display, "display", lambda page, display_id: Handle())
    progress = ckpt.NotebookProgress("saving")
    assert isinstance(progress, ckpt.types.Progress)
    progress(1, 4)
    progress.show_status(ckpt.types.ClusterStatus(40, 12, 8, 8, "<b>.bin", "host"))
    text = Elements(pages[-1]).text
    assert "12 of 40 files written, 8 tasks run on 8 workers" in text
    assert 'value="1" max="4"' in pages[-1]
    assert "<b>.bin" in text


@pytest.mark.slow
def test_the_notebook_of_the_page_shows_checkpoints_and_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: it starts a kernel."""
    import nbclient
    import nbformat

    (block,) = re.findall(r"^```ipython\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    pair(tmp_path)
    cells = [nbformat.v4.new_code_cell(cell) for cell in block.split("\n\n")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.km = client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()
    first, diff, chain, progress = (
        [output["data"]["text/html"] for output in cell.outputs if "data" in output] for cell in notebook.cells
    )
    assert "140 elements" in shown(first[-1])
    assert "12 of 12 tensors differ" in shown(diff[-1])
    assert "1 step can be restored" in shown(chain[-1])
    (bar,) = progress  # one bar, which was updated
    elements = Elements(bar)
    assert {("progress", "max"), ("progress", "value"), ("progress", "aria-label")} <= elements.attributes
    assert elements.text.startswith("saving ")
    done, total = elements.text.split(",")[0].removeprefix("saving ").strip().split(" of ")
    assert done == total
    assert not any(output.output_type == "stream" for cell in notebook.cells for output in cell.outputs)


@pytest.mark.parametrize(("errors", "values"), [({}, "exact"), ({"model": {"max_abs": 1.0}}, "approximate")])
def test_a_chain_shows_whether_the_values_of_a_state_are_exact(errors: dict[str, Any], values: str) -> None:
    member = Member("1", "base", 1, "", None, ("planes",), 2, 1, "", errors)
    assert f">{values}</td>" in of_chain(Path("run"), ChainIndex((member,)), 1, 1)
