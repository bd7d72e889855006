"""How a sandbox is made to stand still, or is taken by somebody: by asking its keeper.

Knows the frames that keeper and client exchange about it (PROTOCOL.md, "The keeper"). Refuses to know all others.
The keeper is asked, and not the cgroup, because it alone knows when the sandbox is used again, and because it sees when
whoever wanted the sandbox to stand still has died.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import anyio
import anyio.streams.buffered

from atoll.contract.errors import LaunchFailed, SandboxDied, SandboxError

_HEADER = struct.Struct("<IBBHI")
_FIELD = struct.Struct("<HIq")
_HELLO, _FAILED, _GONE, _FREEZE, _FROZEN, _ADOPT, _ADOPTED = 1, 32, 33, 34, 35, 36, 37
_ERRNO, _MESSAGE, _ACTION, _PAUSE_MS, _KEEP = 4, 5, 9, 10, 27
_ACTIONS = {"warm": 1, "hold": 2, "quiet": 4}
_WITHIN_S = 20
_START_S = 40
"""Longer than a keeper gives its runtime, so that it can say what was wrong."""


@contextlib.asynccontextmanager
async def frozen(directory: Path, how: Literal["warm", "hold", "quiet"]) -> AsyncIterator[None]:
    """A sandbox that stands still: `warm`, until it is next used; on `hold`, as long as the context lasts.

    A `quiet` one does not, but as long as the context lasts nothing new reaches it, and all that did has been taken.

    Raises:
        SandboxDied: it has ended.
        SandboxError: its processes do not stand still.
    """
    async with _asked(directory, _FREEZE, {_ACTION: _ACTIONS[how]}, _FROZEN) as answer:
        tag, _, error_number = _FIELD.unpack(answer)
        if tag != _ERRNO or error_number:
            raise SandboxError(f"the sandbox does not stand still: {os.strerror(error_number)}")
        yield


async def adopt(directory: Path, *, ephemeral: bool, pause_after_s: float | None) -> None:
    """Say anew what the keeper was told when it was started. An `ephemeral` one must have a client by now.

    Raises:
        SandboxDied: it has ended.
    """
    pause_ms = 0 if pause_after_s is None else max(1, round(pause_after_s * 1000))
    async with _asked(directory, _ADOPT, {_KEEP: int(not ephemeral), _PAUSE_MS: pause_ms}, _ADOPTED):
        pass


@contextlib.asynccontextmanager
async def _asked(directory: Path, kind: int, fields: dict[int, int], wanted: int) -> AsyncIterator[bytes]:
    """What the keeper answers to a frame. The connection lasts as long as the context."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stream = await anyio.connect_unix(f"/proc/self/fd/{fd}/sock")
    except OSError as error:
        raise SandboxDied("the sandbox has ended: its keeper does not answer") from error
    finally:
        os.close(fd)
    payload = b"".join(_FIELD.pack(tag, 8, value) for tag, value in fields.items())
    async with stream:
        keeper = anyio.streams.buffered.BufferedByteReceiveStream(stream)
        try:
            with anyio.fail_after(_WITHIN_S):
                await _receive(keeper, _HELLO)
                await stream.send(_HEADER.pack(len(payload), kind, 0, 0, 0) + payload)
                answer = await _receive(keeper, wanted)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, TimeoutError) as error:
            raise SandboxDied("the sandbox has ended: its keeper does not answer") from error
        yield answer


async def greeted(directory: Path) -> None:
    """Wait until the guest has said that it is there.

    Raises:
        LaunchFailed: it is not.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with await anyio.connect_unix(f"/proc/self/fd/{fd}/sock") as stream:
            with anyio.fail_after(_START_S):
                await _receive(anyio.streams.buffered.BufferedByteReceiveStream(stream), _HELLO)
    except (OSError, anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise LaunchFailed(
            "the sandbox was started and does not answer", hint=f"see {directory}/runtime.log"
        ) from error
    finally:
        os.close(fd)


async def _receive(keeper: anyio.streams.buffered.BufferedByteReceiveStream, wanted: int) -> bytes:
    length, kind, _, _, _ = _HEADER.unpack(await keeper.receive_exactly(_HEADER.size))
    payload = await keeper.receive_exactly(length) if length else b""
    if kind in (_FAILED, _GONE):
        raise LaunchFailed(f"the sandbox did not start: {_message(payload)}")
    if kind != wanted:
        raise anyio.EndOfStream
    return payload


def _message(payload: bytes) -> str:
    while payload:
        tag, size = struct.unpack_from("<HI", payload)
        if tag == _MESSAGE:
            return payload[6 : 6 + size].decode(errors="replace").strip()
        payload = payload[6 + size :]
    return "its keeper did not say why"
