"""The client of a running keeper. Implements `contract.driver.KeeperClient` for every driver here.

A keeper is the host process that owns one sandbox: what containerd calls a shim and Podman conmon. Owns the frames that
keeper and client exchange about freezing and reconfiguring (PROTOCOL.md, "The keeper"), and the files in a sandbox's
directory that a keeper writes. Not here: the numbers (`contract/protocol.py`), all other frames (`runtime/guest/`),
starting and ending a keeper (`keeper_command.py`).

Freezing goes through the keeper and not straight to the cgroup, because only the keeper sees when the sandbox is used
again, and when the process that requested the freeze has died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import anyio.streams.buffered

from atoll.contract.driver import Lifetime
from atoll.contract.errors import LaunchFailed, SandboxDied, SandboxError, Unenforceable
from atoll.contract.protocol import HEADER, FrameType, FreezeAction, Tag, decode_fields, encode_fields, encode_frame
from atoll.drivers.activity import read_activity
from atoll.drivers.keeper_stream import KeeperStream
from atoll.drivers.locks import is_held, read_small

_ACTIONS = {"pause": FreezeAction.PAUSE, "hold": FreezeAction.HOLD, "quiesce": FreezeAction.QUIESCE}
_ANSWER_S = 20
_START_S = 40
"""Longer than a keeper waits for its runtime, so that the keeper can report what went wrong."""


class KeeperSocket:
    """Keepers, reached through the socket `sock` in a sandbox's directory."""

    def __init__(self, *, can_freeze: bool) -> None:
        self._can_freeze = can_freeze

    async def freeze(self, directory: Path) -> None:
        self._require_freezer()
        async with _freeze(directory, "pause"):
            pass

    @contextlib.asynccontextmanager
    async def frozen(self, directory: Path) -> AsyncIterator[None]:
        self._require_freezer()
        async with _freeze(directory, "hold"):
            yield

    @contextlib.asynccontextmanager
    async def quiesced(self, directory: Path) -> AsyncIterator[anyio.abc.ByteStream]:
        async with _freeze(directory, "quiesce") as stream:
            yield stream

    def _require_freezer(self) -> None:
        if not self._can_freeze:
            raise Unenforceable(
                "a sandbox cannot be frozen here: this runtime and this user have no cgroup; "
                "put it to sleep, or run crun as root",
                hint="atoll sleep NAME; atoll doctor says how an unprivileged user gets cgroups",
            )

    async def reconfigure(
        self, directory: Path, *, ephemeral: bool, pause_after_s: float | None, lifetime: Lifetime | None
    ) -> None:
        pause_ms = 0 if pause_after_s is None else max(1, round(pause_after_s * 1000))
        options = [(Tag.KEEP, int(not ephemeral)), (Tag.PAUSE_MS, pause_ms)]
        if lifetime is not None:
            options += [(Tag.EXPIRES_MS, lifetime.ends_ms), (Tag.RENEWAL_MS, lifetime.renewal_ms)]
            options += [(Tag.FREEZES_AT_END, int(lifetime.freezes))]
        fields = encode_fields(options)
        async with _request(directory, FrameType.RECONFIGURE, fields, FrameType.RECONFIGURED):
            pass

    def last_used(self, directory: Path) -> tuple[datetime | None, bool]:
        activity = read_activity(str(directory))
        return _time(activity.used_ms), activity.streams > 0 and self.pid(directory) is not None

    def unanswered_since(self, directory: Path) -> datetime | None:
        return _time(read_activity(str(directory)).unanswered_ms)

    def pid(self, directory: Path) -> int | None:
        """`Driver.pid`, for every driver that uses the keeper."""
        # A number alone may belong to another process by now; not while the keeper lives that watches the process.
        if not is_held(f"{directory}/keeper.lock"):
            return None
        try:
            if os.stat(f"{directory}/ended").st_size:  # its keeper is about to end too
                return None
            return int(read_small(f"{directory}/pid"))
        except (OSError, ValueError):
            return None

    async def wait_ready(self, directory: Path) -> None:
        """Wait until the guest has answered.

        Raises:
            LaunchFailed: it did not.
        """
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            async with await KeeperStream.connect(f"/proc/self/fd/{fd}/sock") as stream:
                with anyio.fail_after(_START_S):
                    await _receive(anyio.streams.buffered.BufferedByteReceiveStream(stream), FrameType.HELLO)
        except (OSError, anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise LaunchFailed(
                "the sandbox was started and does not answer", hint=f"see {directory}/runtime.log"
            ) from error
        finally:
            os.close(fd)


def _time(milliseconds: int) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


@contextlib.asynccontextmanager
async def _freeze(directory: Path, how: Literal["pause", "hold", "quiesce"]) -> AsyncIterator[anyio.abc.ByteStream]:
    fields = encode_fields([(Tag.ACTION, _ACTIONS[how])])
    async with _request(directory, FrameType.FREEZE, fields, FrameType.FROZEN) as (answer, stream):
        if error_number := decode_fields(answer).integer(Tag.ERRNO):
            raise SandboxError(f"the sandbox could not be frozen: {os.strerror(error_number)}")
        yield stream


@contextlib.asynccontextmanager
async def _request(
    directory: Path, kind: FrameType, payload: bytes, wanted: FrameType
) -> AsyncIterator[tuple[bytes, anyio.abc.ByteStream]]:
    """The payload of the keeper's answer to one frame, and the connection, which is open until the context ends."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stream = await KeeperStream.connect(f"/proc/self/fd/{fd}/sock")
    except OSError as error:
        raise SandboxDied("the sandbox has ended: its keeper does not answer") from error
    finally:
        os.close(fd)
    async with stream:
        keeper = anyio.streams.buffered.BufferedByteReceiveStream(stream)
        try:
            with anyio.fail_after(_ANSWER_S):
                await _receive(keeper, FrameType.HELLO)
                await stream.send(encode_frame(kind, 0, payload))
                answer = await _receive(keeper, wanted)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, TimeoutError) as error:
            raise SandboxDied("the sandbox has ended: its keeper does not answer") from error
        yield answer, stream


async def _receive(keeper: anyio.streams.buffered.BufferedByteReceiveStream, wanted: FrameType) -> bytes:
    length, kind, _, _, _ = HEADER.unpack(await keeper.receive_exactly(HEADER.size))
    payload = await keeper.receive_exactly(length) if length else b""
    if kind in {FrameType.FAILED, FrameType.GONE}:
        reason = decode_fields(payload).text(Tag.MESSAGE, len(payload)).strip()
        raise LaunchFailed(f"the sandbox did not start: {reason or 'its keeper gave no reason'}")
    if kind != wanted:
        raise anyio.EndOfStream
    return payload
