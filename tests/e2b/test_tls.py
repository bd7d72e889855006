"""The E2B SDK with nothing but a domain, over TLS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.testing.server import RunningServer, running_server
from atoll.testing.waiting import BOUND_S

DOMAIN = "boxes.localhost"
PROGRAM = Path(__file__).with_name("by_domain.py")


@pytest.fixture(scope="module")
def server(state_dir: Path) -> Iterator[RunningServer]:
    with running_server(state_dir, "--tls-self-signed", environment={"ATOLL_DOMAIN": DOMAIN}) as server:
        yield server


def test_api_sandbox_and_ports_are_reached_by_their_names_over_https(server: RunningServer) -> None:
    authority = server.state_dir / "server/tls/ca.pem"
    where = {"E2B_DOMAIN": f"{DOMAIN}:{server.port}", "E2B_API_KEY": server.key, "SSL_CERT_FILE": str(authority)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    ran = subprocess.run(
        [sys.executable, PROGRAM],
        env=kept | where,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * BOUND_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
