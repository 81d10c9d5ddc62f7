"""The `ckpt` command: one module per sub-command, and the end of every error."""

import gc
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO, cast

import click

from ckpt_cli import compile_dataclasses_late, interrupt, notes, progress
from ckpt_cli.options.command import help_text
from ckpt_cli.options.exit_codes import USAGE, exit_code, kind_of
from ckpt_cli.options.groups import TerminalContext
from ckpt_formats.core.errors import CkptError, NotFoundError, OutputError
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.core.version import VERSION

COMMANDS = {
    "convert": "ckpt_cli.commands.convert:convert",
    "reshard": "ckpt_cli.commands.reshard:reshard",
    "copy": "ckpt_cli.commands.copy:copy",
    "inspect": "ckpt_cli.commands.inspect:inspect",
    "latest": "ckpt_cli.commands.latest:latest",
    "verify": "ckpt_cli.commands.verify:verify",
    "extract": "ckpt_cli.commands.extract:extract",
    "check": "ckpt_cli.commands.check:check",
    "stats": "ckpt_cli.commands.stats:stats",
    "rules": "ckpt_cli.commands.rules:rules",
    "diff": "ckpt_cli.commands.diff:diff",
    "append": "ckpt_cli.commands.append:append",
    "follow": "ckpt_cli.commands.follow:follow",
    "restore": "ckpt_cli.commands.restore:restore",
    "shadow": "ckpt_cli.commands.shadow:shadow",
    "publish": "ckpt_cli.commands.publish:publish",
    "serve": "ckpt_cli.commands.serve:serve",
    "hold": "ckpt_cli.commands.hold:hold",
    "log": "ckpt_cli.commands.log:log",
    "compact": "ckpt_cli.commands.compact:compact",
    "commit": "ckpt_cli.commands.commit:commit",
    "plan": "ckpt_cli.commands.plan:plan",
    "average": "ckpt_cli.commands.average:average",
    "merge": "ckpt_cli.commands.merge:merge",
    "merge-lora": "ckpt_cli.commands.merge_lora:merge_lora",
    "compress": "ckpt_cli.commands.compress:compress",
    "decompress": "ckpt_cli.commands.decompress:decompress",
    "doctor": "ckpt_cli.commands.doctor:doctor",
    "seal": "ckpt_cli.commands.seal:seal",
    "index": "ckpt_cli.commands.index:index",
    "protect": "ckpt_cli.commands.protect:protect",
    "repair": "ckpt_cli.commands.repair:repair",
    "watch": "ckpt_cli.commands.watch:watch",
    "prune": "ckpt_cli.commands.prune:prune",
    "clean": "ckpt_cli.commands.clean:clean",
    "formats": "ckpt_cli.commands.formats:formats",
    "completion": "ckpt_cli.commands.completion:completion",
}

FAULT = 70
"""A fault of ckpt, or too little memory (EX_SOFTWARE in sysexits.h)."""
INTERRUPTED = 130
TERMINATED = 143
PIPE_CLOSED = 141

EXIT_STATUS = {
    0: "done",
    1: "diff: they differ; check: it does not fit; stats: values of --fail-on",
    USAGE: "wrong usage",
    10: "not found, or not recognised",
    11: "another process is writing the target",
    20: "damaged or incomplete",
    21: "refused as unsafe: it would run code, leave its folder or exhaust the machine",
    22: "not supported",
    23: "the rules do not fit the tensors",
    24: "doctor: something that is needed is missing",
    28: "disk full; run again to continue",
    30: "the target cannot be written",
    FAULT: "a fault of ckpt, or no memory",
    INTERRUPTED: "interrupted; run again to continue",
    PIPE_CLOSED: "diff: they differ, and the reader of its output has gone",
    TERMINATED: "ended by SIGTERM; run again to continue",
}
"""What each exit code means."""

_GARBAGE_THRESHOLD = 100_000
"""New objects after which Python looks for garbage: modules and indexes make very many that stay."""

_MAX_LENGTH = 1000
"""Characters of a message: names in files may have any length."""


class Commands(click.Group):
    """The commands; the module of each is imported when it is run or its help is shown."""

    context_class = TerminalContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        compile_dataclasses_late()
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        gc.freeze()  # modules stay as long as the process: the collector need not visit them
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands and the beginnings of their help texts, as Click shows them. No module is imported for it."""
        limit = formatter.width - 6 - max(map(len, COMMANDS))
        rows = [(name, click.Command(name, help=help_text(name)).get_short_help_str(limit)) for name in COMMANDS]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="ckpt")
def cli() -> None:
    """Convert, reshard, compare and verify the checkpoints of distributed training.

    ckpt needs no engine, no GPU and no process group. It never runs code from a
    file, and checks everything before it writes.

    \b
    Exit codes:
       0  done                        22  not supported
       1  diff: they differ;          23  rules do not fit
          check: it does not fit;
          stats: values of --fail-on
       2  wrong usage                 28  disk full; run again to continue
      10  not found, not recognised   30  target cannot be written
      11  target is being written     70  a fault of ckpt, or no memory
      20  damaged or incomplete      130  interrupted; run again to continue
      21  refused as unsafe          143  ended by SIGTERM; run again to continue
      24  doctor: something is missing  141  diff: they differ; its reader has gone
    """


def run() -> None:
    """Run the command line; every error ends here, as a message and an exit code."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # idle threads of NumPy use the processor
    gc.set_threshold(_GARBAGE_THRESHOLD)
    verbose = any(argument in ("-v", "--verbose") for argument in _options())
    quiet = any(argument in ("-q", "--quiet") for argument in _options())
    notes.begin("--json" in _options(), verbose, quiet)
    progress.show(not quiet)
    if sys.stdout is not None and not isinstance(sys.stdout, _Output):  # None if the parent process has closed it
        sys.stdout = cast(TextIO, _Output(sys.stdout))
    signal.signal(signal.SIGTERM, interrupt)  # batch systems send it; it is handled like Ctrl-C
    try:
        code = cli.main(prog_name="ckpt", standalone_mode=False)
    except click.exceptions.Abort as error:
        code = _report_interrupt(error.__cause__)
    except KeyboardInterrupt as error:
        code = _report_interrupt(error)
    except click.ClickException as error:
        code = _wrong_usage(error)
    except CkptError as error:
        if verbose:
            _print_traceback()
        code = report(error)
    except OSError as error:
        if verbose:
            _print_traceback()
        code = report(_of_system(error))
    except MemoryError:
        code = _fault("not enough memory", "use a smaller --memory, or fewer --workers")
    except ImportError as error:  # a package of another version, or compiled kernels that are missing or stale
        if verbose:
            _print_traceback()
        code = _fault(_clean(str(error)), "ckpt is not installed correctly: install it again")
    except Exception as error:
        if verbose:
            raise
        message = _clean(f"{type(error).__name__}: {error}")
        code = _fault(message, "this is a fault of ckpt; run again with -v, and report what it prints")
    with suppress(OSError):
        notes.flush()
    if code == 1 and isinstance(sys.stdout, _Output) and sys.stdout.is_cut:
        code = PIPE_CLOSED  # by itself, 1 would say that a whole comparison was shown
    sys.exit(code)


def _wrong_usage(error: click.ClickException) -> int:
    """Print what is wrong with the user's words, for which command, and how it is called. Returns the exit code."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        _print_json(error.exit_code, "usage", "a command is missing", None, "`ckpt --help` lists the commands.")
        return error.exit_code
    what = (
        _clean(" ".join(error.format_message().split()))
        .rstrip(".")
        .replace("is not a valid integer range", "is not a whole number")
    )
    if what[:1].isupper() and what[1:2].islower():
        what = what[0].lower() + what[1:]
    if context is None:  # Click does not say where a value is missing
        place = _command()
        hint = f"`{place} --help` explains all."
    else:
        place, pieces = context.command_path, context.command.collect_usage_pieces(context)
        hint = f"Usage: {place} {' '.join(pieces)}. `{place} --help` explains all."
        option = getattr(error, "param", None)
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None:
            about = record[1].removesuffix("[required]").rstrip(" .")
            hint = f"{record[0]}: {about}. `{place} --help` explains all."
    message = getattr(error, "message", "")
    if "No such command" in message:
        what, hint = f"there is no command {what.rpartition('command ')[2]}", _similar_command(message)
    elif isinstance(error, click.NoSuchOption) and context is not None:
        what, hint = f"there is no option {error.option_name}", _similar_option(error.option_name, context)
    notes.flush()
    for line in (f"error: {what}", f"where: {place}", f"hint: {hint}"):
        notes.tell(line)
    _print_json(error.exit_code, "usage", what, place, hint)
    return error.exit_code


def _command() -> str:
    """The command that was given, such as `ckpt convert`."""
    return " ".join(["ckpt", *(word for word in _options()[:1] if word in COMMANDS)])


def _similar_command(message: str) -> str:
    """The commands that may have been meant by one that does not exist, and where all are listed."""
    from ckpt_cli.options.suggestions import commands_like  # only this mistake needs it

    word = message.split("'")[1]
    if os.path.exists(word):
        return f"To see what it is: ckpt inspect {printable(word)}. `ckpt --help` lists all commands."
    close = commands_like(word, COMMANDS)
    meant = f"Did you mean {' or '.join(f'`ckpt {name}`' for name in close)}? " if close else ""
    return f"{meant}`ckpt --help` lists all commands."


def _similar_option(word: str, context: click.Context) -> str:
    """The options that may have been meant by one that a command does not have."""
    from ckpt_cli.options.suggestions import options_like

    options = [name for one in context.command.get_params(context) for name in (*one.opts, *one.secondary_opts)]
    close = options_like(word, [name for name in options if name.startswith("-")])
    meant = f"Did you mean {' or '.join(close)}? " if close else ""
    return f"{meant}`{context.command_path} --help` explains all."


def _print_traceback() -> None:
    import traceback  # only `-v` needs it

    traceback.print_exc()


def _options() -> list[str]:
    """The words that the user gave, up to where options end."""
    words = sys.argv[1:]
    return words[: words.index("--")] if "--" in words else words


def _fault(message: str, hint: str) -> int:
    click.echo(f"error: {message}\nhint: {hint}", err=True)
    _print_json(FAULT, "fault", message, None, hint)
    return FAULT


def _of_system(error: OSError) -> CkptError:
    """The error for one of the system that reaches `run`: an output stream fails, or a file disappeared."""
    message = error.strerror or str(error)
    if error.filename is not None:
        hint = getattr(error, "hint", None)  # what a store refuses has one
        return NotFoundError(f"cannot be read: {message}", where=os.fsdecode(error.filename), hint=hint)
    if isinstance(error, _StdoutError):
        _drop_stdout()
        return OutputError(f"standard output cannot be written: {message}")
    try:
        os.getcwd()
    except FileNotFoundError:
        hint = 'Go to the folder again: cd "$PWD".'
        return NotFoundError("the current folder was removed or replaced by another one", hint=hint)
    hint = "The system does not say which file. Check the disks of the source and of the target, then run it again."
    return OutputError(f"a file cannot be read or written: {message}", hint=hint)


class _StdoutError(OSError):
    """Standard output cannot be written."""


class _Output:
    """Standard output whose reader may stop early, as in `ckpt verify run | head -1`.

    What is printed then is dropped, and the command goes on, so that its exit code is that of its result.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_cut = False
        """Whether the reader has stopped before the end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self.is_cut = True
            _drop_stdout()
            return len(text)
        except OSError as error:
            raise _StdoutError(error.errno, error.strerror) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self.is_cut = True
            _drop_stdout()
        except OSError as error:
            raise _StdoutError(error.errno, error.strerror) from error


def _drop_stdout() -> None:
    """Send stdout to /dev/null, so that Python's flush at the end does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error: CkptError) -> int:
    """Print the notes, then the error, its place and a hint. Returns the exit code."""
    place = error.where or _command()
    what, where, hint = (_clean(text) if text else None for text in (error.what, place, error.hint))
    notes.flush()
    for label, text in (("error", what or ""), ("where", where), ("hint", hint)):
        if text is not None:
            notes.tell(f"{label}: {text}")
    _print_json(exit_code(error), kind_of(error), what or "", where, hint)
    return exit_code(error)


def _print_json(code: int, kind: str, message: str, where: str | None, hint: str | None) -> None:
    """Print the error as the one object on stdout, with `--json`."""
    if "--json" in _options():
        import json

        fields = {"code": code, "kind": kind, "what": message, "where": where, "hint": hint}
        with suppress(OSError):  # the reader may be gone
            click.echo(json.dumps({"error": fields, "notes": notes.to_json()}))


def _report_interrupt(error: BaseException | None) -> int:
    code = TERMINATED if error is not None and signal.SIGTERM in error.args else INTERRUPTED
    message = "run the same command again"
    if "ckpt.pipeline.interrupts" in sys.modules:  # only a command that can be continued has imported it
        from ckpt.pipeline.interrupts import KeptFiles

        files = KeptFiles.of(error)
        if files is not None:
            message = f"run the same command again to continue, or {_clean(files.clean_command)} to give up"
            if files.nbytes:
                message = f"{format_nbytes(files.nbytes)} are kept in {_clean(files.where)}: {message}"
    click.echo(f"interrupted: {message}", err=True)
    _print_json(code, "interrupted", message, None, None)
    return code


def _clean(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _MAX_LENGTH else f"{shown[:_MAX_LENGTH]}…"
