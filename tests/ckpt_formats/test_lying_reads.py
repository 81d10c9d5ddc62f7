"""Readers of a store that lies: they get what is there, or an error that says what is wrong."""

import json
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import save

import ckpt as library
from ckpt_formats.stores import repetition
from ckpt_formats.stores.location import source_path
from lies_of_reading import EXACT, READING
from lying_store import Answer, LyingStore, Object, failure, lying
from object_stores import BUCKET, reached

SECONDS = 5.0
WEIGHTS = {f"layer.{number}.weight": np.full((40, 50), number, np.float32) for number in range(4)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingStore]:
    """With a folder of Hugging Face's of two files, and one of the universal format."""
    with lying() as running, reached(running.server):
        names = sorted(WEIGHTS)
        files = {f"model-0000{number}-of-00002.safetensors": names[2 * number - 2 : 2 * number] for number in (1, 2)}
        for file, inside in files.items():
            running.truth.put(f"run/hf/{file}", save({name: WEIGHTS[name] for name in inside}))
        index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
        running.truth.put("run/hf/model.safetensors.index.json", json.dumps(index).encode())
        running.truth.put("run/hf/config.json", b'{"architectures": ["Model"]}')
        running.truth.put("run/single.safetensors", save(WEIGHTS))
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_FIRST_PAUSE", 0.001)
    monkeypatch.setenv("CKPT_STORE_RETRY", "0.1")


def assert_exact(url: str) -> None:
    there = library.open(url)
    assert set(there) == set(WEIGHTS)
    for name, values in WEIGHTS.items():
        assert np.array_equal(there[name][...], values)


@pytest.mark.parametrize("name", READING)
def test_reader_gets_the_truth_or_an_error_when_the_store_lies(name: str, store: LyingStore) -> None:
    store.be_honest()
    store.tell(READING[name].tell)
    started = time.monotonic()
    if READING[name].outcome == EXACT:
        assert_exact(f"s3://{BUCKET}/run/hf")
    else:
        with pytest.raises(library.CkptError) as refused:
            assert_exact(f"s3://{BUCKET}/run/hf")
        message = f"{refused.value} {refused.value.hint}"
        assert re.search(READING[name].outcome, message), message
        assert refused.value.where is not None
    assert time.monotonic() - started < SECONDS


@pytest.mark.parametrize("is_denied", [True, False])
def test_single_file_is_read_without_the_right_to_list(is_denied: bool, store: LyingStore) -> None:
    store.be_honest()
    if is_denied:
        store.tell(lambda truth: lambda r: failure(403, "AccessDenied") if r.kind == "list" else truth.answer(r))
    assert_exact(f"s3://{BUCKET}/run/single.safetensors")


def test_open_lists_nothing_beside_the_folder(store: LyingStore) -> None:
    store.be_honest()
    store.truth.seen.clear()
    assert_exact(f"s3://{BUCKET}/run/hf")
    assert {request.query["prefix"] for request in store.truth.seen if request.kind == "list"} <= {"run/hf/"}


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (400, "ExpiredToken", "Get new credentials"),
        (404, "NoSuchBucket", "name of the bucket"),
        (403, "AccessDenied", "may list and read this bucket"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (403, "RequestTimeTooSkewed", "clock of this machine"),
        (301, "PermanentRedirect", "AWS_REGION"),
        (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
        (503, "SlowDown", "later"),
        (400, "InvalidToken", "AWS_SESSION_TOKEN"),
    ],
)
def test_refusal_has_the_code_of_the_store_and_a_hint(status: int, code: str, words: str, store: LyingStore) -> None:
    store.tell(lambda truth: lambda request: failure(status, code, "in the words\n of the store"))
    with pytest.raises(library.NotFoundError) as refused:
        library.open(f"s3://{BUCKET}/run/hf")
    assert code in refused.value.what
    assert words in str(refused.value.hint)
    assert "\n" not in refused.value.what
    store.be_honest()


def test_connection_that_hangs_is_given_up(store: LyingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a byte for the time of the policy, a request is made again."""
    monkeypatch.setenv("CKPT_STORE_TIMEOUT", "0.2")
    hung = [True]

    def slow(request: object) -> object:
        if hung:
            hung.clear()
            time.sleep(0.5)
        return store.truth.answer(request)  # type: ignore[arg-type]

    store.tell(lambda truth: slow)  # type: ignore[arg-type, return-value]
    assert_exact(f"s3://{BUCKET}/run/hf")
    assert not hung
    store.be_honest()


def test_listing_of_empty_pages_is_given_up(store: LyingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_STORE_TIMEOUT", "0.1")
    page = b"<ListBucketResult><Name>bucket</Name><IsTruncated>true</IsTruncated>"
    page += b"<NextContinuationToken>again</NextContinuationToken></ListBucketResult>"
    store.tell(lambda truth: lambda request: Answer(200, {}, page))
    with pytest.raises(library.NotFoundError, match="names no object, page after page"):
        library.open(f"s3://{BUCKET}/run/hf")
    store.be_honest()


def test_folder_of_a_placeholder_alone_is_no_file(store: LyingStore) -> None:
    store.be_honest()
    store.truth.objects["run/empty/"] = Object.of(b"")
    path = source_path(f"s3://{BUCKET}/run/empty")
    del store.truth.objects["run/empty/"]
    assert not path.is_file()
