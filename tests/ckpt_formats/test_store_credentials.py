"""Credentials and addresses come from where the tools of each store take them."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.exceptions import BaseError
from safetensors.numpy import save_file

import ckpt as library
from ckpt_formats.stores import location
from ckpt_formats.stores.clients import client_of
from ckpt_formats.stores.location import source_path, target_path
from ckpt_formats.stores.refusals import Refusal
from lying_store import LyingStore, lying
from object_stores import BUCKET, KEY, SECRET

FOLDER = {"config": "AWS_CONFIG_FILE", "credentials": "AWS_SHARED_CREDENTIALS_FILE"}


@pytest.fixture(scope="module")
def store() -> Iterator[LyingStore]:
    with lying() as running:
        running.truth.put("run/file.bin", b"bytes")
        yield running


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the files of Amazon's tools, for a user with nothing in the environment."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("CKPT_STORE_RETRY", "0")

    def write(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
            monkeypatch.setenv(FOLDER[name], str(tmp_path / name))

    return write


def key_of(store: LyingStore) -> str:
    """The access key of the last request."""
    return store.truth.seen[-1].headers["authorization"].partition("Credential=")[2].partition("/")[0]


def key_by(store: LyingStore, client: Any) -> str:
    """The access key with which a client signs."""
    with suppress(OSError, BaseError):
        obstore.head(client, "run/file.bin")
    return key_of(store)


def test_profile_gives_credentials_and_address(
    files: Callable[..., None], store: LyingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(
        config=f"[profile minio]\nendpoint_url = {store.server.endpoint}\nregion = eu-west-9\n",
        credentials=f"[minio]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n",
    )
    monkeypatch.setenv("AWS_PROFILE", "minio")
    assert source_path(f"s3://{BUCKET}/run/file.bin").read_bytes() == b"bytes"
    assert key_of(store) == KEY


def test_address_of_the_service_in_a_profile_counts_first(
    files: Callable[..., None], store: LyingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(
        config="[default]\nservices = here\nendpoint_url = http://127.0.0.1:1\n"
        f"[services here]\ns3 =\n  endpoint_url = {store.server.endpoint}\n",
        credentials=f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n",
    )
    assert source_path(f"s3://{BUCKET}/run/file.bin").read_bytes() == b"bytes"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(library.NotFoundError, match="no connection"):
        source_path(f"s3://{BUCKET}/run/file.bin")


def test_keys_in_the_environment_count_before_the_files(
    files: Callable[..., None], store: LyingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(
        config=f"[default]\nendpoint_url = {store.server.endpoint}\n",
        credentials="[default]\naws_access_key_id = other\naws_secret_access_key = other\n",
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert source_path(f"s3://{BUCKET}/run/file.bin").read_bytes() == b"bytes"
    assert key_of(store) == KEY


def test_a_changed_profile_gives_a_new_client(
    files: Callable[..., None], store: LyingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for key in (KEY, "other"):
        files(
            config=f"[default]\nendpoint_url = {store.server.endpoint}\n",
            credentials=f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n",
        )
        clients = [client_of(f"s3://{BUCKET}") for _ in range(2)]
        assert clients[0] is clients[1]
        assert client_of(f"s3://{BUCKET}", anonymous=True) is not clients[0]
        seen += [clients[0], key_by(store, clients[0])]
    assert seen[0] is not seen[2]
    assert (seen[1], seen[3]) == (KEY, "other")


@pytest.mark.parametrize("config", ["", "[default]\nregion = us-east-1\n"])
def test_unknown_profile_is_refused_by_its_name(
    config: str, files: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    files(config=config)
    monkeypatch.setenv("AWS_PROFILE", "mistyped")
    with pytest.raises(library.NotFoundError, match="'mistyped'") as refused:
        library.open(f"s3://{BUCKET}/run")
    assert "list-profiles" in str(refused.value.hint)


def test_store_states_that_credentials_are_absent(files: Callable[..., None]) -> None:
    files(config="[default]\nregion = us-east-1\n")
    with pytest.raises(library.NotFoundError, match="no credentials") as refused:
        library.open(f"s3://{BUCKET}/run")
    assert "--anonymous" in str(refused.value.hint)


@pytest.mark.parametrize("address", ["http://169.254.169.254/latest/api/token", "http://metadata.google.internal/x"])
def test_failure_of_the_metadata_service_means_no_credentials(address: str) -> None:
    refusal = Refusal.of(OSError(f"Error performing PUT {address} in 1s - HTTP error: error sending request"))
    assert "no credentials" in refusal.text
    assert "169.254" not in refusal.text
    assert "AWS_PROFILE" in str(refusal.hint)
    assert not refusal.may_pass


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "DefaultEndpointsProtocol=https;AccountName=acc;AccountKey=a2V5;EndpointSuffix=core.example.net",
            {"endpoint": "https://acc.blob.core.example.net", "account_key": "a2V5"},
        ),
        (
            "BlobEndpoint=http://127.0.0.1:10000/acc/;SharedAccessSignature=?sv=2024&sig=abc",
            {"endpoint": "http://127.0.0.1:10000/acc"},
        ),
    ],
)
def test_connection_string_of_azure_is_used(
    text: str, expected: dict[str, str], files: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    config = client_of("az://acc/container").config
    assert {name: config.get(name) for name in expected} == expected


def test_connection_string_of_another_account_is_refused(
    files: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=other;AccountKey=a2V5")
    with pytest.raises(library.UnsupportedError, match="of the account other"):
        library.open("az://acc/container/run")


@pytest.mark.parametrize("host", ["http://localhost:4443", "localhost:4443"])
def test_emulator_of_google_is_used(host: str, files: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    config = client_of("gs://bucket").config
    assert config.get("base_url") == "http://localhost:4443"


def test_emulator_of_google_is_read(
    store: LyingStore, files: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's protocol for listing and reading is that of S3, without a signature here."""
    save_file({"a": np.arange(12, dtype=np.float32)}, tmp_path / "model.safetensors")
    store.truth.put("google/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.server.endpoint)
    store.truth.seen.clear()
    assert library.open("gs://bucket/google")["a"][3] == 3
    assert store.truth.seen
    assert not any("authorization" in request.headers for request in store.truth.seen)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3a://bucket/run/a", ("s3://bucket", "run/a")),
        ("S3N://bucket/run", ("s3://bucket", "run")),
        ("gcs://bucket/run", ("gs://bucket", "run")),
        ("abfs://container@account.dfs.core.windows.net/run/a", ("az://account/container", "run/a")),
        ("abfss://container@account.dfs.core.windows.net/run", ("az://account/container", "run")),
        ("wasbs://container@account.blob.core.windows.net/run", ("az://account/container", "run")),
        ("abfs://container/run", ("az://mine/container", "run")),
    ],
)
@pytest.mark.parametrize("path_of", [source_path, target_path])
def test_urls_of_other_tools_name_the_same_places(
    url: str, expected: tuple[str, str], path_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "mine")
    opened: list[tuple[str, str]] = []

    def open_store(url: str, key: str, _: object) -> Path:
        opened.append((url, key))
        return Path(key)

    monkeypatch.setattr("ckpt_formats.stores.object_store.open_store", open_store)
    path_of(url)
    assert opened == [expected]
    assert location.is_url(url)
