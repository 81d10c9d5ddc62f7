"""The answer of a store that refuses a request: its status, its code, its message; and what to do then.

`obstore` has all of it in the text of its errors only.
"""

import re
from dataclasses import dataclass

from ckpt_formats.core.store_path import StoreError
from ckpt_formats.core.text import printable
from ckpt_formats.stores.repetition import Transient

_MAX_TEXT = 300
_STATUS = re.compile(r"status code: (\d{3})(?: ([\w ]+))?")
_CODE = re.compile(r"<Code>([\w.-]{1,80})</Code>|^x-ms-error-code: ([\w-]{1,80})|\"reason\": \"(\w{1,80})\"", re.M)
_MESSAGE = re.compile(r"<Message>([^<]{1,1000})|\"message\": \"([^\"]{1,1000})\"")
_REGION = re.compile(r"<Region>([\w-]{1,40})</Region>")
_NO_ANSWER = re.compile(r"kind: (Connect|Timeout|Dns)|source: (TimedOut)")
_METADATA = re.compile(r"169\.254\.|metadata\.google\.internal|fd00:ec2::|metadata/identity|computeMetadata", re.I)
_THROTTLED_STATUSES, _PASSING_STATUSES = (429, 503), (408, 409, 500, 502, 503, 504, 429, 598, 599)
_THROTTLED_CODES = ("SlowDown", "TooManyRequests", "ServerBusy", "rateLimitExceeded", "RequestLimitExceeded")
_UNDECIDED_CODES = ("ConditionalRequestConflict", "OperationAborted")
_PASSING_CODES = ("RequestTimeout", "InternalError", "IncompleteBody", *_UNDECIDED_CODES, *_THROTTLED_CODES)
_REGION_HINT = "Set AWS_REGION to the region of the bucket, and AWS_ENDPOINT_URL if another server has it."
_RIGHTS = "Check the credentials in the environment, and that they may list and read this bucket."
_KEYS = "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: they are those of another account or server, or mistyped."
_NEW_TOKEN = "Get new credentials (for a profile: aws sso login), and run the same command again."
_HINTS = {
    "ExpiredToken": _NEW_TOKEN,
    "ExpiredTokenException": _NEW_TOKEN,
    "TokenRefreshRequired": _NEW_TOKEN,
    "InvalidToken": "Set AWS_SESSION_TOKEN to the token that was issued together with the keys, or unset it.",
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "AccessDenied": _RIGHTS,
    "AllAccessDisabled": _RIGHTS,
    "AccountProblem": "Ask the provider of the store: it has suspended the account.",
    "NoSuchBucket": "Check the name of the bucket, and AWS_ENDPOINT_URL, which names the server.",
    "NoSuchKey": "Check the path: `ckpt inspect` of the folder above shows what is there.",
    "RequestTimeTooSkewed": "Set the clock of this machine: it differs from that of the store by minutes.",
    "PermanentRedirect": _REGION_HINT,
    "AuthorizationHeaderMalformed": _REGION_HINT,
    "IllegalLocationConstraintException": _REGION_HINT,
    "SlowDown": "Run the same command again later, or with fewer --workers.",
    "InvalidObjectState": "Restore the object from the archive of the store first.",
    "KeyTooLongError": "Choose a shorter path.",
    "EntityTooLarge": "The store takes no objects of this size: choose a format of several files.",
    "QuotaExceeded": "Free space in the store.",
    "AuthenticationFailed": "Check AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN: they may have ended.",
    "AuthorizationFailure": _RIGHTS,
    "AuthorizationPermissionMismatch": "Ask for the role `Storage Blob Data Reader`, or `Contributor` to write.",
    "ContainerNotFound": "Check the name of the container: az://ACCOUNT/CONTAINER/KEY.",
}
"""By the code of the store: what its user can do."""
_HINTS_BY_STATUS = {401: _RIGHTS, 403: _RIGHTS, 301: _REGION_HINT}
_NO_PATH = "Encountered object with invalid path"
"""In the library's text if a listing has a key with an empty part, or with one that is `.` or `..`."""
_RENAME = "Name the folder of the checkpoint if the object is not in it, or rename the object."
_UNREACHED = "Check the network, the name of the store, and the endpoint that the environment names, if it does."
_NO_CREDENTIALS = (
    "Set the credentials of the store in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
    "GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_ACCOUNT_KEY), or read a public bucket with --anonymous."
)
_WRONG = {
    "Received non-partial response": "the store answers with the whole object in place of a range",
    "Content-Range header": "the store does not say which range it answers with",
    "Requested ": "the store answers with another range than was requested",
    "Invalid last modified": "the store answers with a time that is none",
    "invalid list response": "the store answers with a listing that cannot be read",
}
"""By the text of the library: how an answer is wrong."""


@dataclass(frozen=True)
class Refusal:
    """Why a request failed."""

    text: str
    """For the user: one line without addresses, signatures and control characters."""
    status: int | None = None
    """None: there was no answer."""
    code: str = ""
    """In the words of the store, such as `NoSuchBucket`; empty if it gives none."""
    hint: str | None = None
    is_wrong: bool = False
    """Whether the store answered another request than it got."""
    is_unreached: bool = False
    """Whether there was no connection."""

    @classmethod
    def of(cls, error: BaseException) -> "Refusal":
        """Why a request of `obstore`, or of the client of a store, failed."""
        if isinstance(error, StoreError):
            return cls(error.strerror, 403 if error.is_denied else None, hint=error.hint)
        text = str(error).partition("\n\nDebug source")[0]
        if _METADATA.search(text):
            return cls("there are no credentials for this store", 401, "NoCredentials", _NO_CREDENTIALS)
        status, code = _STATUS.search(text), _first(_CODE, text)
        if code == "AuthorizationHeaderMalformed" and (region := _REGION.search(text)) is not None:
            return cls(_line(text, status, code), 400, code, f"Set AWS_REGION={region[1]}: the bucket is there.")
        if status is None and "redirect without LOCATION" in text:
            return cls("PermanentRedirect: the bucket is in another region", 301, "PermanentRedirect", _REGION_HINT)
        if status is None and _NO_PATH in text:
            reason = _shown(text.partition(_NO_PATH)[2].lstrip(": "))
            return cls(f"the key of an object is no path: {reason}", 400, hint=_RENAME)
        if status is None:
            wrong = next((words for mark, words in _WRONG.items() if mark in text), None)
            is_unreached = _first(_NO_ANSWER, str(error)) in ("Connect", "Dns")
            hint = _UNREACHED if is_unreached else None
            return cls(wrong or _unanswered(error), hint=hint, is_wrong=wrong is not None, is_unreached=is_unreached)
        number = int(status[1])
        hint = _HINTS.get(code) or _HINTS_BY_STATUS.get(number)
        return cls(_line(text, status, code), number, code, hint)

    @property
    def is_throttled(self) -> bool:
        """Whether the store says that there are too many requests."""
        return self.status in _THROTTLED_STATUSES or self.code in _THROTTLED_CODES

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status is None or self.status in _PASSING_STATUSES or self.code in _PASSING_CODES

    @property
    def is_undecided(self) -> bool:
        """Whether the store does not say if a condition holds, as another request for the same object goes on."""
        return self.code in _UNDECIDED_CODES

    @property
    def is_denied(self) -> bool:
        """Whether the credentials are missing, or allow it not."""
        return self.status in (401, 403)

    @property
    def is_absence(self) -> bool:
        """Whether there is no such object. That there is no such bucket is another thing."""
        return self.status == 404 and self.code not in ("NoSuchBucket", "ContainerNotFound", "NoSuchUpload")

    def error(self, where: str) -> Exception:
        """What to raise within a request: `Transient` if it may pass, else `StoreError`."""
        if self.may_pass:
            return Transient(
                self.text,
                self.is_throttled,
                is_wrong=self.is_wrong,
                is_unreached=self.is_unreached,
                hint=self.hint,
            )
        denied = "the store refuses: " if self.is_denied and self.code != "NoCredentials" else ""
        return StoreError(f"{denied}{self.text}", where, self.hint, self.is_denied)


def _first(pattern: "re.Pattern[str]", text: str) -> str:
    match = pattern.search(text)
    return "" if match is None else next(filter(None, match.groups()), "")


def _line(text: str, status: "re.Match[str] | None", code: str) -> str:
    line = "" if status is None else f"{status[1]} {status[2] or ''}".strip()
    message = _first(_MESSAGE, text).strip().partition("\n")[0].rstrip(".")
    line = f"{line}, {code}" if code else line
    return _shown(f"{line}: {message}" if message else line)


def _unanswered(error: BaseException) -> str:
    """Without a status of the store: what the line, or the library, says."""
    kind = _first(_NO_ANSWER, str(error))
    if kind in ("Connect", "Dns"):
        return "the store cannot be reached: no connection"
    if kind in ("Timeout", "TimedOut"):
        return "the store does not answer in time"
    line = (str(error).partition("\n")[0] or type(error).__name__).removeprefix("Generic S3 error: ")
    return _shown(line)


def _shown(line: str) -> str:
    """What follows a `?` in a URL is left out: it may be a signature."""
    return printable(re.sub(r"\?[^\s\")]*", "?…", line))[:_MAX_TEXT]
