"""`docs/server.md` is true: its commands run against a server, in the order in which they stand there.

Those about what happens inside a sandbox are run by `tests/rest/test_docs.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from atoll.testing.server import running_server

PAGE = Path(__file__).parents[2] / "docs/server.md"


def blocks(language: str) -> list[str]:
    text = re.sub(r"^## Inside a sandbox\n.*?(?=^## )", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def test_the_commands_of_the_page_run(make_state_dir: Callable[[], Path], tmp_path: Path) -> None:
    with running_server(make_state_dir()) as server:
        script = "\n".join(["set -euo pipefail", *blocks("sh"), _CLEAN])
        script = script.replace("http://127.0.0.1:8080", server.url).replace("atoll_KEY", server.key)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    assert lines[0] == '"default"'
    replayed = [line for line in lines if re.fullmatch(r'"sandbox-[0-9a-f]+"', line)]
    assert len(replayed) >= 2
    assert len(set(replayed[:2])) == 1
    assert '  "code": "sandbox_not_found",' in lines


_CLEAN = """
for name in $(atoll_curl $URL/api/v1/sandboxes | jq --raw-output '.items[].name'); do
  atoll_curl --request DELETE "$URL/api/v1/sandboxes/$name?checkpoints=true"
done
"""


def test_the_signature_of_the_page_is_ours() -> None:
    check = """
from atoll.server.webhooks import sign
signed = sign("secret", b"body", int(time.time()))
assert is_genuine("secret", signed, b"body")
assert not is_genuine("secret", signed, b"another")
assert not is_genuine("other", signed, b"body")
assert not is_genuine("secret", sign("secret", b"body", int(time.time()) - 1000), b"body")
"""
    (program,) = blocks("python")
    subprocess.run([sys.executable, "-c", program + check], check=True)
