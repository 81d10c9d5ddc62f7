"""What each command prints with `--json`: the one place from which `docs/json.md` and `docs/schemas.json` are made.

A field is (type, description). A type is a name of `SIMPLE`, with `?` behind it if it may be null; a list with the
type of its items; a dict with fields, all of which are there but those whose names end in `?`; or `Map`, from texts to
a type.
"""

from typing import Any, NamedTuple

SIMPLE = {"text": "string", "int": "integer", "number": "number", "bool": "boolean"}


class Map(NamedTuple):
    """An object whose keys are names."""

    values: Any


class Part(NamedTuple):
    """What a command prints in one case."""

    when: str
    fields: dict[str, tuple[Any, str]]


NOTE = {
    "text": ("text", "the sentence"),
    "names": (["text"], "all names that it is about"),
    "weight": ("text", "`lost`: something is not in the result; `unsure`: look at it; `info`"),
}
NOTES = {"notes": ([NOTE], "what the command tells besides its result")}
_KINDS = (
    "`usage`, `not found`, `locked`, `damaged`, `incomplete`, `unsafe`, `unsupported`, `rules`, `no space`, `target`, "
    "`fault`, `interrupted`"
)
ERROR = {
    "error": (
        {
            "code": ("int", "the exit code"),
            "kind": ("text", _KINDS),
            "what": ("text", "what is wrong"),
            "where": ("text?", "the file, tensor or command"),
            "hint": ("text?", "what to do"),
        },
        "why the command failed",
    ),
    **NOTES,
}  # fmt: skip

_SCHEDULE = {
    "base_steps": ("int", "steps from base to base"),
    "flush_steps": ("int?", "steps from flush to flush of the log; null without a log"),
    "waste": ("number", "the share of all time that is wasted"),
    "seconds": ("number", "the expected seconds that are wasted for each second of training"),
    "day_nbytes": ("number?", "bytes written in a day"),
    "base_seconds": ("number", "the same interval in seconds"),
    "flush_seconds": ("number?", "the same interval in seconds"),
    "gain": ("number", "the share of waste that this schedule saves, against bases alone"),
}
_WRITTEN = {
    "target": ("text", "the path that was written"),
    "files": ("int", "files that were written"),
    "nbytes": ("int", "their bytes"),
    "seconds": ("number", "how long it took"),
    "resumed_files": ("int", "files that an earlier, interrupted run had written"),
    "status": ("text", "`written`, `pending` (with `--shard`: the target is not there yet) or `already complete`"),
    "pending?": ("text", "with `--shard`: what other shards have yet to do before the target is there"),
    "checksums_verified": ("int", "checksums of the source that were compared"),
    "seal_file?": ("text", "with `--seal`: the file with the target's checksums"),
    "changed_values?": (
        [
            {
                "tensor": ("text", "its name"),
                "dtype": ("text", "its new element type"),
                "overflows": ("int", "values that are too large for it, and now infinite or NaN"),
                "underflows": ("int", "values that are too small for it, and now zero"),
                "not_finite": ("int", "results of an average or a merge that are NaN or infinite"),
            }
        ],
        "tensors with values that were changed other than by rounding",
    ),
}
_PARTIAL = {
    "partial?": (
        {
            "states": ("int", "states with blocks of an earlier step"),
            "older": ("int", "elements that are of an earlier step"),
            "elements": ("int", "elements in all"),
            "oldest_step": ("int?", "the earliest step"),
            "step": ("int?", "the step of the rest"),
        },
        "what `--partial` took from an earlier step",
    )
}
_PLANNED = {
    "target": ("text", "the path that would be written"),
    "format": ("text", "its format"),
    "nbytes": ("int", "about how many bytes"),
    "files": (
        [{"file": ("text", "path in the target"), "nbytes": ("int", "bytes"), "tensors": (["text"], "names")}],
        "the files",
    ),
    "store_reads?": (
        {"nbytes": ("int", "about how many bytes"), "requests": ("int", "about how many requests")},
        "what would be read from stores; not there if all files are local",
    ),
}
_STATES = {
    "raw_nbytes": ("int", "bytes of the decoded states"),
    "stored_nbytes": ("int", "bytes as stored"),
    "ratio": ("number?", "the quotient of both"),
    "states": (
        [
            {
                "state": ("text", "its name, such as `exp_avg`"),
                "dtype": ("text", "element type"),
                "elements": ("int", "elements"),
                "raw_nbytes": ("int", "bytes, decoded"),
                "stored_nbytes": ("int", "bytes, stored"),
                "ratio": ("number?", "the quotient of both"),
                "bits_per_element": ("number", "stored bits of an element"),
                "codecs": (["text"], "codecs"),
            }
        ],
        "a row for each kind of state",
    ),
}
_APPENDED = {
    "target": ("text", "the chain, or the delta"),
    "step": ("int", "the step"),
    "kind": ("text", "`base` or `delta`"),
    "folder": ("text", "the new folder in the chain"),
    "content": ("text", "the id of the content"),
    "codecs": (["text"], "codecs"),
    "raw_nbytes": ("int", "bytes of the decoded states"),
    "stored_nbytes": ("int", "bytes as stored"),
    "shared_nbytes?": ("int", "bytes that were not stored again: they are in earlier states"),
    "ratio": ("number", "the quotient of raw and stored"),
    "exact": ("bool", "whether every bit comes back"),
    "errors": (Map("any"), "the errors of lossy states, by name"),
    "seconds": ("number", "how long it took"),
    "checksums_verified": ("int", "checksums of the source that were compared"),
    "evaluation?": (
        {"step": ("number", "the step size"), "loss": ("number", "its loss"), "exact": ("number", "the exact loss")},
        "what `--eval-cmd` found",
    ),
}
_ESTIMATED = {
    "chain?": ("text", "the chain"),
    "step?": ("int", "the step"),
    "kind?": ("text", "`base` or `delta`"),
    "target?": ("text", "the delta"),
    "parent?": ("text", "the checkpoint against which it is stored"),
    "estimate": ("bool", "true"),
    "raw_nbytes": ("int", "bytes of the decoded states"),
    "stored_nbytes": ("int", "about how many bytes would be stored"),
    "ratio": ("number", "the quotient of both"),
    "approximate?": ("text", "the codec, if it is lossy"),
}
_FIGURES = {
    "elements": ("int", "elements"),
    "changed": ("int", "elements that differ"),
    "max": ("number?", "the largest difference"),
    "rms": ("number?", "the root of the mean square of the differences"),
    "relative": ("number?", "their norm divided by that of the first"),
    "cosine": ("number?", "the cosine between both"),
    "not_finite": ("int", "elements that are NaN or infinite in one or both; if any, the figures above are null"),
    "codes": ("int", "elements of quantised weights, of which only the bits are compared"),
    "histogram": (
        {"lowest": ("int", "the power of two of the first count"), "counts": (["int"], "differences by power of two")},
        "how large the differences are",
    ),
}
_FINDINGS = {
    "path": ("text", "the checkpoint"),
    "ok": ("bool", "whether nothing was found"),
    "findings": (
        [
            {
                "kind": ("text", "`coverage`, `header`, `checksum`, `values`, `replicas`, `copy`, `suspicious`, ..."),
                "what": ("text", "what is wrong"),
                "where": ("text", "the file"),
                "tensors": (["text"], "the tensors that it affects"),
            }
        ],
        "all damage",
    ),
    "seconds": ("number", "how long it took"),
}
_COUNTS = {
    "tensor": ("text", "its name"),
    "state": ("text", "its state"),
    "nan": ("int", "values that are NaN"),
    "infinite": ("int", "values that are infinite"),
}
_NOT_FINITE = (
    [_COUNTS],
    "states with NaN or infinity, of values with checksums, or all with `--values`; absent if none was read",
)
_MEMBER = {
    "step": ("int", "the step"),
    "kind": ("text", "`base` or `delta`"),
    "folder": ("text", "its folder"),
    "content": ("text", "the id of its content"),
    "time": ("text", "when it was written, in ISO 8601"),
    "codecs": (["text"], "codecs"),
    "raw_nbytes": ("int", "bytes of the decoded states"),
    "stored_nbytes": ("int", "bytes as stored"),
    "shared_nbytes?": ("int", "bytes that are in earlier states"),
    "ratio": ("number", "the quotient of raw and stored"),
    "restore": (
        {"reads_nbytes": ("int", "bytes that are read"), "deltas": ("int", "deltas that are replayed")},
        "what restoring it takes",
    ),
    "exact": ("bool", "whether every bit comes back"),
    "errors": (Map("any"), "the errors of lossy states, by name"),
}
_SEGMENT = {
    "folder": ("text", "its folder"),
    "first": ("int", "the step before its first one"),
    "last": ("int?", "its last complete step"),
    "time": ("text", "when it began, in ISO 8601"),
    "error?": ("text?", "why it cannot be read"),
    "has_ended?": ("bool", "whether no more steps will follow"),
    "ranks?": ("int", "ranks that wrote it"),
    "codec?": ("text", "the codec of its gradients"),
    "optimizers?": (["any"], "type, method, exactness and figures of each optimizer"),
    "exact?": ("bool", "whether replayed states are exact"),
    "proved?": ("int?", "the last step up to which a replay beside the run had its states; null without proofs"),
    "difference?": ("text?", "how that replay differed from the run"),
    "doubts?": (
        [{"first": ("int", "the first step"), "last": ("int", "the last one"), "tensors": (["text"], "their names")}],
        "steps at which tensors may have had other values: the run changed them in a way that torch does not count",
    ),
    "elements?": ("int", "elements that each step changes"),
    "stored_nbytes?": ("int", "bytes"),
    "nbytes_per_parameter?": ("number", "bytes of a step for each parameter"),
    "torn?": (Map("text"), "files whose last records do not count, and why"),
}
_STATUS = {
    "step": ("int?", "the step of the states; null before the log begins"),
    "verified": ("int?", "the last step whose states had the fingerprint of the run"),
    "segment": ("text?", "the folder of the log that is followed"),
    "parameters": ("int", "elements that each step changes"),
    "nbytes": ("int", "bytes of the states in memory"),
    "lag_nbytes": ("int", "bytes of the log that are not applied yet"),
    "lag_steps": ("int", "about how many steps that is"),
    "steps": ("int", "steps that were applied"),
    "seconds": ("number", "how long these took"),
    "waiting": ("text?", "for what it waits"),
    "mparams_per_second": ("number", "millions of elements that were stepped in a second"),
}
_WRITE = (Part("", _WRITTEN), Part("with `--dry-run`", _PLANNED))

COMMANDS: dict[str, tuple[Part, ...]] = {
    "convert": _WRITE,
    "copy": (
        Part("", _WRITTEN),
        Part(
            "with `--dry-run`",
            {
                **{key: _PLANNED[key] for key in ("target", "format", "nbytes")},
                "files": (
                    [{"file": ("text", "its name below the source"), "nbytes": ("int", "its bytes")}],
                    "the files; the last ones make the target a checkpoint",
                ),
            },
        ),
        Part(
            "with `--update`; with `--follow`, an object on each line",
            {
                "target": ("text", "the target"),
                "objects": ("int", "objects that were put"),
                "nbytes": ("int", "their bytes"),
                "last": ("int?", "the last step that the chain had"),
                "grows": ("bool", "whether a run records into the chain"),
            },
        ),
    ),
    "reshard": (
        Part("", _WRITTEN),
        Part(
            "with `--dry-run`",
            {
                **{key: _PLANNED[key] for key in ("target", "format", "nbytes")},
                "files": (
                    [
                        {
                            "file": ("text", "path in the target"),
                            "role": ("text", "`model`, `optimizer`, ..."),
                            "rank": (Map("int"), "the rank, by axis"),
                            "nbytes": ("int", "bytes"),
                            "kept_nbytes": ("int", "bytes that this rank had before"),
                            "moved_nbytes": ("int", "bytes that come from other ranks"),
                        }
                    ],
                    "the files",
                ),
            },
        ),
    ),
    "inspect": (
        Part(
            "",
            {
                "path": ("text", "the checkpoint"),
                "format": ("text", "its format"),
                "origin": (
                    {
                        "engine": ("text", "who wrote it"),
                        "version": ("text?", "the engine's version"),
                        "step": ("int?", "the step"),
                        "layout": (Map("any"), "numbers of ranks and the like"),
                    },
                    "where it comes from",
                ),
                "parameters": (
                    [
                        {
                            "name": ("text", "its name"),
                            "role": ("text", "`parameter`, `frozen`, `buffer` or `extra`"),
                            "states": (
                                Map(
                                    {
                                        "dtype": ("text", "element type"),
                                        "shape": (["int"], "the shape of the whole tensor"),
                                        "nbytes": ("int", "bytes"),
                                        "blocks": ("int", "blocks of which it is put together"),
                                        "stored_nbytes?": ("int", "bytes as stored, if it is encoded"),
                                        "codec?": ("text", "its codec"),
                                    }
                                ),
                                "its tensors: `model`, `master`, `exp_avg`, ...",
                            ),
                            "values": (Map("any"), "states that are plain values, as typed JSON"),
                        }
                    ],
                    "all parameters",
                ),
                "aliases": (Map("text"), "other names of tied tensors"),
                "groups": (
                    [{"options": ("any", "as typed JSON"), "parameters": (["text"], "names")}],
                    "the groups of the optimizer",
                ),
                "extras": (Map("any"), "all other items, as typed JSON"),
                "files": (
                    [
                        {
                            "file": ("text", "path"),
                            "nbytes": ("int", "bytes"),
                            "role": ("text", "`model`, `optimizer`, ..."),
                            "rank": (Map("int"), "the rank that wrote it, by axis"),
                        }
                    ],
                    "its files",
                ),
                "shared?": (["any"], "packs of earlier states of a chain that it needs"),
            },
        ),
        Part(
            "of the folder of a run",
            {
                "path": ("text", "the folder"),
                "checkpoints": (
                    [
                        {
                            "name": ("text", "its name in the folder"),
                            "path": ("text", "its path"),
                            "format": ("text?", "its format"),
                            "step": ("int?", "its step"),
                            "nbytes": ("int?", "bytes of its files"),
                            "whole": ("bool", "whether its headers agree"),
                            "problem": ("text?", "why not"),
                        }
                    ],
                    "all checkpoints, the newest last",
                ),
                "meant": ("text?", "the one that commands read if the folder is named"),
                "latest": ("text?", "the one that a file in the folder, such as `latest`, names as the last"),
                "newest_whole": ("text?", "the newest whose headers agree"),
            },
        ),
    ),
    "verify": (
        Part(
            "of a checkpoint",
            {
                **_FINDINGS,
                "checksums": ("int", "checksums in its files"),
                "parameters": ("int", "parameters"),
                "not_finite?": _NOT_FINITE,
            },
        ),
        Part(
            "of a chain",
            {
                **_FINDINGS,
                "steps": (["int"], "stored steps"),
                "approximate_steps": (["int"], "those that are not exact"),
                "damaged_steps": (["int"], "those that cannot be restored"),
                "not_finite": (
                    [{"step": ("int", "the step"), **_COUNTS}],
                    "states with NaN or infinity, each tensor at the first stored step that has them",
                ),
            },
        ),
        Part("with `--quick`", {**_FINDINGS, "quick": ("bool", "true")}),
    ),
    "rules": (
        Part(
            "",
            {
                "path": ("text", "the checkpoint"),
                "sizes": (Map("any"), "the sizes of the model that formulas use"),
                "parameters": (
                    [
                        {
                            "name": ("text", "its name"),
                            "shape": (["int"], "the shape of the whole tensor"),
                            "rule": ("any", "null, or `how`, `match` and `origin`"),
                        }
                    ],
                    "the model's parameters",
                ),
            },
        ),
    ),
    "diff": (
        Part(
            "",
            {
                "first": ("text", "path"),
                "second": ("text", "path"),
                "same": ("bool", "whether nothing differs"),
                "steps": (["int?"], "the steps of both"),
                "formats": (["text"], "the formats of both"),
                "engines": (["text"], "the engines of both"),
                "versions": (["text?"], "the versions of both"),
                "layouts": (["text"], "the layouts of both"),
                "approximate": (["int"], "how many states of each are approximate"),
                "total": (_FIGURES, "the sums over all tensors"),
                "tensors": (
                    [
                        {
                            "name": ("text", "the parameter"),
                            "state": ("text", "`model`, `master`, `exp_avg`, ..."),
                            "layer": ("text", "its layer"),
                            "role": ("text", "its role in the layer"),
                            "kind": ("text", "`equal`, `changed`, `missing`, `added`, `reshaped`"),
                            "what": ("text", "shapes or types that differ"),
                            **_FIGURES,
                        }
                    ],
                    "all tensors",
                ),
                "tensors_only": ("bool", "whether values were left out"),
                "values": (["text"], "values that differ"),
                "groups?": (
                    [{"layer?": ("text", ""), "role?": ("text", ""), "state?": ("text", ""), "kind?": ("text", ""),
                      **_FIGURES}],
                    "sums, with `--by`",
                ),
            },
        ),
        Part("with `-o`", _APPENDED),
        Part("with `-o` and `--dry-run`", _ESTIMATED),
    ),
    "append": (Part("", _APPENDED), Part("with `--dry-run`", _ESTIMATED)),
    "restore": (
        Part("", {**_WRITTEN, **_PARTIAL}),
        Part(
            "with `--dry-run`",
            {
                **_PLANNED,
                **_PARTIAL,
                "replay": (
                    {
                        "deltas": ("int", "deltas to replay"),
                        "stored_nbytes": ("int", "their bytes"),
                        "nbytes": ("int", "bytes of values that are decoded"),
                        "seconds": ("number", "about how long this takes"),
                    },
                    "the work before writing",
                ),
            },
        ),
    ),
    "shadow": (
        Part(
            "with `--once`",
            {
                "chain": ("text", "the chain"),
                **_STATUS,
                "bases": (["any"], "bases that were written"),
                "written?": (_WRITTEN, "what `-o` wrote"),
            },
        ),
    ),
    "serve": (),
    "log": (
        Part(
            "",
            {
                "chain": ("text", "the chain"),
                "last": ("int?", "its last step; null if none can be restored"),
                "segments": ([_SEGMENT], "its log of gradients"),
                "steps": ([_MEMBER], "its stored states"),
                "raw_nbytes": ("int", "bytes of all states, decoded"),
                "stored_nbytes": ("int", "bytes as stored"),
                "ratio": ("number", "the quotient of both"),
                "exact": ("bool", "whether every state is exact"),
                "tip?": (
                    {"folder": ("text", ""), "content": ("text", ""), "stored_nbytes": ("int", "")},
                    "the last state once more, alone",
                ),
                "unfinished": (
                    [{"folder": ("text", "its folder"), "seconds": ("number", "since it was written last")}],
                    "states that a command is writing, or that an interrupted one left",
                ),
            },
        ),
    ),
    "compact": (
        Part(
            "",
            {
                "chain": ("text", "the chain"),
                "steps": (["int"], "states that stay"),
                "removed": ("int", "states that were removed"),
                "freed_nbytes": ("int", "bytes that were freed; below zero if there are more now"),
                "packs_nbytes?": ("int", "bytes of removed states that stay, because others need them"),
                "added?": ("int", "states written from the log"),
                "segments?": ([{"first": ("int", ""), "last": ("int?", "")}], "the log that stays"),
            },
        ),
        Part(
            "with `--dry-run`",
            {
                "chain": ("text", "the chain"),
                "steps": ([{"step": ("int", "the step"), "becomes": ("text", "what happens to it")}], "all states"),
                "segments?": (
                    [{"first": ("int", ""), "becomes": ("text", ""), "last": ("int?", "")}],
                    "what happens to the log",
                ),
            },
        ),
    ),
    "plan": (
        Part(
            "",
            {
                "best": ("text", "`logged` or `bases`"),
                "log_pays": ("bool", "whether a log wastes less than bases alone"),
                "bases": (_SCHEDULE, "the best schedule without a log"),
                "logged": ("any", "the best schedule with a log, or null"),
                "young": (_SCHEDULE, "the schedule by Young's formula"),
                "daly": (_SCHEDULE, "the schedule by Daly's formula"),
                "min_base_steps": ("int", "the fewest steps between bases that storage permits"),
                "min_logged_steps": ("int?", "the same with a log"),
                "replay_cores": ("int?", "cores that replay"),
                "replay_reading_seconds": ("number?", "reading the gradients of a step"),
                "replay_applying_seconds": ("number?", "applying them"),
                "run": (Map("any"), "the costs of the run, in seconds"),
                "log": ("any", "the costs of the log, in seconds, or null"),
                "rates": (Map("any"), "bytes, bytes a second, parameters"),
                "recorded": ("any", "what the chain states, or null"),
                "simulated": (Map("any"), "what simulated failures did to each schedule"),
                "failures": ("any", "the failures that were simulated"),
            },
        ),
    ),
    "average": _WRITE,
    "merge-lora": _WRITE,
    "compress": (
        Part("", {**_WRITTEN, **_STATES}),
        Part("with `--dry-run`", {"target": ("text", "the path"), "estimate": ("bool", "true"), **_STATES}),
    ),
    "decompress": _WRITE,
    "doctor": (
        Part(
            "",
            {
                "version": ("text", "of ckpt"),
                "python": ("text", "of Python"),
                "packages": (
                    [
                        {
                            "name": ("text", "the package"),
                            "version": ("text?", "null if it is not installed"),
                            "feature": ("text", "what needs it"),
                            "remedy": ("text", "the command that installs it"),
                            "needed": ("bool", "whether nothing works without it"),
                            "problem": ("text?", "why it cannot be used"),
                        }
                    ],
                    "packages",
                ),
                "kernels": (
                    {
                        "level": ("int?", "the level that is used"),
                        "levels": (["int"], "those in the library"),
                        "problem": ("text?", "why there are none"),
                        "instructions": ("text?", "the processor's instructions of that level"),
                    },
                    "the compiled kernels",
                ),
                "file_system": (
                    {
                        "folder": ("text", "the folder that was tried"),
                        "kind": ("text?", "such as ext4"),
                        "free_nbytes": ("int", "free bytes"),
                        "free_files": ("int?", "files that can be created"),
                        "renames_without_replacing": ("bool?", "whether a rename can leave what is there"),
                        "locks": ("bool?", "whether files can be locked"),
                        "reflinks": ("bool?", "whether files can share blocks"),
                        "syncs": ("bool?", "whether files can be flushed"),
                        "sync_seconds": ("number?", "how long a flush takes"),
                        "written_rate": ("number?", "bytes a second"),
                        "read_rate": ("number?", "bytes a second"),
                        "problem": ("text?", "what failed"),
                        "leftover": ("text?", "what could not be removed again"),
                    },
                    "the file system",
                ),
                "machine": (Map("any"), "cores, memory and limits"),
                "stores": (
                    [
                        {
                            "store": ("text", "its name"),
                            "url": ("text", "how its URLs begin"),
                            "variables": (["text"], "names of variables that are set; never their values"),
                            "files": (["text"], "files with credentials that are there"),
                            "missing_files": (["text"], "files that variables name and that are not there"),
                            "present": ("bool", "whether there are credentials"),
                        }
                    ],
                    "stores and their credentials",
                ),
                "shortcomings": (
                    [
                        {
                            "what": ("text", "what is missing"),
                            "feature": ("text", "what needs it"),
                            "remedy": ("text", "what mends it"),
                            "needed": ("bool", "whether nothing works without it"),
                        }
                    ],
                    "what is missing",
                ),
                "ok": ("bool", "whether reading and writing work here"),
            },
        ),
    ),
    "commit": (Part("", _WRITTEN),),
    "seal": (
        Part(
            "",
            {
                "seal_file": ("text", "the file with the checksums; with --dry-run, where it would be"),
                "files": ("int", "files that it covers"),
                "nbytes": ("int", "their bytes"),
            },
        ),
    ),
    "clean": (
        Part(
            "",
            {
                "target": ("text", "the target"),
                "files": ("int", "files that were removed"),
                "nbytes": ("int", "their bytes"),
                "uploads": ("int?", "unfinished uploads that were removed"),
            },
        ),
    ),
    "formats": (
        Part(
            "",
            {
                "formats": (
                    [
                        {
                            "name": ("text", "its name, for `--to`"),
                            "read": ("bool", "whether it is read"),
                            "written": ("bool", "whether it is written"),
                            "endings": (["text"], "endings of targets"),
                            "marks": (
                                {
                                    "paths": (["text"], "paths in a folder"),
                                    "names": (["text"], "patterns of names in a folder"),
                                    "files": (["text"], "patterns of a single file's name"),
                                },
                                "by what it is known; one is enough",
                            ),
                            "options": (["text"], "options of the command line"),
                            "summary": ("text", "what it is"),
                            "package": ("text?", "the installed package that provides it, null for those of ckpt"),
                        }
                    ],
                    "all formats, in the order in which they are tried",
                ),
            },
        ),
    ),
    "completion": (Part("", {"shell": ("text", "the shell"), "script": ("text", "its script")}),),
}  # fmt: skip
"""Commands without parts print one object for each event, a line each."""
