"""Every place keeps the same contract: folders, and buckets of three servers (Azurite: `azure_store.py`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_formats.core.errors import UnsafeError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.own_folder import check_own, read_own
from ckpt_formats.core.place import Place
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.bucket_place import BucketPlace
from object_stores import BUCKET, StoreServer, conflicting, reached, seaweedfs
from place_contract import check_place


@contextmanager
def place_in(folder: Path, is_own: bool) -> Iterator[tuple[Place, Path]]:
    (folder / "place").mkdir(mode=0o700)
    (folder / "scratch").mkdir()
    yield FolderPlace(folder / "place", is_own), folder / "scratch"


@pytest.mark.parametrize("is_own", [True, False])
def test_folder_keeps_the_contract_of_places(is_own: bool, tmp_path: Path) -> None:
    with place_in(tmp_path, is_own) as (place, scratch):
        check_place(place, scratch)


def test_folder_keeps_the_contract_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_formats.core.publish._renameat2", lambda: None)
    with place_in(tmp_path, True) as (place, scratch):
        check_place(place, scratch)


def test_bucket_keeps_the_contract_of_places(user: StoreServer, tmp_path: Path) -> None:
    check_place(BucketPlace(Bucket(f"s3://{BUCKET}"), "a/place"), tmp_path)


@pytest.mark.slow
def test_bucket_of_another_server_keeps_the_contract_of_places(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with seaweedfs(tmp_path / "data") as server, reached(server):
        check_place(BucketPlace(Bucket(f"s3://{BUCKET}"), "place"), tmp_path)


@pytest.mark.slow
def test_bucket_asks_again_while_another_request_for_the_object_goes_on(user: StoreServer) -> None:
    """S3 then answers 409: an earlier request, whose answer was lost, may yet put the object."""
    with conflicting(user) as busy, reached(busy):
        place = BucketPlace(Bucket(f"s3://{BUCKET}"), "conflicts")
        version = place.replace("head.json", b"second", place.create("head.json", b"first"))
        assert place.read("head.json") == (b"second", version)
        with pytest.raises(FileExistsError):
            place.create("head.json", b"third")
        with pytest.raises(FileExistsError):
            place.replace("head.json", b"third", version.other())


def test_folder_that_was_replaced_takes_no_file_of_a_late_process(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "file").write_bytes(b"late")
    place = FolderPlace(tmp_path / "data")
    with place.opened() as opened:
        (tmp_path / "data").rename(tmp_path / "published")
        (tmp_path / "data").mkdir()
        opened.create_from("file", tmp_path / "file", lambda: None)
    assert os.listdir(tmp_path / "data") == []
    (tmp_path / "file").write_bytes(b"late")
    with place.opened() as opened:
        (tmp_path / "data").rmdir()
        (tmp_path / "data").mkdir()
        with pytest.raises(FileNotFoundError):
            opened.create_from("file", tmp_path / "file", lambda: None)


def test_folder_of_ones_own_may_have_a_file_and_its_draft_as_two_names(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir(mode=0o700)
    (own / ".job-0123.draft").write_bytes(b"{}")
    (own / "job").hardlink_to(own / ".job-0123.draft")
    check_own(own, "job")
    assert read_own(own / "job")[0] == b"{}"
    (own / "other").hardlink_to(own / "job")
    (own / ".job-0123.draft").unlink()
    for refused in (lambda: check_own(own, "job"), lambda: read_own(own / "job")):
        with pytest.raises(UnsafeError, match="hard link"):
            refused()
