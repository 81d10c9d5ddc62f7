"""What every `Place` keeps, whatever it is in: `check_place` tries all of it at a place that is empty."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt.pipeline.journal import BATCH, Journal
from ckpt.pipeline.lease import Busy, Lease, acquire
from ckpt_formats.core.errors import LockedError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.place import Place

_THREADS = 8


def check_place(place: Place, scratch: Path) -> None:
    """Raise `AssertionError` for a rule that a place breaks. `scratch`: a folder on the file system of a folder."""
    for check in (
        _check_objects_are_created_once,
        _check_listings_have_names_below_the_place,
        _check_versions_decide_who_replaces,
        _check_files_appear_whole_and_once,
        _check_removal_begins_with_the_first_name,
        _check_one_of_many_wins,
        _check_leases_exclude_each_other,
        _check_journals_give_all_receipts,
    ):
        check(place, scratch)
        place.remove({name.partition("/")[0] for name in place.list()}, first="manifest.json")
        assert place.list() == {}


def _check_objects_are_created_once(place: Place, scratch: Path) -> None:
    assert (place.list(), place.head("one"), place.read("one")) == ({}, None, None)
    version = place.create("one", b"first")
    with pytest.raises(FileExistsError):
        place.create("one", b"second")
    assert place.read("one") == (b"first", version)
    entry = place.head("one")
    assert entry is not None
    assert entry.nbytes == 5
    assert abs(place.now() - entry.modified) < 60
    place.delete(["one", "never there"])
    assert place.read("one") is None
    assert place.create("empty", b"") is not None
    assert place.list()["empty"].nbytes == 0


def _check_listings_have_names_below_the_place(place: Place, scratch: Path) -> None:
    inner = place.within("inner")
    assert inner.list() == {}
    if inner.local is not None:
        inner.local.mkdir()
    inner.create("two", b"2")
    place.create("innermost", b"other")
    assert sorted(place.list()) == ["inner/two", "innermost"]
    assert list(inner.list()) == ["two"]
    assert place.where("inner/two") == inner.where("two")


def _check_versions_decide_who_replaces(place: Place, scratch: Path) -> None:
    first = place.replace("list", b"a", None)
    with pytest.raises(FileExistsError):
        place.replace("list", b"b", None)
    second = place.replace("list", b"bb", first)
    for replace in (place.replace, place.replace_stale, place.renew):
        with pytest.raises(FileExistsError):
            replace("list", b"c", first)
        assert place.read("list") == (b"bb", second)
    third = place.replace_stale("list", b"ccc", second)
    renewed = place.renew("list", b"ddd", third)
    assert renewed != third
    read = place.read("list")
    assert read is not None
    assert (read[0] in (b"ccc", b"ddd"), read[1]) == (True, renewed)
    with pytest.raises(OSError):  # noqa: PT011  # an object that is not there: of another version, or not found
        place.renew("never there", b"", third)


def _check_files_appear_whole_and_once(place: Place, scratch: Path) -> None:
    def file(name: str, data: bytes) -> Path:
        path = scratch / name
        path.write_bytes(data)
        return path

    def refuse() -> None:
        raise LockedError("no longer")

    with place.opened() as opened:
        with pytest.raises(LockedError):
            opened.create_from("a/b/data", file("one", b"data"), refuse)
        assert place.head("a/b/data") is None
        e_tag = opened.create_from("a/b/data", file("one", b"data"), lambda: None)
        entry = place.head("a/b/data")
        assert entry is not None
        assert (entry.nbytes, entry.e_tag.strip('"')) == (4, e_tag.strip('"'))
        with pytest.raises(FileExistsError):
            opened.create_from("a/b/data", file("one", b"data"), lambda: None)
        assert opened.tag_if_equal("a/b/data", file("one", b"data")) == entry.e_tag
        assert opened.tag_if_equal("a/b/data", file("two", b"other data")) is None
        assert opened.tag_if_equal("never there", file("two", b"")) is None
    assert list(place.list()) == ["a/b/data"]
    opened_large = bytes(50_000)  # in parts, where a store takes them
    for content in (b"newer", opened_large):
        place.replace_from("a/b/data", file("one", content), place.head("a/b/data"))
        assert bytes(place.read_range("a/b/data", 0, len(content))) == content
        for other in (entry, None):
            with pytest.raises(FileExistsError):
                place.replace_from("a/b/data", file("one", content), other)
    place.replace_from("a/b/new", file("one", b"new"), None)
    assert sorted(place.list()) == ["a/b/data", "a/b/new"]


def _check_removal_begins_with_the_first_name(place: Place, scratch: Path) -> None:
    member = place.within("member")
    if member.local is not None:
        (member.local / "packs").mkdir(parents=True)
    for name in ("packs/0", "manifest.json"):
        member.create(name, b"x")
    place.create("file", b"x")
    place.create("stays", b"x")
    place.remove(["member", "file", "never there"], first="manifest.json")
    assert list(place.list()) == ["stays"]


def _check_one_of_many_wins(place: Place, scratch: Path) -> None:
    def winners(act: Callable[[int], object]) -> int:
        def wins(number: int) -> bool:
            try:
                act(number)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(_THREADS) as pool:
            return sum(pool.map(wins, range(_THREADS)))

    assert winners(lambda number: place.create("one", b"%d" % number)) == 1
    read = place.read("one")
    assert read is not None
    assert winners(lambda number: place.replace_stale("one", b"next %d" % number, read[1])) == 1
    assert [name for name in place.list() if name.startswith("one")] == ["one"]


def _check_leases_exclude_each_other(place: Place, scratch: Path) -> None:
    first = acquire(place, "lease")
    assert isinstance(first, Lease)
    first.check()
    first.confirm()
    busy = acquire(place, "lease")
    assert isinstance(busy, Busy)
    assert busy.holder == first.owner
    assert 0 < busy.seconds < 120
    read = place.read("lease")
    assert read is not None
    place.replace_stale("lease", b"{}", read[1])
    with pytest.raises(LockedError):
        first.confirm()
    first.release()
    assert place.read("lease") is not None, "a lease that was lost is not the loser's to remove"
    place.delete(["lease"])
    second = acquire(place, "lease")
    assert isinstance(second, Lease)
    second.release()
    assert place.read("lease") is None


def _check_journals_give_all_receipts(place: Place, scratch: Path) -> None:
    journal, other = Journal(place), Journal(place)
    receipts = [Receipt(f"file-{number}", number, (), {"of": number}, e_tag="tag") for number in range(BATCH + 1)]
    for receipt in receipts:
        if journal.add(receipt):
            journal.flush()
    other.add(Receipt("of another process", 1, (), {}))
    for one in (journal, other):
        one.flush()
        assert one.waiting == 0
    place.create("damaged", b"0123456789abcdef {}\n\xff\n")
    assert sorted(receipt.file for receipt in other.read()) == sorted(
        [*(receipt.file for receipt in receipts), "of another process"]
    )
