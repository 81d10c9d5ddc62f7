"""A sample of `run.py universal_kills` in tests/campaigns: the same bytes with any workers, and after kills."""

import random
from collections.abc import Generator

import pytest

from kills import Campaign, Work
from run import Round, run
from universal_kills import works

WORKS = ("folder", "one file", "folder, encoded", "one file, encoded", "orbax", "append", "compact")
KILLS = 3


@pytest.fixture(scope="module")
def works_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Work]:
    by_name = works(tmp_path_factory.mktemp("works"))
    assert tuple(by_name) == WORKS
    return by_name


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_workers_and_kills_do_not_show_in_the_bytes(name: str, works_by_name: dict[str, Work]) -> None:
    campaign, generator = Campaign(works_by_name[name]), random.Random(name)
    if name.startswith("folder"):
        assert sum(file.startswith("out/packs/") for file in campaign.expected) > 3
    killed = 0
    while killed < KILLS:
        killed += campaign.round(generator)["killed"]


def test_campaign_ends_what_its_rounds_have_set_up() -> None:
    """Not when the collector of garbage comes by: a cycle of references keeps a generator until then."""
    ended = []

    def rounds() -> Generator[Round, None, None]:
        itself = [one]
        try:
            while itself:
                yield Round("round", dict)
        finally:
            ended.append("server")

    one = rounds()
    assert run(one, 2).rounds == 2
    assert ended == ["server"]
