"""The client of a running keeper. Implements `contract.driver.KeeperClient` for every driver here.

Owns the frames that keeper and client exchange about freezing and reconfiguring (PROTOCOL.md, "The keeper"), and the
files in a sandbox's directory that a keeper writes. Not here: all other frames (`runtime/guest/`), starting and ending
a keeper (`keeper_command.py`).

Freezing goes through the keeper and not straight to the cgroup, because only the keeper sees when the sandbox is used
again, and when the process that requested the freeze has died.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import anyio
import anyio.streams.buffered

from atoll.contract.errors import LaunchFailed, SandboxDied, SandboxError, Unenforceable
from atoll.drivers.locks import is_held

_HEADER = struct.Struct("<IBBHI")
_FIELD = struct.Struct("<HIq")
_HELLO, _FAILED, _GONE, _FREEZE, _FROZEN, _ADOPT, _ADOPTED = 1, 32, 33, 34, 35, 36, 37
_ERRNO, _MESSAGE, _ACTION, _PAUSE_MS, _KEEP = 4, 5, 9, 10, 27
_ACTIONS = {"warm": 1, "hold": 2, "quiet": 4}
_WITHIN_S = 20
_START_S = 40
"""Longer than a keeper waits for its runtime, so that the keeper can report what went wrong."""


class KeeperSocket:
    """Keepers, reached through the socket `sock` in a sandbox's directory."""

    def __init__(self, *, can_freeze: bool) -> None:
        self._can_freeze = can_freeze

    async def freeze(self, directory: Path) -> None:
        self._require_freezer()
        async with _freeze(directory, "warm"):
            pass

    @contextlib.asynccontextmanager
    async def frozen(self, directory: Path) -> AsyncIterator[None]:
        self._require_freezer()
        async with _freeze(directory, "hold"):
            yield

    @contextlib.asynccontextmanager
    async def quiet(self, directory: Path) -> AsyncIterator[None]:
        """While the context lasts, no new frame reaches the guest, and it has received all earlier ones.

        The processes run on.

        Raises:
            SandboxDied: the sandbox has ended.
            SandboxError: the guest did not receive the frames in time.
        """
        async with _freeze(directory, "quiet"):
            yield

    def _require_freezer(self) -> None:
        if not self._can_freeze:
            raise Unenforceable(
                "a sandbox cannot be frozen here: this runtime and this user have no cgroup; "
                "put it to sleep, or run crun as root",
                hint="atoll doctor",
            )

    async def reconfigure(self, directory: Path, *, ephemeral: bool, pause_after_s: float | None) -> None:
        pause_ms = 0 if pause_after_s is None else max(1, round(pause_after_s * 1000))
        async with _request(directory, _ADOPT, {_KEEP: int(not ephemeral), _PAUSE_MS: pause_ms}, _ADOPTED):
            pass

    def last_used(self, directory: Path) -> tuple[datetime | None, bool]:
        try:
            used_ms, streams = struct.unpack("<qq", (directory / "activity").read_bytes())
        except (OSError, struct.error):
            return None, False
        return datetime.fromtimestamp(used_ms / 1000, UTC), streams > 0 and self.pid(directory) is not None

    def pid(self, directory: Path) -> int | None:
        """`Driver.pid`, for every driver that uses the keeper."""
        # A number alone may belong to another process by now; not while the keeper lives that watches the process.
        if not is_held(directory / "keeper.lock"):
            return None
        try:
            if (directory / "ended").stat().st_size:  # its keeper is about to end too
                return None
            return int((directory / "pid").read_text())
        except (OSError, ValueError):
            return None

    async def wait_ready(self, directory: Path) -> None:
        """Wait until the guest has answered.

        Raises:
            LaunchFailed: it did not.
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


@contextlib.asynccontextmanager
async def _freeze(directory: Path, how: Literal["warm", "hold", "quiet"]) -> AsyncIterator[None]:
    async with _request(directory, _FREEZE, {_ACTION: _ACTIONS[how]}, _FROZEN) as answer:
        tag, _, error_number = _FIELD.unpack(answer)
        if tag != _ERRNO or error_number:
            raise SandboxError(f"the sandbox could not be frozen: {os.strerror(error_number)}")
        yield


@contextlib.asynccontextmanager
async def _request(directory: Path, kind: int, fields: dict[int, int], wanted: int) -> AsyncIterator[bytes]:
    """Send the keeper a frame; the keeper's answer. The connection lasts as long as the context."""
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
