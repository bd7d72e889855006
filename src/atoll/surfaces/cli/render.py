"""Output: tables, JSON, times, sizes, progress and errors.

Owns how rows and values look to people and to programs. Text from a sandbox is hostile (a process may be called
"\\x1b[2J"), so all text for people goes through `printable`, and JSON is ASCII. rich is imported only to draw progress
on a terminal. Not here: where the data comes from (`commands/`), the live output of an agent (`transcript.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from atoll.contract.errors import AtollError, ExecTimeout

if TYPE_CHECKING:
    from datetime import datetime

    from rich.progress import Progress, TaskID

RED, GREEN, DIM, BOLD = "31", "32", "2", "1"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_AGES = ((60, "second"), (60, "minute"), (24, "hour"), (7, "day"), (52, "week"), (0, "year"))
_LEAST_FLEX = 12


def printable(text: str, *, lines: bool = False) -> str:
    """Return `text` with control characters escaped; `lines` keeps newlines and tabs."""
    if text.isprintable():
        return text
    allowed = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Print lines for people on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a note on standard error, where it cannot be mistaken for output."""
    sys.stderr.write(styled(printable(text), DIM) + "\n")
    sys.stderr.flush()


def end_line() -> None:
    """On a terminal, end the line that shows the `^C` of the user, so that a shell's prompt is on one of its own."""
    if os.isatty(2):
        sys.stderr.write("\n")
        sys.stderr.flush()


def explain_memory_kill(sandbox: str, limit_bytes: int | None) -> None:
    """Say why a command ended, where its exit status does not: one that the kernel killed cannot say so itself."""
    if limit_bytes is not None:
        note(f"killed: sandbox {sandbox!r} reached its memory limit of {human_bytes(limit_bytes)} (--memory)")


def emit_json(value: object, *, line: bool = False) -> None:
    """Print one JSON value, indented, or on one line where many follow each other."""
    import json

    say(json.dumps(value) if line else json.dumps(value, indent=2))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, flex: int | None = None, indent: int = 0) -> None:
    """Print rows under headers. On a terminal the column `flex` is shortened so that a row fits on its line."""
    say("\n".join(table_lines(headers, rows, flex=flex, indent=indent)))


def table_lines(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, flex: int | None = None, indent: int = 0
) -> list[str]:
    """The lines of `table`."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(columns_of, column)) for column in zip(headers, *cells, strict=True)]
    room = terminal_columns()
    if flex is not None and room is not None:
        excess = indent + sum(widths) + 2 * (len(widths) - 1) - room
        if excess > 0:
            widths[flex] = max(min(widths[flex], _LEAST_FLEX), widths[flex] - excess)
            for row in cells:
                row[flex] = shortened(row[flex], widths[flex])
    first, *rest = (
        " " * indent + "  ".join(_padded(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headers, *cells]
    )
    return [styled(first, BOLD, sys.stdout.fileno()), *rest]


def facts(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        say(f"{name.ljust(width)}  {printable(value)}")


def diagnostics(rows: Sequence[tuple[bool, str, str, str | None]]) -> None:
    """Print diagnostics: whether a topic is in order, the topic, the detail, and the fix."""
    import textwrap

    width = max((columns_of(topic) for _, topic, _, _ in rows), default=0)
    room = terminal_columns()
    for ok, topic, detail, fix in rows:
        mark = "✓" if ok else styled("✗", RED, sys.stdout.fileno())
        text = printable(detail)
        lines = textwrap.wrap(text, max(room - width - 4, 20)) if room else [text]
        say(f"{mark} {_padded(printable(topic), width)}  {(lines or [''])[0]}".rstrip())
        for line in lines[1:]:
            say(" " * (width + 4) + line)
        if fix:
            say(" " * (width + 4) + "fix: " + printable(fix))


def ago(moment: datetime, now: datetime | None = None) -> str:
    """Return how long ago `moment` was, as people say it: `3 minutes ago`."""
    from datetime import UTC, datetime

    elapsed = int(((now or datetime.now(UTC)) - moment).total_seconds())
    if elapsed < 1:
        return "just now"
    for step, unit in _AGES:
        if not step or elapsed < step:
            return f"{elapsed} {unit}{'' if elapsed == 1 else 's'} ago"
        elapsed //= step
    raise AssertionError("the last unit has no next one")


def until(moment: datetime, now: datetime | None = None) -> str:
    """Return how long it is until `moment`, as people say it: `in 3m 20s`."""
    from datetime import UTC, datetime

    left = (moment - (now or datetime.now(UTC))).total_seconds()
    return f"in {human_seconds(left)}" if left > 0 else "now"


def human_bytes(amount: int | None) -> str:
    """Return a size as people read it: `1.5 GiB`; `?` when it is not known."""
    if amount is None:
        return "?"
    power = 0
    while power < len(_UNITS) - 1 and amount >= 1024 ** (power + 1):
        power += 1
    return f"{amount / 1024**power:.1f} {_UNITS[power]}" if power else f"{amount} B"


def human_seconds(seconds: float) -> str:
    """Return a duration as short as it can be read: `0.42 s`, `12 s`, `3m 20s`, `2h 5m`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    return f"{minutes // 60}h {minutes % 60}m"


class ProgressBars:
    """Progress on standard error: bars on a terminal, otherwise a line at the start and at the end of each task.

    The engine calls it as `progress`, from any thread: the task, how much is done, of how much.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._printed: set[tuple[str, bool]] = set()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if sys.stderr.isatty():
            self._draw(printable(what), done, total)
        else:
            self._print_line(what, done, total)

    def _draw(self, what: str, done: int, total: int | None) -> None:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                DownloadColumn(binary_units=True),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def _print_line(self, what: str, done: int, total: int | None) -> None:
        ended = total is not None and done >= total
        if (what, ended) in self._printed or (what, True) in self._printed:
            return
        self._printed.add((what, ended))
        note(f"{what}: {human_bytes(done)}, done" if ended and total else what)


def removal(removed: Sequence[str], failures: Sequence[AtollError], *, as_json: bool) -> None:
    """Print what `rm` could not remove; with `as_json`, one object that has what was removed too."""
    if as_json:
        emit_json({"removed": removed, "errors": [{**each.to_dict(), "hint": each.hint} for each in failures]})
        return
    for each in failures:
        failure(each, as_json=False)


def failure(error: BaseException, *, as_json: bool, hint: str | None = None) -> None:
    """Print an error: a line on standard error, or with `as_json` an object, on one line, on standard output.

    This is the one place where the command line prints errors.
    """
    described = _described(error)
    hint = error.hint if isinstance(error, AtollError) and error.hint else hint
    if as_json:
        document: dict[str, object] = {"error": {**described, "hint": hint}}
        if isinstance(error, ExecTimeout):
            document["result"] = error.result.model_dump(mode="json")
        emit_json(document, line=True)
        return
    message = printable(str(described["message"]), lines=True)
    sys.stdout.flush()
    sys.stderr.write(f"{styled('error:', RED)} {message}\n")
    if hint:
        sys.stderr.write(styled(f"hint: {printable(hint, lines=True)}", DIM) + "\n")
    sys.stderr.flush()


def _described(error: BaseException) -> Mapping[str, object]:
    if isinstance(error, AtollError):
        return error.to_dict()
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        message = f"{where}{error.strerror or error}"
        return {"code": "host_error", "message": message, "retryable": False, "details": {"errno": error.errno}}
    return {"code": "usage", "message": str(error), "retryable": False, "details": {}}


def terminal_columns() -> int | None:
    """Return how wide standard output is, None if it is not a terminal: piped output is never shortened."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return None


def styled(text: str, style: str, fd: int = 2) -> str:
    """`text` in a style, if `fd` is a terminal and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not os.isatty(fd):
        return text
    return f"\x1b[{style}m{text}\x1b[0m"


def columns_of(text: str) -> int:
    """How many columns `text` takes on a terminal."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def _padded(text: str, width: int) -> str:
    return text + " " * (width - columns_of(text))


def shortened(text: str, width: int) -> str:
    """`text`, cut to `width` columns of a terminal."""
    if columns_of(text) <= width:
        return text
    kept = text
    while kept and columns_of(kept) > width - 1:
        kept = kept[: width - 1] if len(kept) > width else kept[:-1]
    return kept + "…"
