"""`atoll serve` behind a proxy, configured as docs/deploy.md says: streams, WebSockets, large files, previews."""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx2
import pytest
from websockets.asyncio.client import connect

from atoll.testing.plugin import STRICT
from atoll.testing.server import RunningServer, running_server
from atoll.testing.waiting import BOUND_S, wait_until
from tests.rest.serving import read_events

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
NAME, DOMAIN = "atoll.example.com", "sandboxes.example.com"
LARGE = bytes(range(256)) * 4096 * 24
"""More than a proxy holds in memory, or takes from a client, unless it is told to."""
PACKAGES = {"nginx": "nginx-light", "caddy": "caddy"}


class Proxied(NamedTuple):
    server: RunningServer
    port: int
    trust: ssl.SSLContext

    def client(self, name: str = NAME) -> httpx2.AsyncClient:
        """A client that takes the proxy's address for that of `name`."""

        async def ask_for(request: httpx2.Request) -> None:
            request.extensions["sni_hostname"] = name

        return httpx2.AsyncClient(
            base_url=f"https://127.0.0.1:{self.port}",
            headers={**self.server.headers, "Host": f"{name}:{self.port}"},
            verify=self.trust,
            timeout=BOUND_S,
            event_hooks={"request": [ask_for]},
        )


def documented(language: str) -> str:
    """The configuration on the page."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [each for each in blocks if f"*.{DOMAIN}" in each and ("proxy_pass" in each or "reverse_proxy" in each)]
    return str(found)


def nginx(directory: Path, port: int, upstream: int) -> list[str]:
    block = documented("nginx").replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {directory}/{kind};\n" for kind in kinds)
    lines = f"daemon off;\npid {directory}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{places}"
    config = directory / "nginx.conf"
    config.write_text(lines + _placed(block, directory, upstream) + "}\n")
    return ["nginx", "-e", "stderr", "-p", str(directory), "-c", str(config)]


def caddy(directory: Path, port: int, upstream: int) -> list[str]:
    block = documented("caddyfile")
    for name in (NAME, f"*.{DOMAIN}"):
        block = block.replace(name, f"{name}:{port}", 1)
    config = directory / "Caddyfile"
    options = f"{{\nadmin off\ngrace_period 1s\nauto_https disable_redirects\nstorage file_system {directory}\n}}\n"
    config.write_text(options + _placed(block, directory, upstream))
    return ["caddy", "run", "--config", str(config), "--adapter", "caddyfile"]


def _placed(block: str, directory: Path, upstream: int) -> str:
    return block.replace("/etc/atoll/", f"{directory}/").replace("127.0.0.1:8080", f"127.0.0.1:{upstream}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as said:
        proxy = subprocess.Popen(command, stdout=said, stderr=said, env={"PATH": "/usr/sbin:/usr/bin", "HOME": "/"})

    def answers() -> bool:
        assert proxy.poll() is None, log.read_text()
        with socket.socket() as asked:
            return asked.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers, "the proxy listens")
        yield
    finally:
        proxy.terminate()
        proxy.wait(BOUND_S)


@pytest.fixture(scope="module", params=[nginx, caddy], ids=lambda kind: kind.__name__)
def proxied(
    request: pytest.FixtureRequest, make_state_dir: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxied]:
    name = request.param.__name__
    if shutil.which(name, path="/usr/sbin:/usr/bin") is None:
        message = f"{name} is not installed (Debian's package {PACKAGES[name]})"
        if STRICT:
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    directory = tmp_path_factory.mktemp(name)
    directory.chmod(0o755)
    names = f"subjectAltName=DNS:{NAME},DNS:*.{DOMAIN}"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={NAME} -addext {names}".split()
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run(["openssl", *words, *files], check=True, capture_output=True)
    port, upstream = free_port(), free_port()
    settings = {
        "ATOLL_PUBLIC_URL": f"https://{NAME}:{port}",
        "ATOLL_DOMAIN": DOMAIN,
        "ATOLL_TRUSTED_PROXIES": '["127.0.0.1"]',
    }
    trust = ssl.create_default_context(cafile=directory / "cert.pem")
    command = request.param(directory, port, upstream)
    with (
        running_server(make_state_dir(), "--listen", f"127.0.0.1:{upstream}", environment=settings) as server,
        running(command, port, directory / "log"),
    ):
        yield Proxied(server, port, trust)


async def test_a_proxy_as_it_is_documented_passes_everything(proxied: Proxied) -> None:
    async with proxied.client() as client:
        (await client.post("/api/v1/sandboxes", json={"name": "web"})).raise_for_status()
        box = "/api/v1/sandboxes/web"
        events = {"Accept": "text/event-stream"}
        command = {"command": "echo at once; sleep 1000"}
        async with client.stream("POST", f"{box}/exec", json=command, headers=events) as answer:
            first = await anext(read_events(answer))
        assert (first["event"], first["data"]["text"]) == ("stdout", "at once\n")

        sent = await client.put(f"{box}/files", params={"path": "large"}, content=LARGE)
        assert sent.status_code == 200, sent.text
        got = (await client.get(f"{box}/files", params={"path": "large"})).content
        assert hashlib.sha256(got).digest() == hashlib.sha256(LARGE).digest()

        url = f"wss://{NAME}:{proxied.port}{box}/terminal"
        headers = proxied.server.headers
        async with connect(url, host="127.0.0.1", ssl=proxied.trust, additional_headers=headers) as terminal:
            await terminal.send(b"echo $((6 * 7))\n")
            seen = b""
            with anyio.fail_after(BOUND_S):
                while b"42\r\n" not in seen:
                    message = await terminal.recv()
                    seen += message if isinstance(message, bytes) else b""

        serve = {"command": "(python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &)"}
        (await client.post(f"{box}/exec", json=serve)).raise_for_status()
        preview = urlsplit((await client.post(f"{box}/ports", json={"port": 8000, "wait_s": 20})).json()["url"])
        assert preview.netloc == f"8000-web.{DOMAIN}:{proxied.port}"
        for query, status in (("", 404), (f"?{preview.query}", 200)):
            async with proxied.client(preview.hostname or "") as visitor:
                shown = await visitor.get(f"/{query}")
                assert (shown.status_code, "large" in shown.text) == (status, bool(query))
        assert (await client.delete(box)).status_code == 204
