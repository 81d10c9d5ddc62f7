"""Profiles of Amazon's tools: credentials, region and address that are in files, read by Amazon's own library."""

import os
from pathlib import Path
from typing import Any

from ckpt_formats.core.errors import NotFoundError, UnsupportedError
from ckpt_formats.core.text import printable

_IN_ENVIRONMENT = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
_NAMES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_INSTALL = "Install it (pip install 'ckpt-suite[aws]'), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
_NO_CREDENTIALS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or read a public bucket with --anonymous."
)


def of_profile(anonymous: bool = False) -> dict[str, Any]:
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
        config["credential_provider"] = _Provider(credentials)
    return config


def _endpoint(session: Any, profile: dict[str, Any]) -> str | None:
    """The address that a profile states: for S3, or for all services."""
    if str(os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "")).lower() == "true":
        return None
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    of_s3 = services.get("s3") if isinstance(services, dict) else None
    own = of_s3.get("endpoint_url") if isinstance(of_s3, dict) else None
    return own or profile.get("endpoint_url")


class _Provider:
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
