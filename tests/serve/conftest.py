"""Running servers for the tests of this directory, and how they are spoken to byte by byte."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atoll.testing.server import RunningServer, running_server as run
from atoll.testing.waiting import BOUND_S

STRICT = {
    "ATOLL_HEAD_TIMEOUT_S": "1",
    "ATOLL_BODY_TIMEOUT_S": "1",
    "ATOLL_CONNECTIONS": "24",
    "ATOLL_CONNECTIONS_PER_CLIENT": "16",
    "ATOLL_BODY_BYTES": "65536",
    "ATOLL_LOG_FORMAT": "json",
    "ATOLL_SHUTDOWN_S": "2",
}


@pytest.fixture(scope="session")
def state_dir(make_state_dir: Callable[[], Path]) -> Path:
    """Of this directory's tests alone: in that of others, the server of another test may run."""
    return make_state_dir()


@pytest.fixture(scope="module")
def running_server(state_dir: Path) -> Iterator[RunningServer]:
    """A running `atoll serve`, with its `url`, its administrator's `key` and its `state_dir`."""
    with run(state_dir) as server:
        yield server


@pytest.fixture(scope="session")
def strict_server(make_state_dir: Callable[[], Path]) -> Iterator[RunningServer]:
    """A server with short time limits and few connections, for all attacks."""
    with run(make_state_dir(), environment=STRICT) as server:
        yield server


class Said(NamedTuple):
    """An answer, as bytes and parsed."""

    status: int
    head: bytes
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def connect(server: RunningServer, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S, source_address=(source, 0))


def read_all(connected: socket.socket) -> bytes:
    """All that comes until the server closes."""
    pieces = []
    while True:
        try:
            data = connected.recv(65536)
        except ConnectionResetError:
            break
        if not data:
            break
        pieces.append(data)
    return b"".join(pieces)


def say(server: RunningServer, text: bytes) -> list[Said]:
    """Send bytes as they are on a connection of their own, and parse all answers until the server closes it."""
    with connect(server) as connected:
        connected.sendall(text)
        return answers(read_all(connected))


def answers(data: bytes) -> list[Said]:
    """The answers in a stream. All of the server's own have a length."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        found.append(Said(int(head.split()[1]), head, data[:length]))
        data = data[length:]
    return found


def trusting(authority: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context
