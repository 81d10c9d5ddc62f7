"""What several test files need."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from object_stores import StoreServer, moto, reached


@pytest.fixture(scope="session")
def server() -> Iterator[StoreServer]:
    """An object store of this process's tests."""
    with moto() as running:
        yield running


@pytest.fixture
def user(server: StoreServer) -> Iterator[StoreServer]:
    """The store, for a user who has its credentials. Its objects are removed at the end of the test."""
    with reached(server):
        yield server
    objects = [meta["path"] for page in obstore.list(server.client) for meta in page if meta["path"] != "ready"]
    obstore.delete(server.client, objects)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of localhost that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    place = tmp_path_factory.mktemp("tls")
    key, path = place / "key.pem", place / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", path, "-days", "2", *names], check=True, capture_output=True)
    return path, key
