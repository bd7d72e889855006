"""Parsers for values on the command line: sizes, durations, signals, variables, mounts, secrets, paths, offsets.

All of them raise `InvalidRequest`, whose message says what would have been right. Not here: the options
(`options.py`, `sandbox_options.py`), what the values are used for. Imports nothing heavy, because `atoll --help`
imports it.
"""

# Without `from __future__ import annotations`: the fields of a `NamedTuple` would be text that has to be compiled, and
# the first time that takes 1 ms.

import math
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from atoll.contract.errors import InvalidRequest

if TYPE_CHECKING:
    from atoll.contract.model import Mount

# Compiled when they are used: `atoll exec` needs none of them.
_SIZE = r"(?i)\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?:([kmgt])(?:i?b)?|b)?\s*"
_SIZE_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_DURATION_PART = r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(ms|s|m|h|d)"
_DURATION = rf"(?:{_DURATION_PART})+"
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_HOSTS = r"([^@]+?)(?::([A-Za-z][A-Za-z0-9_-]*))?"
_PLACE = r"(?s)([a-z0-9][a-z0-9_.-]{0,62}):(.*)"


def size(text: str) -> int:
    """Return the number of bytes that `text` means: `512m`, `1.5g`, `1GiB`, `4096`. Units are powers of 1024.

    Raises:
        InvalidRequest: it is not a size, or is below one byte.
    """
    found = re.fullmatch(_SIZE, text)
    if not found:
        raise InvalidRequest(
            f"{text!r} is not a size; write bytes (1048576) or a number with k, m, g or t (512m, 1.5g)"
        )
    power = _SIZE_POWER[found[2].lower()] if found[2] else 0
    amount = int(float(found[1]) * 1024**power) if "." in found[1] else int(found[1]) * 1024**power
    if amount < 1:
        raise InvalidRequest(f"{text!r} is less than one byte")
    return amount


def duration(text: str) -> float:
    """Return the number of seconds that `text` means: `30`, `30s`, `500ms`, `5m`, `1m30s`, `2h`.

    Raises:
        InvalidRequest: it is not a duration, or is 0.
    """
    word = text.strip().lower()
    if re.fullmatch(_NUMBER, word):
        seconds = float(word)
    elif re.fullmatch(_DURATION, word):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_DURATION_PART, word))
    else:
        raise InvalidRequest(
            f"{text!r} is not a duration; write seconds (30) or numbers with ms, s, m, h or d (500ms, 5m, 1m30s)"
        )
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{text!r} is not a duration above 0; leave out the option for no limit")
    return seconds


def lifetime(text: str) -> float:
    """As `duration`; `none` is a lifetime without end.

    Raises:
        InvalidRequest: it is neither.
    """
    return math.inf if text.strip().lower() == "none" else duration(text)


def labels(words: Sequence[str]) -> dict[str, str]:
    """Return the labels that `K=V` words set.

    Raises:
        InvalidRequest: a word has another form, or the key or value is not allowed.
    """
    from atoll.contract.model import check_labels

    pairs = [word.partition("=") for word in words]
    for key, equals, _ in pairs:
        if not equals:
            raise InvalidRequest(f"the label {key!r} has no value; write KEY=VALUE")
    return check_labels({key: value for key, _, value in pairs})


def signal_number(text: str) -> int:
    """Return the signal that `text` means: `TERM`, `SIGTERM`, `15`.

    Raises:
        InvalidRequest: there is no such signal.
    """
    import signal

    word = text.strip().upper()
    if word.isascii() and word.isdigit() and 1 <= int(word) < signal.NSIG:
        return int(word)
    try:
        return signal.Signals[word if word.startswith("SIG") else f"SIG{word}"].value
    except KeyError:
        raise InvalidRequest(
            f"{text!r} is not a signal; write a name (TERM, KILL, INT, HUP, USR1) or a number"
        ) from None


def environment(words: Sequence[str], files: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that the lines of `files`, then `K=V` words set. `K` alone takes its value from our
    environment.

    Raises:
        InvalidRequest: a word has no name, or names a variable that is not set in our environment; a file cannot be
            read.
    """
    variables: dict[str, str] = {}
    for file in files:
        try:
            variables |= _environment([line for line in map(str.strip, _lines(file)) if line and line[0] != "#"])
        except InvalidRequest as error:
            raise InvalidRequest(f"--env-file {file}: {error}") from None
    return variables | _environment(words)


def _lines(file: str) -> list[str]:
    from pathlib import Path

    try:
        return Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(getattr(error, "strerror", None) or "it is not text") from None


def _environment(words: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise InvalidRequest(
                f"{word!r} has no name; write NAME=VALUE, or NAME to pass the value from our environment"
            )
        if not equals:
            inherited = os.environ.get(name)
            if inherited is None:
                raise InvalidRequest(f"the environment variable {name} is not set; write {name}=VALUE")
            value = inherited
        variables[name] = value
    return variables


def mount(word: str) -> "Mount":
    """Parse `SRC:DST[:ro|:rw]`, where `SRC` is a directory, relative to the current one, or `volume:NAME`.

    Raises:
        InvalidRequest: it has another form.
    """
    from atoll.contract.model import VOLUME_PREFIX, Mount

    rest, _, access = word.rpartition(":")
    if access not in ("ro", "rw"):
        rest, access = word, ""
    source, _, target = rest.rpartition(":")
    name = source.removeprefix(VOLUME_PREFIX)
    if not name or not target.startswith("/") or source == VOLUME_PREFIX.rstrip(":"):
        raise InvalidRequest(
            f"{word!r} is not a mount; write SOURCE:/TARGET, SOURCE:/TARGET:rw or volume:NAME:/TARGET, with an "
            "absolute path as the target"
        )
    if name == source:
        source = os.path.abspath(source)
    return Mount(source=source, target=target, read_only={"ro": True, "rw": False}.get(access))


class SecretSource(NamedTuple):
    """A secret as the command line names it: where its value is, never the value."""

    name: str
    source: str
    """Where its value is: an environment variable of ours, `file:PATH`, or `-` for standard input."""
    hosts: tuple[str, ...] = ()
    header: str | None = None


def secret(word: str) -> SecretSource:
    """Parse `NAME[=SOURCE]@HOST[,HOST...][:HEADER]`.

    Raises:
        InvalidRequest: it has another form. The message does not repeat it: it may be a value.
    """
    source, _, rest = word.rpartition("@")
    found = re.fullmatch(_HOSTS, rest)
    if not source or not found:
        raise InvalidRequest(
            "a secret has no hosts; write NAME@HOST, NAME=VARIABLE@HOST,HOST or NAME=file:PATH@HOST:HEADER"
        )
    plain = secret_variable(source)
    return SecretSource(plain.name, plain.source, tuple(found[1].split(",")), found[2])


def secret_variable(word: str) -> SecretSource:
    """Parse `NAME[=SOURCE]`.

    Raises:
        InvalidRequest: it has no name, or no source after the `=`.
    """
    name, equals, source = word.partition("=")
    if not name or (equals and not source):
        raise InvalidRequest("a secret needs a name, and after '=' a variable, file:PATH or '-': NAME=VARIABLE")
    return SecretSource(name, source or name)


def secret_value(word: SecretSource) -> str:
    """Read the value of a secret, without the newline at its end.

    Raises:
        InvalidRequest: the source has no value. The message does not repeat it: it may be a value by mistake.
    """
    if word.source == "-":
        return sys.stdin.read().removesuffix("\n")
    if word.source.startswith("file:"):
        try:
            from pathlib import Path

            return Path(word.source.removeprefix("file:")).read_text().removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise InvalidRequest(f"cannot read the file of secret {word.name}: {why}") from None
    value = os.environ.get(word.source)
    if value is None:
        raise InvalidRequest(
            f"the environment variable of secret {word.name} is not set; name one that is set, "
            "file:PATH, or '-' for standard input. Do not write the value on the command line"
        )
    return value


class Place(NamedTuple):
    """One end of a copy."""

    sandbox: str | None
    """None: it is on this machine."""
    path: str
    """In a sandbox, a relative one begins in the user's home directory. On this machine, `-` is standard input or
    output."""

    @property
    def is_stream(self) -> bool:
        return self.sandbox is None and self.path == "-"

    def __str__(self) -> str:
        return self.path if self.sandbox is None else f"{self.sandbox}:{self.path}"


def copy_places(sources: Sequence[str], target: str) -> tuple[list[Place], Place]:
    """Parse the paths of a copy: `NAME:PATH` is in a sandbox, every other path is on this machine.

    A path on this machine that contains a colon is written `./a:b`.

    Raises:
        InvalidRequest: neither end of a copy is in a sandbox, a path is empty, or a stream is one of several.
    """
    *origins, end = [_place(word) for word in (*sources, target)]
    for origin in origins:
        if origin.sandbox is None and end.sandbox is None:
            raise InvalidRequest(f"neither {origin} nor {end} is in a sandbox; write NAME:PATH for the side that is")
    if len(origins) > 1 and any(each.is_stream for each in (*origins, end)):
        raise InvalidRequest("- is one file, and cannot be copied together with others")
    return origins, end


def _place(word: str) -> Place:
    if not word:
        raise InvalidRequest("a path is empty; write a path on this machine, or NAME:PATH for one in a sandbox")
    found = re.fullmatch(_PLACE, word)
    return Place(found[1], found[2] or ".") if found else Place(None, word)


def offsets(text: str) -> tuple[int, int]:
    """Parse the offsets of stdout and stderr: `4096` is for both, `4096,0` for each.

    Raises:
        InvalidRequest: it has another form.
    """
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise InvalidRequest(f"{text!r} is not an offset; write bytes for both streams (4096) or OUT,ERR (4096,0)")
    return int(parts[0]), int(parts[-1])
