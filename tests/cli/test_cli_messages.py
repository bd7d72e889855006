"""`atoll messages`, as far as it is the command line's. What it serves is in tests/messages."""

from __future__ import annotations

import signal
from pathlib import Path

from anthropic import Anthropic

from tests.cli.driving import Atoll


def test_a_client_is_answered_with_code_that_ran_here(atoll: Atoll, tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text(
        '[[step]]\n[[step.call]]\ntool = "execute_code"\ninput.code = "print(6 * 7)"\n'
        '[[step]]\ntext = "It is 42."\n[[step.expect.result]]\ncontains = ["42"]\n'
    )
    server = atoll.start("messages", "--listen", "127.0.0.1:0", "--model", f"script:{script}")
    url = server.read_until(b"\n").decode().strip()
    with Anthropic(base_url=url, api_key="any") as client:
        message = client.messages.create(
            model="claude-opus-5",
            max_tokens=100,
            tools=[{"type": "code_execution_20260120", "name": "code_execution"}],
            messages=[{"role": "user", "content": "What is six times seven?"}],
        )
    assert message.content[-1].type == "text"
    assert message.content[-1].text == "It is 42."
    server.send_signal(signal.SIGINT)
    assert server.wait() == 130
    assert atoll.names() == []


def test_what_others_could_reach_needs_a_token(atoll: Atoll) -> None:
    done = atoll("messages", "--listen", "0.0.0.0:0", "--model", "script:/nowhere", status=2)
    assert b"ATOLL_MESSAGES_TOKEN" in done.stderr
    assert b"give an address and a port" in atoll("messages", "--listen", "everywhere", status=2).stderr
