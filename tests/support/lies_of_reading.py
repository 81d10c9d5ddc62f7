"""How stores lie to what reads, each as a function; see `lying_store`. With each: what a reader must do."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import formatdate

from lying_store import LOST, Answer, Handler, Lie, MemoryStore, Object, Request, failure, listing

EXACT = ""
"""The reader gets what is there."""


@dataclass(frozen=True)
class ReadingLie:
    """A lie, and what becomes of a reader."""

    tell: Lie
    outcome: str
    """`EXACT`, or a pattern of the error that it must get."""


READING: dict[str, ReadingLie] = {}
"""The lies, by what they do."""
Act = Callable[[MemoryStore, Request], Answer]
_CHANGED = "changed or replaced"
_DATA = r"\.safetensors$"


def _add(name: str, kinds: str, act: Act, outcome: str, pattern: str = _DATA, times: int = 1 << 30) -> None:
    """Do `act` for requests of some kinds for keys that match, the first `times` of each key; else be honest."""

    def tell(store: MemoryStore) -> Handler:
        counts = Counter[str]()

        def answer(request: Request) -> Answer:
            if request.kind in kinds.split(",") and re.search(pattern, request.key) and counts[request.key] < times:
                counts[request.key] += 1
                return act(store, request)
            return store.answer(request)

        return answer

    READING[name] = ReadingLie(tell, outcome)


def _altered(change: Callable[[Answer], Answer]) -> Act:
    return lambda store, request: change(store.answer(request))


def _with_body(change: Callable[[bytes], bytes]) -> Act:
    return _altered(lambda answer: replace(answer, body=change(answer.body)))


def _with_header(name: str, value: str) -> Act:
    return _altered(lambda answer: replace(answer, headers={**answer.headers, name: value}))


def _without_header(name: str) -> Act:
    return _altered(lambda answer: replace(answer, headers={k: v for k, v in answer.headers.items() if k != name}))


def _replaced(store: MemoryStore, request: Request) -> Answer:
    """The object is another one now, and the condition of the request is ignored."""
    there = store.objects[request.key]
    store.objects[request.key] = Object.of(bytes(len(there.data)))
    try:
        return store.answer(request.without("if-match"))
    finally:
        store.objects[request.key] = there


def _rewritten(store: MemoryStore, request: Request) -> Answer:
    """The object was written again at another time, under the same e_tag."""
    there = store.objects[request.key]
    answer = store.answer(request)
    return replace(answer, headers={**answer.headers, "last-modified": formatdate(there.modified + 60, usegmt=True)})


def _grown(store: MemoryStore, request: Request) -> Answer:
    answer = store.answer(request)
    size = len(store.objects[request.key].data)
    stated = answer.headers.get("content-range", "").replace(f"/{size}", f"/{size + 8}")
    return replace(answer, headers={**answer.headers, "content-range": stated})


def _whole(store: MemoryStore, request: Request) -> Answer:
    return store.answer(request.without("range"))


def _shifted(store: MemoryStore, request: Request) -> Answer:
    """The range that begins a byte later, and says so."""
    first, last = map(int, re.findall(r"\d+", request.headers["range"]))
    return store.answer(replace(request, headers={**request.headers, "range": f"bytes={first + 1}-{last}"}))


def _failing(status: int, code: str) -> Act:
    return lambda store, request: failure(status, code)


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


_add("ignores If-Match and gives another object", "get", _replaced, _CHANGED)
_add("gives another e_tag", "get", _with_header("etag", '"0123456789abcdef0123456789abcdef"'), _CHANGED)
_add("gives another time", "get", _rewritten, _CHANGED)
_add("gives another size", "get", _grown, _CHANGED)
_add("marks its e_tags as weak", "get", _altered(lambda a: a.with_headers(etag=f"W/{a.headers['etag']}")), EXACT)
_add("gives no e_tag", "get", _without_header("etag"), EXACT)
_add("gives no time", "get", _without_header("last-modified"), EXACT)
_add("gives a time that is none", "get", _with_header("last-modified", "yesterday"), "a time that is none")
_add("answers with the whole object", "get", _whole, EXACT)
_add("answers with the whole object, cut", "get", lambda s, r: _cut(_whole(s, r)), "bytes in place of|body")
_add("answers with the whole object, grown", "get", lambda s, r: _more(_whole(s, r)), _CHANGED)
_add("answers with another range", "get", _shifted, "another range|changed or replaced")
_add("does not say which range", "get", _without_header("content-range"), "which range")
_add("gives a short body", "get", _with_body(lambda data: data[:-1]), "bytes in place of")
_add("gives a long body", "get", _with_body(lambda data: data + b"\0"), "bytes in place of")
_add("gives an empty body", "get", _with_body(lambda data: b""), "bytes in place of")
_add("gives a body with a flipped bit", "get", _with_body(_flipped), "MD5")
_add("gives a body with a flipped bit once", "get", _with_body(_flipped), EXACT, times=1)
_add("gives a body of zeros", "get", _with_body(lambda data: bytes(len(data))), "MD5")
_add("breaks the connection", "get", lambda store, request: LOST, "connection|error sending|body")
_add("breaks the connection twice", "get", lambda store, request: LOST, EXACT, times=2)
_add("breaks off the body once", "get", lambda s, r: _cut(s.answer(r)), EXACT, times=1)
_add("has removed the object", "get", _failing(404, "NoSuchKey"), "removed while it was read")
_add("has lost the bucket", "get", _failing(404, "NoSuchBucket"), "NoSuchBucket")
_add("says that the range is wrong", "get", _failing(416, "InvalidRange"), "InvalidRange")
_add("is slow for a while", "get", _failing(503, "SlowDown"), EXACT, times=3)
_add("is slow for ever", "get", _failing(503, "SlowDown"), "SlowDown")
_add("has an internal error for a while", "get,list,head", _failing(500, "InternalError"), EXACT, "", times=2)
_add("has an internal error for ever", "get", _failing(500, "InternalError"), "InternalError")
_add("asks for another region", "get", _failing(400, "AuthorizationHeaderMalformed"), "AuthorizationHeaderMalformed")
_add("takes the token for expired", "get", _failing(400, "ExpiredToken"), "ExpiredToken")
_add("denies one object", "get", _failing(403, "AccessDenied"), "AccessDenied")
_add("fails with a page for people", "get", lambda s, r: Answer(502, {}, b"<html>Bad Gateway</html>"), "502")


def _cut(answer: Answer) -> Answer:
    return replace(answer, body=answer.body[: len(answer.body) // 2], length=len(answer.body), breaks=True)


def _more(answer: Answer) -> Answer:
    return replace(answer, body=answer.body + bytes(8))


# Listings.


def _listed(change: Callable[[dict[str, Object], str], dict[str, Object]]) -> Act:
    """The honest answer of a store that has other objects."""
    return lambda store, request: listing(change(dict(store.objects), request.query.get("prefix", "")), request)


def _stale(objects: dict[str, Object], prefix: str) -> dict[str, Object]:
    """What was there before the objects were replaced."""
    return {key: replace(one, e_tag=f'"{"0" * 32}"', modified=one.modified - 9e3) for key, one in objects.items()}


def _without_shards(objects: dict[str, Object], prefix: str) -> dict[str, Object]:
    return {key: one for key, one in objects.items() if "00002-of" not in key}


def _for_ever(store: MemoryStore, request: Request) -> Answer:
    """The first page again and again, with one token."""
    answer = listing(store.objects, replace(request, query={"prefix": request.query.get("prefix", "")}))
    more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    return replace(answer, body=answer.body.replace(b"<IsTruncated>false</IsTruncated>", more))


def _of_others(store: MemoryStore, request: Request) -> Answer:
    return listing(store.objects, replace(request, query={}))


def _denied_beside(store: MemoryStore, request: Request) -> Answer:
    """Only what is below the checkpoint may be listed."""
    if request.query.get("prefix", "").startswith(("run/hf/", "run/whole/")):
        return store.answer(request)
    return failure(403, "AccessDenied")


_add("lists what was there before", "list", _listed(_stale), _CHANGED, "")
_add("lists a shard not yet", "list", _listed(_without_shards), "missing|absent|not there|no such|lack", "")
_add("repeats its listing for ever", "list", _for_ever, "the same objects twice", "")
_add("lists what was not requested", "list", _of_others, "not requested", "")
_add("lists nothing", "list", _listed(lambda objects, prefix: {}), "nothing at this path", "")
_add("answers a listing with a page for people", "list", lambda s, r: Answer(200, {}, b"<html>"), "cannot be read", "")
_add("breaks off a listing once", "list", lambda s, r: _cut(s.answer(r)), EXACT, "", times=1)
_add("breaks the connection of listings twice", "list", lambda s, r: LOST, EXACT, "", times=2)
_add("is slow to list for a while", "list", _failing(503, "SlowDown"), EXACT, "", times=3)
_add("denies listings", "list", _failing(403, "AccessDenied"), "AccessDenied", "")
_add("denies listings beside the checkpoint", "list", _denied_beside, EXACT, "")
_add("denies to say whether an object is there", "head", _failing(403, "AccessDenied"), EXACT, "")
_add("has no such bucket", "list,get,head", _failing(404, "NoSuchBucket"), "NoSuchBucket", "")
_add("does not know the key", "list,get,head", _failing(403, "InvalidAccessKeyId"), "InvalidAccessKeyId", "")
_add("rejects the signature", "list,get,head", _failing(403, "SignatureDoesNotMatch"), "SignatureDoesNotMatch", "")
_add("finds the clock wrong", "list,get,head", _failing(403, "RequestTimeTooSkewed"), "RequestTimeTooSkewed", "")
_add("has an invalid token", "list,get,head", _failing(400, "InvalidToken"), "InvalidToken", "")


def _with_placeholders(*keys: str) -> Act:
    return _listed(lambda objects, prefix: {**objects, **dict.fromkeys(keys, Object.of(b""))})


_add("has a folder's placeholder", "list", _with_placeholders("run/hf/"), EXACT, "")
_add("has placeholders of inner folders", "list", _with_placeholders("run/hf/.cache/", "run/hf/"), EXACT, "")
_add("has Hadoop's placeholders", "list", _with_placeholders("run/hf/.cache_$folder$", "run/hf_$folder$"), EXACT, "")
