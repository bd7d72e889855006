"""What a driver asks a running sandbox's keeper: to freeze the sandbox, to change its options, whether it is ready.

A keeper is the host process that owns one sandbox: what containerd calls a shim and Podman conmon. Owns the frames that
only keeper and client exchange (`guest/PROTOCOL.md`, "The keeper"). Not here: the numbers (`contract/protocol.py`), all
frames for the guest (`runtime/guest/connection.py`). Used by `oci.py`.
The keeper freezes and not the driver, for two reasons: only the keeper sees when the sandbox is next used, and it sees
when the client that holds the sandbox frozen dies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import anyio
import anyio.streams.buffered

from atoll.contract.errors import LaunchFailed, SandboxDied, SandboxError
from atoll.contract.protocol import HEADER, FrameType, FreezeAction, Tag, decode_fields, encode_fields, encode_frame

_ACTIONS = {"pause": FreezeAction.PAUSE, "hold": FreezeAction.HOLD, "quiesce": FreezeAction.QUIESCE}
_ANSWER_S = 20
_START_S = 40
"""Longer than a keeper gives its runtime, so that the keeper can report what failed."""


@contextlib.asynccontextmanager
async def freezing(directory: Path, how: Literal["pause", "hold", "quiesce"]) -> AsyncIterator[None]:
    """Freeze a sandbox: with `pause` until it is next used, with `hold` until the context ends.

    `quiesce` does not freeze: the sandbox has read all earlier frames, and no new one reaches it within the context.

    Raises:
        SandboxDied: the sandbox has ended.
        SandboxError: its processes could not be frozen.
    """
    fields = encode_fields([(Tag.ACTION, _ACTIONS[how])])
    async with _request(directory, FrameType.FREEZE, fields, FrameType.FROZEN) as answer:
        if error_number := decode_fields(answer).integer(Tag.ERRNO):
            raise SandboxError(f"the sandbox could not be frozen: {os.strerror(error_number)}")
        yield


async def reconfigure(directory: Path, *, ephemeral: bool, pause_after_s: float | None) -> None:
    """Replace the options that the keeper was started with. If `ephemeral`, a client must be connected.

    Raises:
        SandboxDied: the sandbox has ended.
    """
    pause_ms = 0 if pause_after_s is None else max(1, round(pause_after_s * 1000))
    fields = encode_fields([(Tag.KEEP, int(not ephemeral)), (Tag.PAUSE_MS, pause_ms)])
    async with _request(directory, FrameType.RECONFIGURE, fields, FrameType.RECONFIGURED):
        pass


@contextlib.asynccontextmanager
async def _request(directory: Path, kind: FrameType, payload: bytes, wanted: FrameType) -> AsyncIterator[bytes]:
    """The payload of the keeper's answer to one frame. The connection stays open until the context ends."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stream = await anyio.connect_unix(f"/proc/self/fd/{fd}/sock")
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
        yield answer


async def wait_ready(directory: Path) -> None:
    """Wait until the guest has sent HELLO.

    Raises:
        LaunchFailed: it did not.
    """
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with await anyio.connect_unix(f"/proc/self/fd/{fd}/sock") as stream:
            with anyio.fail_after(_START_S):
                await _receive(anyio.streams.buffered.BufferedByteReceiveStream(stream), FrameType.HELLO)
    except (OSError, anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise LaunchFailed(
            "the sandbox was started and does not answer", hint=f"see {directory}/runtime.log"
        ) from error
    finally:
        os.close(fd)


async def _receive(keeper: anyio.streams.buffered.BufferedByteReceiveStream, wanted: FrameType) -> bytes:
    length, kind, _, _, _ = HEADER.unpack(await keeper.receive_exactly(HEADER.size))
    payload = await keeper.receive_exactly(length) if length else b""
    if kind in {FrameType.FAILED, FrameType.GONE}:
        reason = decode_fields(payload).text(Tag.MESSAGE, len(payload)).strip()
        raise LaunchFailed(f"the sandbox did not start: {reason or 'its keeper gave no reason'}")
    if kind != wanted:
        raise anyio.EndOfStream
    return payload
