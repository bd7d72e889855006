"""The value of an agent's secret is nowhere but where its tools need it, whatever they do with it."""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from atoll.testing.server import running_server
from tests.docs.test_platform_page import remove_built

SEEN, OUTSIDE = "seen-by-tools-41c7f0a9", "kept-outside-77be0d13"
FORMS = [
    form
    for value in (SEEN, OUTSIDE)
    for form in (
        value,
        value.encode().hex(),
        base64.b64encode(value.encode()).decode().rstrip("=")[:-1],
        base64.b64encode(f"user:{value}".encode()).decode()[8:-4],
    )
]
TOOL = '''
import base64
import json
import os
import sys
from urllib.parse import quote


def run(args):
    """Tells what it knows."""
    known = f"{os.environ['SEEN']} {os.environ['OUTSIDE']}"
    for stream in (sys.stdout, sys.stderr):
        print("known:", known, base64.encodebytes(known.encode()).decode(), quote(known), file=stream, flush=True)
    with open("/workspace/known", "w") as file:
        file.write("nothing")
    if args.get("raise"):
        raise ValueError(f"{dict(os.environ)}")
    if args.get("crash"):
        print(dict(os.environ), flush=True)
        os.abort()
    told = {"known": known, "header": "Basic " + base64.b64encode(f"user:{known}".encode()).decode()}
    return {"ok": True, "content": [{"kind": "text", "content": known}, {"kind": "text", "content": json.dumps(told)}]}
'''
SCRIPT: dict[str, Any] = {
    "step": [
        {"call": [{"tool": "tell", "input": each} for each in ({}, {"raise": True}, {"crash": True})]},
        {"call": [{"tool": "bash", "input": {"command": "env; env >&2; exit 3"}}]},
        {"text": "Told.", "expect": {"result": [{"error": "any"}]}},
    ]
}
SCRIPT["step"][1]["expect"] = {
    "result": [
        {"contains": ["Basic dXNlcjp[the secret SEEN]", "[the secret SEEN] atoll_secret_"]},
        {"contains": ["raised an error", "[the secret SEEN]"], "error": True},
        {"contains": ["SIGABRT"], "error": True},
    ]
}


def bundle() -> bytes:
    manifest = {
        "schema_version": 1,
        "tools": [{"name": "tell", "entrypoint": "tools.tell:run"}],
        "build_command": "echo the build sees; env",
    }
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in {
            "manifest.json": json.dumps(manifest),
            "tools/__init__.py": "",
            "tools/tell.py": TOOL,
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return target.getvalue()


def holding(directory: Path) -> Iterator[str]:
    """The files below a directory that have one of the values in them."""
    for path in directory.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if any(form.encode() in data for form in FORMS):
            yield str(path)


def told_by_ps() -> str:
    """What each process of the machine shows: how it was started, and its environment, which is that of a sandbox for
    those inside of one."""
    lines, host = [], os.readlink("/proc/self/ns/pid")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((process / "cmdline").read_bytes())
            environment = (process / "environ").read_bytes()
            is_inside = os.readlink(process / "ns/pid") != host
        except OSError:
            continue
        lines.append(environment.replace(SEEN.encode(), b"") if is_inside else environment)
    return b" ".join(lines).replace(b"\0", b" ").decode("utf-8", "replace")


@pytest.mark.parametrize("streams", [False, True])
def test_a_secret_is_in_no_file_answer_event_log_or_command_line(
    make_state_dir: Callable[[], Path], tmp_path: Path, streams: bool
) -> None:
    state_dir = make_state_dir()
    (tmp_path / "model.json").write_text(json.dumps(SCRIPT))
    seen: list[str] = []
    with running_server(state_dir, environment={"ATOLL_AGENT_MODELS": f"script:{tmp_path}/*"}) as server:
        with httpx2.Client(base_url=server.url, headers=server.headers, timeout=60) as client:

            def ask(method: str, path: str, **options: Any) -> Any:
                answer = client.request(method, f"/api/v1/{path}", **options)
                assert answer.is_success, answer.text
                seen.append(answer.text)
                return answer.json() if answer.content and "json" in answer.headers["content-type"] else None

            stored = ask("POST", "bundles", content=bundle(), headers={"Content-Type": "application/gzip"})
            config = ask(
                "POST",
                "configs",
                headers={"Idempotency-Key": "made-once"},
                json={
                    "name": "Teller",
                    "agent_type": "sandboxed",
                    "model_config": {"provider": "script", "model": f"{tmp_path}/model.json"},
                    "tools_config": ["tell", "bash"],
                    "provisioning_bundle": {
                        "url": f"nap-bundle://{stored['bundle_id']}",
                        "sha256": stored["sha256"],
                    },
                    "workspace_secrets": {
                        "SEEN": SEEN,
                        "OUTSIDE": {"value": OUTSIDE, "hosts": ["api.example.com"]},
                    },
                },
            )["id"]
            headers = {"Accept": "text/event-stream" if streams else "*/*", "Idempotency-Key": "said-once"}
            ask("POST", f"chat/{config}", json={"message": "Tell."}, headers=headers)
            assert "Told." in seen[-1], seen[-1]
            seen.append(told_by_ps())
            workspace = ask("GET", f"configs/{config}/workspace")["sandbox"]
            ask("POST", f"sandboxes/{workspace}/checkpoints", json={"label": "kept"})
            for path in (
                f"configs/{config}",
                f"configs/{config}/versions",
                f"configs/{config}/workspace/instances",
                f"conversations/{ask('GET', 'conversations')['items'][0]['id']}",
                f"sandboxes/{workspace}",
                f"sandboxes/{workspace}/checkpoints",
                "audit",
                "events?after=0&follow=false",
            ):
                ask("GET", path)
            log = ask("GET", f"configs/{config}/workspace/instances")["items"][-1]["log"]
            assert "the build sees" in log
            assert log.count("known: [the secret SEEN] ") == 6
            assert "'SEEN': '[the secret SEEN]'" in log
            assert not [(form, text) for text in seen for form in FORMS if form in text]
            assert [*holding(state_dir)] == []
            refused = client.post("/api/v1/configs", json={"name": "x", "workspace_secrets": {"NO WAY": SEEN}})
            assert refused.status_code == 400
            assert SEEN not in refused.text
            ask("DELETE", f"configs/{config}")
        server.stop()
        assert not [form for form in FORMS if form in server.log.read_text()]
        assert [*holding(state_dir)] == []
    anyio.run(remove_built, state_dir)
