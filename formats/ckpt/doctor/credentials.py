"""Whether credentials of stores are present: names of variables and files, never a value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoreCredentials:
    """Where the credentials of a store are; nothing of what they are."""

    store: str
    url: str
    """The beginning of its URLs."""
    variables: tuple[str, ...]
    """Names of variables of the environment that are set."""
    files: tuple[str, ...]
    """Files that exist, below `~`."""
    missing_files: tuple[str, ...]
    """Names of variables that name a file which does not exist."""

    @property
    def present(self) -> bool:
        """Whether anything was found. It was not tried whether the store accepts it."""
        return bool(self.variables or self.files)


STORES = {
    "Amazon S3 and others of its protocol": (
        "s3://",
        (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_PROFILE",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_ROLE_ARN",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
        ),
        (".aws/credentials", ".aws/config"),
    ),
    "Google Cloud Storage": (
        "gs://",
        ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        (".config/gcloud/application_default_credentials.json",),
    ),
    "Azure Blob Storage": (
        "az://",
        (
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_ACCESS_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_SAS_KEY",
            "AZURE_STORAGE_CLIENT_ID",
            "AZURE_CLIENT_ID",
            "AZURE_CLIENT_SECRET",
            "AZURE_TENANT_ID",
            "AZURE_FEDERATED_TOKEN_FILE",
        ),
        (),
    ),
    "Hugging Face": (
        "hf://",
        ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"),
        (".cache/huggingface/token",),
    ),
    "servers of ckpt": ("https://", ("CKPT_TOKEN", "CKPT_TOKEN_FILE", "CKPT_CERTIFICATE"), ()),
}
"""By the store's name: the beginning of its URLs, its variables, and its files below the home folder."""

_NAME_FILES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "AZURE_FEDERATED_TOKEN_FILE",
    "HF_TOKEN_PATH",
    "CKPT_TOKEN_FILE",
    "CKPT_CERTIFICATE",
)
"""Variables whose value is the path of a file."""


def find_credentials(environment: Mapping[str, str], home: Path) -> tuple[StoreCredentials, ...]:
    """What is present for each store. Files are not opened, and no store is contacted."""
    return tuple(
        StoreCredentials(
            store=store,
            url=url,
            variables=tuple(name for name in variables if environment.get(name)),
            files=tuple(f"~/{name}" for name in files if _exists(home / name)),
            missing_files=tuple(
                name
                for name in _NAME_FILES
                if name in variables and (path := environment.get(name)) and not _exists(Path(path))
            ),
        )
        for store, (url, variables, files) in STORES.items()
    )


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no permission to look; a path with a NUL
        return False
