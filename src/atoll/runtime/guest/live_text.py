"""A command's output as text while it comes: in chunks for callbacks, in lines for iteration.

Owns decoding where a character is split between chunks, and the bound on a line. Bytes that are no UTF-8 are replaced.
Not here: where output comes from (`process.py`). Used by `Sandbox.exec` and `Process.lines`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator

MAX_LINE = 1024 * 1024
"""Characters of a line. A longer one is given in parts: a program that never ends its line must not fill the memory."""


class TextCallback:
    """Passes bytes on to a function as text."""

    def __init__(self, function: Callable[[str], None]) -> None:
        self._function = function
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, data: bytes, *, final: bool = False) -> None:
        if text := self._decoder.decode(data, final):
            self._function(text)

    def finish(self) -> None:
        """The output has ended. A character that it broke off in is replaced."""
        self(b"", final=True)


class LineSplitter:
    """Splits bytes into lines of text, without their ends: `\\n`, or `\\r\\n` as a terminal writes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> Iterator[str]:
        *lines, rest = self._decoder.decode(data).split("\n")
        if lines:
            lines[0] = self._rest + lines[0]
            self._rest = ""
        self._rest += rest
        for line in lines:
            yield from _parts(line.removesuffix("\r"))
        while len(self._rest) >= MAX_LINE:
            yield self._rest[:MAX_LINE]
            self._rest = self._rest[MAX_LINE:]

    def finish(self) -> Iterator[str]:
        """The last line, if it has no end."""
        self._rest += self._decoder.decode(b"", True)
        if self._rest:
            yield from _parts(self._rest)
        self._rest = ""


def _parts(line: str) -> Iterator[str]:
    for start in range(0, max(1, len(line)), MAX_LINE):
        yield line[start : start + MAX_LINE]
