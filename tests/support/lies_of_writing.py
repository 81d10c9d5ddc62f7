"""How stores lie to what writes, each as a function; see `lying_store`."""

import re
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate

from lying_store import LOST, Answer, Handler, Lie, MemoryStore, Object, Request, failure, keys_in, listing

WRITING: dict[str, Lie] = {}
"""The lies, by what they do."""
_STORES = ("put", "part", "complete")
_NOTES = r"\.ckpt"
_MARK = r"manifest\.json$|\.metadata$|latest$"
_DATA = r"\.safetensors$|\.ucp$|\.pt$|\.bin$"


def _lie(tell: Lie) -> Lie:
    WRITING[tell.__name__.replace("_", " ")] = tell
    return tell


def _when(kinds: str, pattern: str, act: Callable[[MemoryStore, Request], Answer]) -> Lie:
    """The lie that does `act` for requests of some kinds for keys that match, and is honest otherwise."""

    def tell(store: MemoryStore) -> Handler:
        def answer(request: Request) -> Answer:
            concerned = request.kind in kinds.split(",") and re.search(pattern, request.key)
            return act(store, request) if concerned else store.answer(request)

        return answer

    return tell


def _add(name: str, kinds: str, pattern: str, act: Callable[[MemoryStore, Request], Answer]) -> None:
    WRITING[name] = _when(kinds, pattern, act)


def _acknowledged(store: MemoryStore, request: Request) -> Answer:
    refused = store._refused(request)
    return refused or Answer(200, {"etag": Object.of(request.body).e_tag})


for _name, _pattern in {
    "the mark of the whole": _MARK,
    "an index": r"index\.safetensors$|index\.json$",
    "a pack": r"packs/",
    "a single file": r"/single\.",
    "the list of a chain": r"chain\.json$",
    "the job": rf"{_NOTES}/job$",
    "the journal": rf"{_NOTES}/journal/",
    "the note that the target is published": rf"{_NOTES}/published$",
    "the lease": rf"{_NOTES}.*/lease$",
    "everything": "",
}.items():
    _add(f"acknowledges {_name} and does not store it", "put", _pattern, _acknowledged)


def _damaged(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def _stores_damaged(store: MemoryStore, request: Request) -> Answer:
    return store.answer(replace(request, body=_damaged(request.body)))


def _stores_half(store: MemoryStore, request: Request) -> Answer:
    return store.answer(replace(request, body=request.body[: len(request.body) // 2]))


def _stores_zeros_at_the_end(store: MemoryStore, request: Request) -> Answer:
    return store.answer(replace(request, body=request.body[:-1] + b"\0" if request.body else b""))


def _with_other_tag(tag: Callable[[Request], str], change: Callable[[bytes], bytes]) -> Callable[..., Answer]:
    """Store changed bytes under an e_tag of the store's choice."""

    def act(store: MemoryStore, request: Request) -> Answer:
        answer = store.answer(request)
        if answer.status != 200:
            return answer
        there = store.objects[request.key]
        store.objects[request.key] = replace(there, data=change(request.body), e_tag=tag(request))
        return answer.with_headers(etag=tag(request))

    return act


_add("damages data on the way, and says so by its e_tag", "put", _DATA, _stores_damaged)
_add("damages the mark on the way", "put", _MARK, _stores_damaged)
_add("stores half of the data", "put", _DATA, _stores_half)
_add("stores half of everything", "put", "", _stores_half)
_add("stores another last byte", "put", _DATA, _stores_zeros_at_the_end)
_add(
    "damages data, and has e_tags that say nothing",
    "put",
    "",
    lambda store, request: _with_other_tag(
        lambda one: f'"{len(store.objects):x}-opaque"',
        _damaged if re.search(_DATA, request.key) else bytes,
    )(store, request),
)
_add("has e_tags that say nothing", "put", "", _with_other_tag(lambda one: f'"{abs(hash(one.body)):x}-x"', bytes))
_add("has one e_tag for all objects", "put", "", _with_other_tag(lambda one: '"0"', bytes))
_add(
    "has e_tags that look like an MD5 and are none",
    "put",
    "",
    _with_other_tag(lambda one: Object.of(one.body + b"key").e_tag, bytes),
)
_add(
    "gives no e_tag",
    "put",
    "",
    lambda store, request: replace(store.answer(request), headers={}),
)
_add(
    "gives another e_tag than it lists",
    "put",
    "",
    lambda store, request: store.answer(request).with_headers(etag=f'"{"0" * 32}"'),
)


def _without(*headers: str) -> Callable[[MemoryStore, Request], Answer]:
    return lambda store, request: store.answer(request.without(*headers))


_add("ignores If-None-Match", "put,complete", "", _without("if-none-match"))
_add("ignores If-Match", "put,complete", "", _without("if-match"))
_add("ignores all conditions", "put,complete", "", _without("if-match", "if-none-match"))


def _times(count: int, kinds: str, pattern: str, act: Callable[[MemoryStore, Request], Answer]) -> Lie:
    """As `_when`, the first `count` times for each key."""

    def tell(store: MemoryStore) -> Handler:
        counts: dict[tuple[str, str], int] = {}

        def first(store: MemoryStore, request: Request) -> Answer:
            with store.lock:
                number = counts[request.kind, request.key] = counts.get((request.kind, request.key), 0) + 1
            return act(store, request) if number <= count else store.answer(request)

        return _when(kinds, pattern, first)(store)

    return tell


def _carried_out_then(answer: Answer) -> Callable[[MemoryStore, Request], Answer]:
    def act(store: MemoryStore, request: Request) -> Answer:
        store.answer(request)
        return answer

    return act


WRITING["damages the list of a chain on the way, twice"] = _times(2, "put", r"chain\.json$", _stores_damaged)
WRITING["loses the first answer to each PUT"] = _times(1, "put", "", _carried_out_then(LOST))
WRITING["says 500 to each PUT that it has carried out, once"] = _times(
    1, "put", "", _carried_out_then(failure(500, "InternalError"))
)
WRITING["damages the list of a chain on the way, twice"] = _times(2, "put", r"chain\.json$", _stores_damaged)
WRITING["loses the first answer to each deletion"] = _times(1, "delete,bulk delete", "", _carried_out_then(LOST))
WRITING["is busy at the first request for each key"] = _times(
    1, "put,get,head,list,bulk delete", "", lambda store, request: failure(503, "SlowDown")
)
WRITING["says 429 and to come back in an hour, once"] = _times(
    1, "put", "", lambda store, request: failure(429, "TooManyRequests").with_headers(retry_after="3600")
)
_add("says 412 to PUTs that it has carried out", "put", _DATA, _carried_out_then(failure(412, "PreconditionFailed")))
_add("is busy for ever when data are put", "put", _DATA, lambda store, request: failure(503, "SlowDown"))
_add("refuses the mark", "put", _MARK, lambda store, request: failure(403, "AccessDenied"))
_add("refuses the list of a chain", "put", r"chain\.json$", lambda store, request: failure(403, "AccessDenied"))
_add(
    "answers PUTs as a captive portal does",
    "put",
    "",
    lambda store, request: Answer(200, {"content-type": "text/html"}, b"<html>Please log in</html>"),
)


def _late(pattern: str) -> Lie:
    """A PUT is carried out once more at each later request for a deletion or a listing, as one that a proxy held."""

    def tell(store: MemoryStore) -> Handler:
        held: dict[str, Request] = {}

        def answer(request: Request) -> Answer:
            result = store.answer(request)
            if request.kind == "put" and re.search(pattern, request.key):
                held[request.key] = request
            elif request.kind in ("bulk delete", "delete"):
                for one in held.values():
                    store.answer(one)
            return result

        return answer

    return tell


for _name, _pattern in {
    "the job": rf"{_NOTES}/job$",
    "the list of what is committed": rf"{_NOTES}/committed$",
    "the journal": rf"{_NOTES}/journal/",
    "all notes": _NOTES,
    "the note that the target is published": rf"{_NOTES}/published$",
    "data": _DATA,
}.items():
    WRITING[f"carries out the PUT of {_name} again, late"] = _late(_pattern)


def _stale(kinds: str, pattern: str) -> Lie:
    """Reads show what was there when the operation began."""

    def tell(store: MemoryStore) -> Handler:
        old = MemoryStore()
        old.objects = dict(store.objects)
        return _when(kinds, pattern, lambda store, request: old.answer(request))(store)

    return tell


WRITING["shows old listings"] = _stale("list", "")
WRITING["reads chain.json as it was"] = _stale("get,head", r"chain\.json$")


def _one_behind(kinds: str, pattern: str) -> Lie:
    """Reads show each object as it was before its last change."""

    def tell(store: MemoryStore) -> Handler:
        before: dict[str, Object | None] = {}

        def answer(request: Request) -> Answer:
            if request.kind == "put":
                with store.lock:
                    there = store.objects.get(request.key)
                    result = store.answer(request)
                    if result.status == 200:
                        before[request.key] = there
                return result
            if request.kind in kinds.split(",") and re.search(pattern, request.key) and request.key in before:
                old = MemoryStore()
                there = before[request.key]
                old.objects = {} if there is None else {request.key: there}
                return old.answer(request)
            return store.answer(request)

        return answer

    return tell


WRITING["reads each object as it was before its last change"] = _one_behind("get,head", "")


def _listed(change: Callable[[dict[str, Object]], dict[str, Object]]) -> Callable[[MemoryStore, Request], Answer]:
    return lambda store, request: listing(change(dict(store.objects)), request)


_add("lists nothing", "list", "", _listed(lambda objects: {}))
_add(
    "does not list data",
    "list",
    "",
    _listed(lambda objects: {key: one for key, one in objects.items() if not re.search(_DATA, key)}),
)
_add(
    "lists other sizes",
    "list",
    "",
    _listed(lambda objects: {key: replace(one, data=one.data + b"x") for key, one in objects.items()}),
)
_add("says of all objects that they are not there", "head", "", lambda store, request: failure(404, "NoSuchKey"))
_add(
    "says another size of an object",
    "head",
    "",
    lambda store, request: replace(store.answer(request), length=7),
)
_add(
    "lists what there is an hour in the past",
    "list,head,get",
    "",
    lambda store, request: (
        _listed(lambda objects: {key: replace(one, modified=one.modified - 3600) for key, one in objects.items()})(
            store, request
        )
        if request.kind == "list"
        else _an_hour_ago(store.answer(request))
    ),
)


def _an_hour_ago(answer: Answer) -> Answer:
    return (
        answer
        if answer.status > 299
        else replace(answer, headers={**answer.headers, "last-modified": formatdate(0, usegmt=True)})
    )


_add("acknowledges deletions and does nothing", "delete", "", lambda store, request: Answer(204))
WRITING["acknowledges all deletions and does nothing"] = _when(
    "delete,bulk delete",
    "",
    lambda store, request: (
        Answer(204)
        if request.kind == "delete"
        else Answer(
            200,
            {},
            f"<DeleteResult>{''.join(f'<Deleted><Key>{key}</Key></Deleted>' for key in keys_in(request))}"
            "</DeleteResult>".encode(),
        )
    ),
)
_add("gives no right to delete", "delete,bulk delete", "", lambda store, request: failure(403, "AccessDenied"))
_add("knows no deletion of many", "bulk delete", "", lambda store, request: failure(501, "NotImplemented"))
_add(
    "says that a deletion of many is malformed", "bulk delete", "", lambda store, request: failure(400, "MalformedXML")
)
_add(
    "refuses each key in a deletion of many",
    "bulk delete",
    "",
    lambda store, request: Answer(
        200,
        {},
        (
            "<DeleteResult>"
            + "".join(
                f"<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
                for key in keys_in(request)
            )
            + "</DeleteResult>"
        ).encode(),
    ),
)
_add("reads notes as noise", "get", rf"{_NOTES}/(job|committed|journal)", lambda store, request: _noise(store, request))


def _noise(store: MemoryStore, request: Request) -> Answer:
    answer = store.answer(request)
    return replace(answer, body=b"\xff" * len(answer.body)) if answer.status < 300 else answer


@_lie
def puts_what_it_is_given_under_another_key(store: MemoryStore) -> Handler:
    def answer(request: Request) -> Answer:
        if request.kind == "put" and re.search(_DATA, request.key):
            return store.answer(replace(request, key=f"elsewhere/{request.key}"))
        return store.answer(request)

    return answer


@_lie
def swaps_what_is_put_at_once(store: MemoryStore) -> Handler:
    """Each object gets the bytes of the one that was put before it."""
    last = [b"first"]

    def answer(request: Request) -> Answer:
        if request.kind == "put" and not re.search(_NOTES, request.key):
            given, last[0] = last[0], request.body
            return store.answer(replace(request, body=given))
        return store.answer(request)

    return answer
