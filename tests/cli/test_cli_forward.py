"""`forward`: a port of this machine that works while the command runs, and not after."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request

import pytest

from tests.cli.driving import Atoll


def test_forward_prints_an_address_that_works_until_it_is_interrupted(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--detach", "--", "python3", "-m", "http.server", "8000", "--bind", "127.0.0.1")
    serving = atoll.start("expose", box, "8000", "--wait", "20s")
    serving.read_until(b"/preview/")  # the server listens
    serving.send_signal(signal.SIGINT)
    serving.wait()
    forwarding = atoll.start("forward", box, "8000")
    address = forwarding.read_until(b"\n").decode().strip()
    assert address.startswith("127.0.0.1:")
    with urllib.request.urlopen(f"http://{address}/", timeout=20) as page:
        assert b"Directory listing" in page.read()
    forwarding.send_signal(signal.SIGINT)
    assert forwarding.wait() == 128 + signal.SIGINT
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20)


def test_forward_takes_the_port_that_is_asked_for_and_says_it_as_json(atoll: Atoll, box: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = atoll("forward", box, "80", "--local", str(port), status=2)
        assert b"Address already in use" in failed.stderr
    forwarding = atoll.start("forward", box, "80", "--local", str(port), "--json")
    assert json.loads(forwarding.read_until(b"}\n")) == {"name": box, "port": 80, "local_port": port}
    forwarding.send_signal(signal.SIGTERM)
    assert forwarding.wait() == 128 + signal.SIGTERM
    assert b"1 to 65535" in atoll("forward", box, "0", status=2).stderr
