"""`expose`: an address that works while the command runs, and not after."""

from __future__ import annotations

import http.client
import json
import signal
from urllib.parse import urlsplit

import pytest

from tests.cli.driving import Atoll


def fetch(address: str, target: str | None = None, **headers: str) -> tuple[int, bytes]:
    """Ask for an address as a client without cookies does, which cannot resolve its name."""
    parts = urlsplit(address)
    assert parts.port is not None
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=20)
    try:
        connection.request("GET", target or f"{parts.path}?{parts.query}", headers={"Host": parts.netloc, **headers})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_expose_prints_addresses_that_work_and_notes_requests(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--detach", "--", "python3", "-m", "http.server", "8000", "--bind", "127.0.0.1")
    serving = atoll.start("expose", box, "8000", "--wait", "20s")
    serving.read_until(b"/preview/")
    url, path_url = serving.read_until(b"\n").decode().split()
    assert fetch(url)[0] == 200
    assert fetch(path_url)[0] == 200
    assert fetch(url, "/")[0] == 404
    serving.send_signal(signal.SIGINT)
    assert serving.wait() == 128 + signal.SIGINT
    if "ATOLL_URL" not in atoll.env:  # a server has them in its log
        noted = serving.errors().decode()
        assert f"{box}:8000 GET / → 200" in noted
        assert "atoll_token" not in noted


def test_expose_tells_when_nothing_listens_and_what_it_serves_as_json(atoll: Atoll, box: str) -> None:
    failed = atoll("expose", box, "59", "--wait", "50ms", status=1)
    assert b"nothing listened on port 59" in failed.stderr
    assert b"1 to 65535" in atoll("expose", box, "0", status=2).stderr
    serving = atoll.start("expose", box, "59", "--json")
    preview = json.loads(serving.read_until(b"}\n"))
    assert (preview["sandbox"], preview["port"]) == (box, 59)
    status, body = fetch(preview["url"], "/", **{"Atoll-Token": preview["token"]})
    assert (status, body.startswith(b"Nothing listens on port 59.")) == (502, True)
    serving.send_signal(signal.SIGTERM)
    assert serving.wait() == 128 + signal.SIGTERM


@pytest.mark.local("the address is the server's")
def test_an_address_that_cannot_be_served_on_is_told_with_what_to_do(atoll: Atoll, box: str) -> None:
    atoll.env["ATOLL_PREVIEW_LISTEN"] = "nowhere"
    assert b"such as localhost:8000" in atoll("expose", box, "80", status=None).stderr
    atoll.env["ATOLL_PREVIEW_LISTEN"] = "192.0.2.1:80"
    assert b"ATOLL_PREVIEW_LISTEN=ADDRESS:PORT" in atoll("expose", box, "80", status=None).stderr
