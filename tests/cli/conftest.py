"""Where the command line's tests get a state directory, the command line and a sandbox from."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from atoll.testing.nursery import Nursery
from atoll.testing.waiting import wait_until
from tests.cli.driving import Atoll


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A nursery that has imported every command, and what those of the server need."""
    from atoll.surfaces.cli.app import MODULES

    modules = ("streaming", "terminal", "conversation", "app", *(f"commands.{name}" for name in MODULES))
    server = ("atoll.server.server", "alembic.command", "sqlalchemy.dialects.sqlite.aiosqlite")
    commands = (f"atoll.surfaces.cli.{name}" for name in modules)
    nursery = Nursery(tmp_path_factory.mktemp("nursery"), *commands, *server)
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def state_dir(
    tmp_path_factory: pytest.TempPathFactory, give_host_image: Callable[[Path], Path], nursery: Nursery
) -> Iterator[Path]:
    """One state directory for all tests, so that they meet as users do.

    When all have ended, nothing is left in it.
    """
    path = give_host_image(tmp_path_factory.mktemp("state"))
    yield path
    cli = Atoll(path, path, nursery)
    wait_until(lambda: cli.names() == [] and not os.listdir(path / "sandboxes"), "no sandbox is left")


@pytest.fixture(scope="session")
def server_env(request: pytest.FixtureRequest, state_dir: Path) -> dict[str, str]:
    """With `--atoll-face remote`, commands work with a server that has the state directory."""
    if request.config.getoption("atoll_face") != "remote":
        return {}
    server = request.getfixturevalue("servers")(state_dir)
    return {"ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}


@pytest.fixture
def atoll(state_dir: Path, tmp_path: Path, nursery: Nursery, server_env: dict[str, str]) -> Iterator[Atoll]:
    cli = Atoll(state_dir, tmp_path, nursery)
    cli.env |= server_env
    yield cli
    cli.close()


@pytest.fixture
def box(atoll: Atoll) -> str:
    return atoll.box()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"reached\n")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server on this machine's loopback."""
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()
