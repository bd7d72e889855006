"""TLS of the server: certificates that are given and change, one of its own, and clients that do not shake hands."""

from __future__ import annotations

import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import pytest

import atoll
from atoll.runtime.guest.ports import Listener
from atoll.runtime.secrets.authority import Authority
from atoll.server.server import Server
from atoll.surfaces.serve.settings import ServerSettings
from atoll.surfaces.serve.tls import ServerTls
from atoll.testing.server import RunningServer, key_file, running_server
from atoll.testing.waiting import BOUND_S, wait_until
from tests.serve.conftest import STRICT, connect, read_all, trusting

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def served(server: RunningServer, name: str, context: ssl.SSLContext) -> tuple[bytes, int]:
    """The answer, and the serial number of the certificate."""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=BOUND_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as connected,
    ):
        connected.sendall(HEALTH)
        shown = connected.getpeercert() or {}
        return read_all(connected), int(str(shown["serialNumber"]), 16)


async def test_its_own_certificate_is_for_its_names_and_previews_and_no_others(
    make_state_dir: Callable[[], Path],
) -> None:
    state_dir = make_state_dir()
    settings = ServerSettings(state_dir=state_dir, tls_self_signed=("box.example.com",))
    async with atoll.open(state_dir) as engine, engine.create("web") as sandbox, sandbox.listen() as listener:
        async with Server.open(settings) as before:
            assert before.first_key is not None
            key_file(state_dir).write_text(before.first_key.get_secret_value())
            preview = await before.previews.expose("default", sandbox.info, listener.port)
        authority = ServerTls(settings, state_dir).authority
        assert authority is not None
        made = authority.read_bytes()
        with running_server(state_dir, "--tls-self-signed=box.example.com", environment=STRICT) as server:
            assert server.url.startswith("https://")
            assert authority.read_bytes() == made, "a start does not replace what clients have trusted"
            assert authority.with_suffix(".key").stat().st_mode & 0o077 == 0
            await anyio.to_thread.run_sync(_own_names, server, trusting(authority))
            host = f"{listener.port}-web.atoll.localhost"
            async with httpx2.AsyncClient(verify=trusting(authority)) as client, anyio.create_task_group() as tasks:
                tasks.start_soon(_answer_once, listener)
                at = f"https://127.0.0.1:{server.port}/"
                headers = {"Host": host, "Atoll-Token": preview.token}
                seen = (await client.get(at, headers=headers, extensions={"sni_hostname": host})).text
            assert "X-Forwarded-Proto: https" in seen


async def _answer_once(listener: Listener) -> None:
    """Answer a request with itself."""
    async with await anext(listener) as connection:
        asked = b""
        while not asked.endswith(b"\r\n\r\n"):
            asked += await connection.receive()
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(asked), asked))


def _own_names(server: RunningServer, context: ssl.SSLContext) -> None:
    for name in ("localhost", "127.0.0.1", "atoll.localhost", "8000-web.atoll.localhost", "box.example.com"):
        assert b"200 OK" in served(server, name, context)[0]
    with pytest.raises(ssl.SSLCertVerificationError):
        served(server, "other.example.com", context)
    _slow_handshakes_end(server)


def _slow_handshakes_end(server: RunningServer) -> None:
    """One that says nothing, one that stops in the middle, and one that speaks plainly."""
    with ExitStack() as held:
        connections = [held.enter_context(connect(server)) for _ in range(3)]
        for connected, said in zip(connections, (b"", b"\x16\x03\x01\x02\x00\x01", HEALTH), strict=True):
            connected.sendall(said)
        assert not any(b"200" in read_all(connected) for connected in connections)


def test_a_certificate_that_changes_is_used_without_a_restart(
    make_state_dir: Callable[[], Path], tmp_path: Path
) -> None:
    authority = Authority.make(["localhost"], title="test")
    trusted, certificate, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    trusted.write_text(authority.certificate)

    def renew() -> None:
        made, its_key = authority.issue(["localhost"], lasts=timedelta(days=1))
        key.write_text(its_key)
        certificate.write_text(made)

    renew()
    context = trusting(trusted)
    with running_server(make_state_dir(), f"--tls-cert={certificate}", f"--tls-key={key}") as server:
        _, first = served(server, "localhost", context)
        renew()
        server.signal(signal.SIGHUP)
        wait_until(lambda: served(server, "localhost", context)[1] != first, "SIGHUP reads it again")
        _, second = served(server, "localhost", context)
        key.write_text("half")
        server.signal(signal.SIGHUP)
        wait_until(lambda: "stays in use" in server.log.read_text(), "it says so")
        assert served(server, "localhost", context)[1] == second
        renew()
        wait_until(lambda: served(server, "localhost", context)[1] != second, "it looks at the files itself")
