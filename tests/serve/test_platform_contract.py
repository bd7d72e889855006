"""The published contract of hosted tools, call by call: a client that was written for it works with this server.

The requests are those that its pages show, with curl, against a running server with a scripted model; the assertions
are the shapes that they promise.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from atoll.testing.server import RunningServer, running_server
from tests.docs.test_platform_page import remove_built

READ_FILE = """
from pathlib import Path

WORKSPACE = Path("/workspace")


def run(args):
    target = (WORKSPACE / str(args.get("path"))).resolve()
    if not target.is_file():
        return {"ok": False, "content": f"not found: {args.get('path')}"}
    return {"ok": True, "content": target.read_text()}
"""
PICTURE = """
def run(args):
    return {
        "ok": True,
        "content": [
            {"kind": "text", "content": "Here's the screenshot:"},
            {"kind": "image-url", "url": "data:image/png;base64,iVBORw0KGgo="},
            {"kind": "document-url", "url": "https://example.com/a.pdf"},
        ],
    }
"""
WRITE_FILE = """
import os
from pathlib import Path


def run(args):
    (Path("/workspace") / str(args["path"])).write_text(str(args["content"]))
    return {"ok": True, "content": f"written, with a token of {len(os.environ['GITHUB_TOKEN'])} characters"}
"""
MANIFEST = {
    "schema_version": 1,
    "tools": [
        {"name": "read_file", "entrypoint": "tools.read_file:run"},
        {"name": "write_file", "entrypoint": "tools.write_file:run"},
    ],
    "requirements": [],
    "node_modules": [],
}
SCRIPT = {
    "conversation": [
        {
            "prompt": "client-side",
            "step": [
                {"call": [{"tool": "write_file", "input": {"path": "data/site.json", "content": "..."}}]},
                {"text": "Done.", "expect": {"result": [{"contains": ["ok"]}]}},
            ],
        },
        {
            "prompt": "sandboxed",
            "step": [
                {"call": [{"tool": "write_file", "input": {"path": "index.html", "content": "<h1>Sea</h1>"}}]},
                {"call": [{"tool": "read_file", "input": {"path": "index.html"}}]},
                {"call": [{"tool": "read_file", "input": {"path": "gone.html"}}]},
                {"text": "The page says Sea.", "expect": {"result": [{"contains": ["not found"], "error": True}]}},
            ],
        },
        {
            "prompt": "picture",
            "step": [
                {"call": [{"tool": "read_file", "input": {}}]},
                {
                    "text": "A picture.",
                    "expect": {
                        "result": [
                            {"contains": ["Here's the screenshot:", "[document] https://example.com/a.pdf"]},
                        ]
                    },
                },
            ],
        },
        {
            "prompt": "broken",
            "step": [
                {"call": [{"tool": "read_file", "input": {}}]},
                {"text": "It is broken.", "expect": {"result": [{"contains": ["bundle_"], "error": True}]}},
            ],
        },
    ]
}


@pytest.fixture(scope="module")
def server(make_state_dir: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Curl]:
    state_dir, scripts = make_state_dir(), tmp_path_factory.mktemp("scripts")
    (scripts / "model.json").write_text(json.dumps(SCRIPT))
    with running_server(state_dir, environment={"ATOLL_AGENT_MODELS": f"script:{scripts}/*"}) as server:
        yield Curl(server, {"provider": "script", "model": f"{scripts}/model.json"})
    anyio.run(remove_built, state_dir)


class Curl:
    def __init__(self, server: RunningServer, model: dict[str, str]) -> None:
        self._server = server
        self.model = model

    def __call__(self, path: str, *arguments: str, body: object = None, data: bytes | None = None) -> Any:
        given = [*arguments]
        if body is not None:
            given += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        command = ["curl", "-s", "-S", f"{self._server.url}{path}", "-H", f"X-API-Key: {self._server.key}", *given]
        done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=True)
        return json.loads(done.stdout) if done.stdout else None


def packed(read_file: str = READ_FILE, **manifest: Any) -> bytes:
    files = {
        "manifest.json": json.dumps({**MANIFEST, **manifest}),
        "tools/__init__.py": "",
        "tools/read_file.py": read_file,
        "tools/write_file.py": WRITE_FILE,
    }
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return target.getvalue()


def test_tools_that_the_client_runs(server: Curl) -> None:
    config = server(
        "/api/v1/configs",
        "-X",
        "POST",
        body={"name": "Site Editor", "model_config": server.model, "tools_config": ["read_file", "write_file"]},
    )
    assert config["agent_type"] == "client-side"
    chat = f"/api/v1/chat/{config['id']}"
    asked = server(chat, "-X", "POST", body={"message": "client-side"})
    assert asked["response"] is None
    (call,) = asked["tool_calls"]
    assert set(call) == {"id", "name", "arguments"}
    assert (call["name"], call["arguments"]) == ("write_file", {"path": "data/site.json", "content": "..."})
    assert str(uuid.UUID(asked["conversation_id"])) == asked["conversation_id"]
    done = server(
        chat,
        "-X",
        "POST",
        body={
            "conversation_id": asked["conversation_id"],
            "tool_results": [{"tool_call_id": call["id"], "name": "write_file", "content": "ok"}],
        },
    )
    assert (done["response"], done["tool_calls"]) == ("Done.", [])
    assert done["conversation_id"] == asked["conversation_id"]


def upload(server: Curl, bundle: bytes) -> Any:
    return server(
        "/api/v1/bundles", "-X", "POST", "-H", "Content-Type: application/gzip", "--data-binary", "@-", data=bundle
    )


def test_tools_in_a_bundle(server: Curl) -> None:
    bundle = packed()
    uploaded = upload(server, bundle)
    assert uploaded["bundle_id"].startswith("bdl_")
    assert (uploaded["sha256"], uploaded["size_bytes"]) == (hashlib.sha256(bundle).hexdigest(), len(bundle))
    body: dict[str, Any] = {
        "name": "Site Editor",
        "agent_type": "sandboxed",
        "system_prompt": "You edit a static site under /workspace.",
        "model_config": server.model,
        "tools_config": ["read_file", "write_file"],
        "provisioning_bundle": {"url": f"nap-bundle://{uploaded['bundle_id']}", "sha256": uploaded["sha256"]},
        "workspace_secrets": {"GITHUB_TOKEN": "ghp_0123456789abcdef"},
    }
    config = server("/api/v1/configs", "-X", "POST", body=body)
    assert "ghp_" not in json.dumps(config)
    reply = server(f"/api/v1/chat/{config['id']}", "-X", "POST", body={"message": "sandboxed"})
    assert (reply["response"], reply["tool_calls"]) == ("The page says Sea.", [])
    (instance,) = server(f"/api/v1/configs/{config['id']}/workspace/instances")["items"]
    shown = server(f"/api/v1/configs/{config['id']}/workspace/instances/{instance['external_id']}")
    assert (shown["state"], shown["reason"]) == ("running", None)

    diverging = server("/api/v1/configs", "-X", "POST", body={**body, "tools_config": ["read_file", "build_site"]})
    assert diverging["details"] == {"unknown": ["build_site"], "unnamed": ["write_file"]}
    wrong = {**body["provisioning_bundle"], "sha256": "0" * 64}
    refused = server("/api/v1/configs", "-X", "POST", body={**body, "provisioning_bundle": wrong})
    assert refused["details"]["reason"] == "bundle_integrity_failed"

    # An edited tool: pack it again, upload it, and point the config at it. The next chat has it.
    edited = upload(server, packed(PICTURE))
    handle = {"url": f"nap-bundle://{edited['bundle_id']}", "sha256": edited["sha256"]}
    changed = server(f"/api/v1/configs/{config['id']}", "-X", "PATCH", body={"provisioning_bundle": handle})
    assert changed["provisioning_bundle"] == handle
    assert "ghp_" not in json.dumps(changed)
    reply = server(f"/api/v1/chat/{config['id']}", "-X", "POST", body={"message": "picture"})
    assert reply.get("response") == "A picture.", reply

    other = server("/api/v1/configs", "-X", "POST", body={**body, "name": "Another site"})
    for broken, reason, words in (
        (packed(build_command="echo no compiler; exit 3"), "bundle_build_failed", "exit code 3:\nno compiler"),
        (packed("import no_such_module"), "bundle_entrypoint_invalid", "No module named 'no_such_module'"),
    ):
        made = upload(server, broken)
        handle = {"url": f"nap-bundle://{made['bundle_id']}", "sha256": made["sha256"]}
        server(f"/api/v1/configs/{other['id']}", "-X", "PATCH", body={"provisioning_bundle": handle})
        reply = server(f"/api/v1/chat/{other['id']}", "-X", "POST", body={"message": "broken"})
        assert reply.get("response") == "It is broken.", reply
        instance = server(f"/api/v1/configs/{other['id']}/workspace/instances")["items"][-1]
        shown = server(f"/api/v1/configs/{other['id']}/workspace/instances/{instance['external_id']}")
        assert (shown["state"], shown["reason"]) == ("failed", reason)
        assert words in shown["message"]
        assert words in shown["log"]
    refused = upload(server, packed(schema_version=2))
    assert refused["details"]["reason"] == "bundle_manifest_invalid"
    for each in (config, other):
        assert server(f"/api/v1/configs/{each['id']}", "-X", "DELETE") is None
