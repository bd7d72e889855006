"""The command line, `atoll`: `main`, and what happens on errors, signals and closed outputs.

| module | owns |
|---|---|
| `app.py` | the app, and the list of its command modules |
| `commands/` | the commands: arguments, help, and what each does |
| `grammar.py`, `usage.py`, `completion.py` | how words are parsed; help; shell completion |
| `command.py` | what all commands share: context, `--state-dir`, `--namespace`, `--json`, resources, exit status |
| `options.py`, `values.py` | arguments that several commands share; parsers of values |
| `sandbox_options.py` | the options that describe a sandbox |
| `streaming.py` | a command's streams, for `run`, `exec`, `shell`, `wait` and `logs` |
| `direct_exec.py` | the same for most calls of `exec`, without an engine |
| `cells.py`, `repl.py` | code that a kernel runs (`run --code`, `exec --code`); the prompt of `python` |
| `usage_table.py` | the table of `top` |
| `conversation.py`, `transcript.py` | the turns of `agent`, and how they are shown |
| `render.py` | output |
| `descriptors.py`, `terminal.py` | this process's standard streams; waiting for them, signals, terminal modes |

Exit statuses: that of the command for `run`, `exec`, `shell` and `wait`, and for these 124 after a time-out and 125
after an Atoll error. 2 for wrong input, whether it is found before the work begins or by the engine, 1 for any other
error, 128+n after signal n.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from atoll.contract.errors import AtollError, CallerError, ExecTimeout, InvalidRequest
from atoll.surfaces.cli import render

FAILED, USAGE, TIMED_OUT, ENGINE_FAILED = 1, 2, 124, 125


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` and return the exit status. Only a bug of ours raises."""
    _hold_standard_streams()
    # Imported modules stay until the end: collecting garbage in them would take a fifth of a short command's time.
    gc.disable()
    # pydantic would look for plugins in the metadata of every installed package at each start, and we use none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Errors of parsing come before `--json` has been parsed; what follows `--` is not ours.
    as_json = "--json" in words[: words.index("--") if "--" in words else None]

    from atoll.surfaces.cli import app
    from atoll.surfaces.cli.grammar import UsageError

    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `program` in `atoll/__main__.py` sets it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return app.run(words)
    except InvalidRequest as error:
        render.failure(error, as_json=as_json)
        return USAGE
    except UsageError as error:
        render.failure(error, as_json=as_json, hint=app.usage_hint(error))
        return USAGE
    except CallerError as error:
        render.failure(error, as_json=as_json)
        return FAILED
    except BrokenPipeError:
        return _broken_pipe_status()
    except KeyboardInterrupt:
        render.end_line()
        return 128 + signal.SIGINT


def program() -> NoReturn:
    """The installed command `atoll`, called by `atoll/__main__.py`: `main`, then the end of the process.

    The interpreter is not taken down: freeing every module takes a fifth of a short command's time. Nothing is left to
    do then: `main` has closed the engine, and what was printed is flushed here.
    """
    status = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or FAILED
    os._exit(status)


def finish(work: Coroutine[Any, Any, int], *, as_json: bool, failed: int) -> int:
    """`report`, of a command's work in an event loop."""
    try:
        from atoll.surfaces.cli import terminal

        return report(lambda: terminal.run(lambda: work), as_json=as_json, failed=failed)
    finally:
        work.close()  # Ctrl-C may have come before it began.


def report(work: Callable[[], int], *, as_json: bool, failed: int) -> int:
    """Do a command's work and return its exit status; print an error and return `failed`, 2 if the input was wrong, or
    124 after a time-out.

    Every error of Atoll becomes a message and a status here. An exception that is neither an `AtollError` nor an
    `OSError` of the machine is a bug and is raised.
    """
    from atoll.surfaces.cli.descriptors import OutputClosed

    gc.freeze()
    gc.enable()
    try:
        try:
            return work()
        except BrokenPipeError:
            raise
        except ExecTimeout as error:
            render.failure(error, as_json=as_json)
            return TIMED_OUT
        except InvalidRequest as error:
            render.failure(error, as_json=as_json)
            return USAGE
        except AtollError as error:
            render.failure(error, as_json=as_json)
            return failed
        except OSError as error:
            if error.errno is None:
                raise
            render.failure(error, as_json=as_json)
            return failed
    except (OutputClosed, BrokenPipeError):
        return _broken_pipe_status()


def _broken_pipe_status() -> int:
    """The exit status of a program that SIGPIPE ended, and no message: our output is no longer read."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())  # Buffered output would fail again when the interpreter flushes it.
    return 128 + signal.SIGPIPE


def _hold_standard_streams() -> None:
    """Open the standard streams that are closed, so that no socket of ours gets their numbers; escape what cannot be
    encoded."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest free number, which is this one.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
