"""Clients of stores, with the credentials and the addresses that the tools of each store would use."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import obstore

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.stores.profiles import of_profile
from ckpt_formats.stores.repetition import ONCE

_EMULATOR_ACCOUNT = "devstoreaccount1"
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every emulator of Azure: they are published."""
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


def client_of(
    url: str, options: Mapping[str, Any] = MappingProxyType({}), *, anonymous: bool = False, retries: Any = ONCE
) -> Any:
    """The client of a bucket. Its credentials and its address come from the environment, as for the store's own tools.

    `options`: those of `obstore` for HTTP, such as timeouts. `anonymous`: without credentials, for a public bucket.
    Raises `UnsupportedError` or `NotFoundError` if the environment names what there is not.
    """
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
    config = of_profile(anonymous)
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
