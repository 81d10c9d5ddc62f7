"""Clients of stores, with the credentials and the addresses that the tools of each store would use.

Profiles in files of Amazon's tools are read by Amazon's own library.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import obstore

from ckpt_formats.core.errors import NotFoundError, UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.stores.repetition import ONCE, Repetition

T = TypeVar("T")

_EMULATOR_ACCOUNT = "devstoreaccount1"
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every emulator of Azure: they are published."""
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"
_IN_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_NAMES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_GOOGLE_DEFAULT = "~/.config/gcloud/application_default_credentials.json"
_GOOGLE_FILES = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
_CLIENTS: dict[Hashable, Any] = {}
"""Those of this process, by all that they depend on."""
_MAX_CLIENTS = 16
_INSTALL = "Install it (pip install 'ckpt-suite[aws]'), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
_NO_CREDENTIALS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or read a public bucket with --anonymous."
)


class ClientRequests(Repetition):
    """The requests of clients. They are served by threads, which a process that is forked since does not have.

    There, a request would wait for ever: it raises `UnsupportedError` instead.
    """

    _process: ClassVar[int | None] = None
    """The one that has made the first request: this one, or one from which it was forked since."""

    def __call__(self, request: Callable[[], T], where: str, takes_place: bool = True) -> T:
        if ClientRequests._process is None:
            ClientRequests._process = os.getpid()
        if ClientRequests._process != os.getpid():
            raise UnsupportedError(
                "this process was forked from one that has used a store, and cannot use one",
                where=where,
                hint='Start it by `spawn`: multiprocessing.get_context("spawn"), multiprocessing_context="spawn" of a '
                "DataLoader.",
            )
        return super().__call__(request, where, takes_place)


def client_of(
    url: str, options: Mapping[str, Any] = MappingProxyType({}), *, anonymous: bool = False, retries: Any = ONCE
) -> Any:
    """The client of a bucket. Its credentials and its address come from the environment, as for the store's own tools.

    To make one takes 15 ms, most of them for the certificates of the system, and each has connections of its own. So
    a process has one for each bucket and set of options, until what credentials come from changes.

    `options`: those of `obstore` for HTTP, such as timeouts. `anonymous`: without credentials, for a public bucket.
    Raises `UnsupportedError` or `NotFoundError` if the environment names what there is not.
    """
    sources = (tuple(os.environ.items()), tuple(map(_version, _credential_files())))
    key = (os.getpid(), url, repr(dict(options)), anonymous, repr(retries), sources)
    client = _CLIENTS.get(key)
    if client is None:
        client = _new_client(url, options, anonymous, retries)
        if len(_CLIENTS) >= _MAX_CLIENTS:
            _CLIENTS.clear()
        _CLIENTS[key] = client  # threads that come at once make one each; no lock, which a fork could leave locked
    return client


def _credential_files() -> Iterator[str]:
    """The files that credentials may come from. A client reads them once, when it is made."""
    yield from (os.environ.get(name, default) for name, default in _FILES.items())
    yield from (os.environ.get(name, _GOOGLE_DEFAULT) for name in _GOOGLE_FILES)


def _version(path: str) -> tuple[int, int, int] | None:
    """What changes if a file is written or replaced; None if there is none."""
    try:
        now = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    return now.st_ino, now.st_size, now.st_mtime_ns


def _new_client(url: str, options: Mapping[str, Any], anonymous: bool, retries: Any) -> Any:
    scheme, _, place = url.partition("://")
    config = {"s3": _s3, "gs": _google, "az": _azure}[scheme](place, anonymous)
    if anonymous:
        config["skip_signature"] = True
    http: Any = dict(options)
    if str(config.get("endpoint", config.get("base_url", ""))).startswith("http://") or _is_plain("AWS_ENDPOINT"):
        http["allow_http"] = True
    if scheme == "az":
        container = place.partition("/")[2]
        return obstore.store.AzureStore(container, client_options=http, retry_config=retries, **config)
    return obstore.store.from_url(url, client_options=http, retry_config=retries, **config)


def _is_plain(name: str) -> bool:
    return os.environ.get(name, "").startswith("http://")


def _s3(bucket: str, anonymous: bool) -> dict[str, Any]:
    """The address and the credentials: of the environment, or else of the profile in the files of Amazon's tools."""
    config = _of_profile(anonymous)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        config["endpoint"] = endpoint
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        config.pop("region", None)  # that of the environment
    return config


def _google(bucket: str, anonymous: bool) -> dict[str, Any]:
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if host:
        return {"base_url": host if "://" in host else f"http://{host}", "skip_signature": True}
    base = os.environ.get("GOOGLE_BASE_URL")
    return {"base_url": base} if base else {}


def _azure(place: str, anonymous: bool) -> dict[str, Any]:
    account = place.partition("/")[0]
    parts = _connection(os.environ.get(_CONNECTION, ""))
    config: dict[str, Any] = {"account_name": account}
    if not parts:
        return config
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        parts = {
            "accountname": _EMULATOR_ACCOUNT,
            "accountkey": _EMULATOR_KEY,
            "blobendpoint": f"http://127.0.0.1:10000/{_EMULATOR_ACCOUNT}",
        }
    if parts.get("accountname", account) != account:
        raise UnsupportedError(
            f"{_CONNECTION} is of the account {parts['accountname']}",
            where=f"az://{place}",
            hint=f"Name that account in the URL, or unset {_CONNECTION}.",
        )
    endpoint = parts.get("blobendpoint")
    if endpoint is None and "endpointsuffix" in parts:
        endpoint = f"{parts.get('defaultendpointsprotocol', 'https')}://{account}.blob.{parts['endpointsuffix']}"
    if endpoint is not None:
        config["endpoint"] = endpoint.rstrip("/")
    if not anonymous and "accountkey" in parts:
        config["account_key"] = parts["accountkey"]
    if not anonymous and "sharedaccesssignature" in parts:
        config["sas_key"] = parts["sharedaccesssignature"].removeprefix("?")
    return config


def _connection(text: str) -> dict[str, str]:
    """The parts of a connection string of Azure, by their names in lower case."""
    pairs = (part.partition("=") for part in text.split(";") if part.strip())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _of_profile(anonymous: bool = False) -> dict[str, Any]:
    """The configuration of a client of S3 that the profile gives: `endpoint`, `region`, `credential_provider`.

    Empty if there are no files of Amazon's tools. Raises `NotFoundError` if the profile does not exist or has no
    credentials, `UnsupportedError` if Amazon's library is needed and not installed.
    """
    has_own = any(name in os.environ for name in _IN_ENVIRONMENT) and not _needs_sts_of_user()
    is_named = any(os.environ.get(name) for name in _NAMES)
    has_files = any(Path(os.environ.get(name, default)).expanduser().is_file() for name, default in _FILES.items())
    needs_credentials = not has_own and not anonymous
    if not is_named and not has_files and not _needs_sts_of_user():
        return {}
    try:
        from botocore.exceptions import BotoCoreError, ProfileNotFound
        from botocore.session import Session
    except ModuleNotFoundError as error:
        if not needs_credentials:
            return {}  # all that is needed is in the environment
        raise UnsupportedError(f"the profiles of AWS need the package {error.name}", hint=_INSTALL) from None
    session: Any = Session()
    try:
        return _configured(session, needs_credentials)
    except ProfileNotFound:
        name = next(filter(None, map(os.environ.get, _NAMES)), "")
        raise NotFoundError(
            f"AWS_PROFILE names the profile {printable(name)!r}, which is in none of the files of AWS",
            hint="`aws configure list-profiles` shows what there is.",
        ) from None
    except BotoCoreError as error:
        text = printable(str(error).partition("\n")[0])[:300]
        raise NotFoundError(f"the profile of AWS cannot be used: {text}", hint=_NO_CREDENTIALS) from None


def _needs_sts_of_user() -> bool:
    """Whether a web identity is exchanged at an address without TLS: the client of stores refuses that."""
    addresses = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL"))
    has_identity = "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ and "AWS_ACCESS_KEY_ID" not in os.environ
    return has_identity and next(filter(None, addresses), "").startswith("http://")


def _configured(session: Any, needs_credentials: bool) -> dict[str, Any]:
    config: dict[str, Any] = {}
    profile = session.get_scoped_config()
    endpoint = _endpoint(session, profile)
    if endpoint:
        config["endpoint"] = endpoint
    if profile.get("region"):
        config["region"] = profile["region"]
    if needs_credentials:
        credentials = session.get_credentials()
        if credentials is None:
            raise NotFoundError("there are no credentials for this store", hint=_NO_CREDENTIALS)
        config["credential_provider"] = _ProfileCredentials(credentials)
    return config


def _endpoint(session: Any, profile: dict[str, Any]) -> str | None:
    """The address that a profile states: for S3, or for all services."""
    if str(os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "")).lower() == "true":
        return None
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    of_s3 = services.get("s3") if isinstance(services, dict) else None
    own = of_s3.get("endpoint_url") if isinstance(of_s3, dict) else None
    return own or profile.get("endpoint_url")


class _ProfileCredentials:
    """What `obstore` asks for credentials."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def __call__(self) -> dict[str, Any]:
        from datetime import datetime, timedelta, timezone

        frozen = self._credentials.get_frozen_credentials()  # new ones, if they end soon
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(minutes=5),
        }
