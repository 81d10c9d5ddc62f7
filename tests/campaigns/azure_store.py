"""Azure Blob Storage, as Azurite emulates it: `python tests/campaigns/azure_store.py node_modules/.bin/azurite-blob`.

Not in the check: Azurite comes from npm (`npm install azurite`). Checkpoints are written, read, refused and removed
there, an object that is replaced is noticed, and one of two leases is refused. The key is the published one of all
emulators.
"""

import base64
import hashlib
import hmac
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np

import ckpt as library
from ckpt.pipeline.lease import hold
from ckpt.pipeline.targets import clean
from ckpt_formats.core.errors import CorruptError, LockedError, NotFoundError, OutputError
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.bucket_place import BucketPlace
from ckpt_formats.stores.location import source_path, target_path
from damage import SAMPLES
from object_stores import free_port

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
URL = f"az://{ACCOUNT}/box"
SOURCE = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"


def create_container(endpoint: str) -> None:
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    text = "PUT" + 12 * "\n" + lines + f"/{ACCOUNT}/{ACCOUNT}/box\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(f"{endpoint}/{ACCOUNT}/box?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request)


def check() -> None:
    source = library.open(SOURCE)
    for format in (library.Universal(), library.DeepSpeed(dp=3), library.DCP(dp=2)):
        url = f"{URL}/run/{format.name}"
        library.save(source, url, format)
        assert library.diff(library.open(url), source).same, url
        assert not library.verify(library.open(url))
        try:
            library.save(source, url, format)
            raise AssertionError("a target was written twice")
        except OutputError:
            print(f"{url}: written, verified, equal, and not written again")

    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large"
        large.write_bytes(np.random.default_rng(0).bytes(40 << 20))
        bucket = Bucket(URL)
        bucket.upload("large", large, lambda: None)
        read = bucket.read("large")
        assert read is not None
        assert read[0] == large.read_bytes()
        before = source_path(f"{URL}/large")
        bucket.delete(["large"])
        bucket.create("large", bytes(40 << 20))
        try:
            before.read_bytes()
            raise AssertionError("an object that was replaced was read")
        except CorruptError as error:
            print(f"in parts: equal; replaced: {error}")
    with hold(BucketPlace(bucket, "x"), "lease", "x"):
        try:
            with hold(BucketPlace(bucket, "x"), "lease", "x"):
                raise AssertionError("two processes hold a lease")
        except LockedError as error:
            print(f"a lease: {error}")
    print(f"clean: {clean(target_path(f'{URL}/nothing'))}")


def check_connection_string(endpoint: str) -> None:
    """With a connection string and nothing else, by the name that Hadoop has for the place; then with a wrong key."""
    parts = {"AccountName": ACCOUNT, "AccountKey": KEY, "BlobEndpoint": f"{endpoint}/{ACCOUNT}"}
    url = f"abfs://box@{ACCOUNT}.dfs.core.windows.net/connected"
    for name in ("AZURE_STORAGE_USE_EMULATOR", "AZURITE_BLOB_STORAGE_URL"):
        del os.environ[name]
    os.environ["AZURE_STORAGE_CONNECTION_STRING"] = ";".join(f"{name}={value}" for name, value in parts.items())
    source = library.open(SOURCE)
    library.save(source, url, library.Universal())
    assert library.diff(library.open(url), source).same
    assert library.open(f"{URL}/connected").path == library.open(url).path
    parts["AccountKey"] = base64.b64encode(b"another key").decode()
    os.environ["AZURE_STORAGE_CONNECTION_STRING"] = ";".join(f"{name}={value}" for name, value in parts.items())
    try:
        library.open(url)
        raise AssertionError("a wrong key was accepted")
    except NotFoundError as error:
        print(f"a connection string: written and read; a wrong key: {error}")


def main(program: str) -> None:
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [program, "--inMemoryPersistence", "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    os.environ |= {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint}
    server = subprocess.Popen([*command, "--disableTelemetry"], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with suppress(urllib.error.URLError, ConnectionError):
                create_container(endpoint)
                break
            time.sleep(0.1)
        check()
        check_connection_string(endpoint)
    finally:
        server.kill()


if __name__ == "__main__":
    main(sys.argv[1])
