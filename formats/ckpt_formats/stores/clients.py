"""Clients of stores, with the credentials and the addresses that the tools of each store would use."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import obstore

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.stores.repetition import ONCE

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")


def client_of(
    url: str, options: Mapping[str, Any] = MappingProxyType({}), *, anonymous: bool = False, retries: Any = ONCE
) -> Any:
    """The client of a bucket. Its credentials come from the environment, as those of the store's own tools.

    `options`: those of `obstore` for HTTP, such as timeouts. `anonymous`: without credentials, for a public bucket.
    """
    client_options: Any = dict(options)
    if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS):
        client_options["allow_http"] = True
    more: dict[str, Any] = {}
    if anonymous:
        more["skip_signature"] = True
    elif url.startswith("s3://") and _needs_boto3():
        more["credential_provider"] = _of_boto3()
    if url.startswith("az://"):
        account, _, container = url.removeprefix("az://").partition("/")
        more["account_name"] = account
        return obstore.store.AzureStore(container, client_options=client_options, retry_config=retries, **more)
    return obstore.store.from_url(url, client_options=client_options, retry_config=retries, **more)


def _needs_boto3() -> bool:
    """Whether the credentials are those of a profile, which only the tools of Amazon can read."""
    given = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if any(name in os.environ for name in given):
        return False
    return "AWS_PROFILE" in os.environ or (Path.home() / ".aws").is_dir()


def _of_boto3() -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the profiles of AWS need the package {error.name}",
            hint="Install it (pip install 'ckpt-suite[aws]'), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from None
    return Boto3CredentialProvider()
