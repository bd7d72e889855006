"""The command line: `main`, and what becomes of errors, signals and closed outputs.

`grammar` and `options` say what may be typed; `streaming`, `sandboxes` and `images` do it; `render` says how it looks;
`terminal` is this process's own ends; `values` reads words. Below stand `runtime` and `contract`, above nothing.

Exit statuses: the command's own for `run`, `exec` and `shell`, and there 124 when its time was up and 125 when Atoll
itself failed. 2 for a wrong command line, 1 for any other failure, 128+n after signal n.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from atoll.contract.errors import AtollError, ExecTimeout, InvalidRequest
from atoll.surfaces.cli import render

FAILED, USAGE, TIMED_OUT, OWN_FAILURE = 1, 2, 124, 125


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit status. Only a bug of ours raises."""
    _hold_standard_streams()
    # What is imported stays to the end: looking for garbage in it would take a fifth of a short command's time.
    gc.disable()
    # Looking for plugins reads the metadata of every installed package, at each start, and none is for a command line.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Errors of the grammar come before anybody has understood `--json`; what follows `--` is not ours.
    as_json = "--json" in words[: words.index("--") if "--" in words else None]

    import typer
    from typer import TyperException

    from atoll.surfaces.cli.grammar import app

    try:
        return app(args=words, prog_name="atoll", standalone_mode=False) or 0
    except InvalidRequest as error:
        render.failure(error, as_json=as_json)
        return USAGE
    except TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f"`{context.command_path} --help` shows what is possible" if context else None
        render.failure(Misuse(error.format_message().replace("Value error, ", "")), as_json=as_json, hint=hint)
        return USAGE
    except typer.Abort:
        return FAILED
    except BrokenPipeError:
        return _unread()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class Misuse(Exception):
    """The words do not make a command."""


def finish(command: Callable[[], Awaitable[int]], *, as_json: bool = False, failed: int = FAILED) -> int:
    """Run a command's coroutine and return its exit status, or tell why it failed.

    This is where every error of Atoll becomes words and a status. An error that is neither ours nor the machine's is
    a bug and goes on as it is.
    """
    from atoll.surfaces.cli import terminal

    gc.freeze()
    gc.enable()
    try:
        try:
            return terminal.run(command)
        except BrokenPipeError:
            raise
        except ExecTimeout as error:
            render.failure(error, as_json=as_json)
            return TIMED_OUT
        except AtollError as error:
            render.failure(error, as_json=as_json)
            return failed
        except OSError as error:
            if error.errno is None:
                raise
            render.failure(error, as_json=as_json)
            return failed
    except (terminal.OutputClosed, BrokenPipeError):
        return _unread()


def _unread() -> int:
    """Leave quietly, as a program does that SIGPIPE ends: whoever read our output has gone."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())  # What is still buffered would fail again when the interpreter flushes it.
    return 128 + signal.SIGPIPE


def _hold_standard_streams() -> None:
    """Open what we were started without, so that no socket of ours becomes standard output, and let all text pass."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free number: this one.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
