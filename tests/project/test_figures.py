"""Each figure that README and docs/compare.md quote is in benchmarks/results.json, with the command behind it."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text("utf-8"))
PAGES = (ROOT / "README.md", ROOT / "docs" / "compare.md")
_MARKED = re.compile(r"<!-- figures: (\w+) -->\n((?:[|-] ?.*\n)+)")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*")
_QUANTITY = re.compile(r"\d (?:s|ms|MB|MB/s|GB/s|%|bytes)\b(?! of bytes)|\d times (?:smaller|faster)")


def quoted() -> dict[str, list[tuple[Path, list[float]]]]:
    """By name of a result, the numbers of each row that a page quotes; heads of tables are left out."""
    rows: dict[str, list[tuple[Path, list[float]]]] = {}
    for page in PAGES:
        for name, block in _MARKED.findall(page.read_text("utf-8")):
            lines = block.splitlines()
            body = lines[2:] if lines[0].startswith("|") else lines
            for line in body:
                text = line.split("|", 2)[2] if line.startswith("|") else line
                rows.setdefault(name, []).append((page, [float(one) for one in _NUMBER.findall(text)]))
    return rows


@pytest.mark.parametrize("name", RESULTS)
def test_quoted_figures_are_those_of_the_results(name: str) -> None:
    expected = [numbers for _, numbers in RESULTS[name]["rows"]]
    assert [numbers for _, numbers in quoted()[name]] == expected
    script = re.findall(r"python (benchmarks/\w+\.py)", RESULTS[name]["command"])
    assert script
    assert all((ROOT / one).is_file() for one in script)


def test_every_result_is_quoted_and_every_quote_has_a_result() -> None:
    assert set(quoted()) == set(RESULTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_quotes_a_measured_quantity_elsewhere(page: Path) -> None:
    prose = _MARKED.sub("", page.read_text("utf-8"))
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.DOTALL | re.MULTILINE)
    assert _QUANTITY.findall(prose) == []
