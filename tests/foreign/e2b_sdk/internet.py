"""As much of an internet as E2B's tests use, of this machine alone: 1.1.1.1, 8.8.8.8, e2b.dev, and a server's domain.

Owns a network namespace and a mount namespace, which the calling process has been put into (`unshare --net --mount`):
public addresses on its loopback device, HTTPS servers at them, a DNS server, and files that make programs use these:
`resolv.conf`, and a CA bundle with an authority of its own. No packet leaves the namespace. Used by `inside.py`.
"""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import socketserver
import ssl
import struct
import subprocess
import threading
from datetime import timedelta
from pathlib import Path

from atoll.runtime.secrets.authority import Authority

DOMAIN = "boxes.example"
SERVER_ADDRESS = "8.8.4.4"
"""Where all names below the domain lead."""
SITES = {"1.1.1.1": 301, "8.8.8.8": 302, "1.0.0.1": 200}
"""Addresses, and the status that is answered there."""
NAMES = {"e2b.dev": "1.0.0.1"}
_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_RESOLVER = Path("/etc/resolv.conf")
_A, _INTERNET = 1, 1


class Internet:
    def __init__(self, directory: Path) -> None:
        """Make it, with its files in `directory`. It lasts as long as the namespace."""
        self._bundle = directory / "ca-certificates.crt"
        shutil.copy(_BUNDLE, self._bundle)
        resolver = directory / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\n")
        _run("ip", "link", "set", "lo", "up")
        for address in (*SITES, SERVER_ADDRESS):
            _run("ip", "address", "add", f"{address}/32", "dev", "lo")
        for file, over in ((self._bundle, _BUNDLE), (resolver, _RESOLVER)):
            _run("mount", "--bind", str(file), str(over.resolve()))
        authority = Authority.make([*NAMES], [*SITES], title="a test's internet")
        self.trust(authority.certificate)
        certificate, key = authority.issue([*NAMES], [*SITES], lasts=timedelta(days=1))
        pair = directory / "site.pem"
        pair.write_text(key + certificate)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair)
        for address, status in SITES.items():
            site = http.server.ThreadingHTTPServer((address, 443), _site(status))
            site.socket = context.wrap_socket(site.socket, server_side=True, do_handshake_on_connect=False)
            _serve(site)
        _serve(socketserver.ThreadingUDPServer(("127.0.0.1", 53), _Resolver))

    @property
    def bundle(self) -> Path:
        """All certificate authorities that are trusted here."""
        return self._bundle

    def trust(self, certificate: str) -> None:
        """Add a certificate authority. In place: the file is mounted elsewhere."""
        with self._bundle.open("a") as bundle:
            bundle.write(f"\n{certificate}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _serve(server: socketserver.BaseServer) -> None:
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _site(status: int) -> type[http.server.BaseHTTPRequestHandler]:
    class Site(http.server.BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            self.send_response(status)
            if status in (301, 302):
                self.send_header("Location", "https://e2b.dev/")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815 - the base class looks for this name

        def log_message(self, *_args: object) -> None:
            pass

    return Site


class _Resolver(socketserver.BaseRequestHandler):
    """Answers one question: the address of a name that it knows. It has no IPv6 address; others do not exist."""

    def handle(self) -> None:
        message: bytes
        message, answers_at = self.request
        labels, at = [], 12
        while message[at]:
            labels.append(message[at + 1 : at + 1 + message[at]])
            at += 1 + message[at]
        question = message[12 : at + 5]
        name = b".".join(labels).decode().lower()
        address = SERVER_ADDRESS if f".{name}".endswith(f".{DOMAIN}") else NAMES.get(name)
        wanted = struct.unpack(">H", question[-4:-2])[0]
        answer = b""
        if address is not None and wanted == _A:
            answer = struct.pack(">HHHIH", 0xC00C, _A, _INTERNET, 60, 4) + socket.inet_aton(address)
        status = 0x8180 if address is not None else 0x8183
        head = message[:2] + struct.pack(">HHHHH", status, 1, int(bool(answer)), 0, 0)
        answers_at.sendto(head + question + answer, self.client_address)


def without_variables() -> dict[str, str]:
    """The environment, without what would have programs trust or reach something else."""
    dropped = ("E2B_", "PYTEST_", "SSL_CERT_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
