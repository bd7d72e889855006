"""DIAL, LISTEN, ACCEPT."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.guest.client import Guest, N, Stream

HOSTS = ["127.0.0.1", "::1"]


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(host: str) -> Iterator[socket.socket]:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.settimeout(10)
        yield server


def dial(guest: Guest, server: socket.socket, host: str, **more: Any) -> tuple[Stream, socket.socket]:
    stream = guest.open("DIAL", PORT=server.getsockname()[1], HOST=host, **more)
    peer, _ = server.accept()
    peer.settimeout(10)
    stream.event("CONNECTED")
    return stream, peer


def test_bytes_go_both_ways_and_each_way_ends_by_itself(guest: Guest, server: socket.socket, host: str) -> None:
    stream, peer = dial(guest, server, host)
    with peer:
        stream.send(b"ping")
        assert peer.recv(100) == b"ping"
        stream.eof()
        assert peer.recv(100) == b""
        peer.sendall(b"still here")
        stream.until_out(b"still here")
        peer.shutdown(socket.SHUT_WR)
        assert stream.wait() == {}
        assert 1 in stream.eofs


def test_the_peers_end_comes_first(guest: Guest, server: socket.socket, host: str) -> None:
    stream, peer = dial(guest, server, host)
    with peer:
        peer.sendall(b"bye")
        peer.shutdown(socket.SHUT_WR)
        guest.until(lambda: 1 in stream.eofs)
        assert stream.out == b"bye"
        assert stream.end is None
        stream.send(b"x" * 500_000)
        stream.eof()
        received = 0
        while data := peer.recv(65536):
            received += len(data)
        assert received == 500_000
        assert stream.wait() == {}


def test_nobody_listening_is_refused(guest: Guest, host: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        port = server.getsockname()[1]
    assert guest.open("DIAL", PORT=port, HOST=host).wait()["ERRNO"] == errno.ECONNREFUSED


@pytest.mark.parametrize(
    "wrong", [{"PORT": 0}, {"PORT": 70000}, {"PORT": 80, "HOST": "10.0.0.1"}, {"PORT": 80, "HOST": "localhost"}, {}]
)
def test_only_loopback_ports_can_be_dialled(guest: Guest, wrong: dict) -> None:
    assert guest.open("DIAL", **wrong).wait()["ERRNO"] == errno.EINVAL


def test_credit_holds_the_peer_up(guest: Guest, server: socket.socket, host: str) -> None:
    stream, peer = dial(guest, server, host, window=10, auto=False)
    with peer:
        peer.sendall(b"0123456789abcdef")
        peer.close()
        guest.until(lambda: len(stream.out) == 10)
        stream.give(6)
        guest.until(lambda: 1 in stream.eofs)
        assert stream.out == b"0123456789abcdef"
        stream.eof()
        stream.wait()


def test_an_end_is_seen_without_credit(guest: Guest, server: socket.socket, host: str) -> None:
    stream, peer = dial(guest, server, host, window=0, auto=False)
    peer.close()
    guest.until(lambda: 1 in stream.eofs)
    stream.eof()
    assert stream.wait() == {}


def test_reset_breaks_the_connection(guest: Guest, server: socket.socket, host: str) -> None:
    stream, peer = dial(guest, server, host)
    with peer:
        stream.reset()
        assert stream.wait()["ERRNO"] == errno.ECANCELED
        with pytest.raises(ConnectionResetError):
            peer.recv(1)


def test_a_broken_connection_is_told(guest: Guest, server: socket.socket, host: str) -> None:
    stream, peer = dial(guest, server, host)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    assert stream.wait()["ERRNO"] == errno.ECONNRESET


def test_listening_announces_and_hands_over(guest: Guest, host: str) -> None:
    listening = guest.open("LISTEN", PORT=0, HOST=host)
    port = listening.event("LISTENING")["PORT"]
    with socket.create_connection((host, port), timeout=10) as peer:
        event = listening.event("ACCEPTED")
        assert event["PEER_PORT"] == peer.getsockname()[1]
        peer.sendall(b"hello")
        stream = guest.open("ACCEPT", CONN=event["CONN"])
        stream.event("CONNECTED")
        stream.until_out(b"hello")
        stream.send(b"world")
        stream.eof()
        assert peer.recv(100) == b"world"
        peer.shutdown(socket.SHUT_WR)
        assert stream.wait() == {}
    assert guest.open("ACCEPT", CONN=event["CONN"]).wait()["ERRNO"] == errno.ENOENT
    listening.reset()
    assert listening.wait()["ERRNO"] == errno.ECANCELED
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


def test_a_port_in_use_is_told(guest: Guest, server: socket.socket, host: str) -> None:
    assert guest.open("LISTEN", PORT=server.getsockname()[1], HOST=host).wait()["ERRNO"] == errno.EADDRINUSE


def test_at_most_128_wait_and_the_rest_follows(guest: Guest) -> None:
    listening = guest.open("LISTEN", PORT=0)
    port = listening.event("LISTENING")["PORT"]

    def announced() -> list[int]:
        return [e["CONN"] for e in listening.events if e["EVENT"] == N["EVENT_ACCEPTED"]]

    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(140)]
    guest.until(lambda: len(announced()) == 128)
    guest.run("STAT", PATH="/")
    assert len(announced()) == 128
    streams = [guest.open("ACCEPT", CONN=conn) for conn in announced()[:12]]
    guest.until(lambda: len(announced()) == 140)
    for stream in streams:
        stream.reset()
    listening.reset()
    listening.wait()
    for peer in peers:
        peer.close()


def test_many_megabytes_pass_through_a_connection(guest: Guest, server: socket.socket, host: str) -> None:
    import threading

    stream, peer = dial(guest, server, host)

    def echo() -> None:
        with peer:
            while data := peer.recv(1 << 16):
                peer.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    data = bytes(range(256)) * 20_000
    stream.send(data)
    stream.eof()
    stream.wait()
    thread.join()
    assert stream.out == data
