"""How bytes become messages, wherever they were cut on their way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st
from mcp.server.lowlevel import Server

from atoll.surfaces.mcp import stdio
from atoll.testing.waiting import BOUND_S


async def _split(pieces: Sequence[bytes]) -> list[bytes | None]:
    async def received() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return [line async for line in stdio._lines(received())]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab\n", max_size=12)))
async def test_lines_are_the_same_wherever_they_were_cut_and_long_ones_are_errors(pieces: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdio, "MAX_MESSAGE_BYTES", 5)
        found = await _split([piece.encode() for piece in pieces])
    *ended, rest = "".join(pieces).split("\n")
    expected = [line.encode() if len(line) <= 5 else None for line in [*ended, *([rest] if rest else [])]]
    assert found == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(str).map(str.encode))
def test_whatever_a_line_is_it_is_a_message_or_answered(line: bytes) -> None:
    answer = stdio._read(line)
    assert answer is None or answer.jsonrpc == "2.0"


async def test_a_client_that_asks_on_and_reads_nothing_is_not_served_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "MAX_UNREAD_S", 0.1)
    asked = 0

    async def received() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b'{"jsonrpc":"2.0","id":%d,"method":"ping"}\n' % asked

    async def send(_data: bytes) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(BOUND_S):
        await stdio.serve(Server[Any]("test"), received(), send)
    assert asked <= stdio.MAX_PENDING_REQUESTS + 2
