"""A server that is killed while agents work loses nothing that it acknowledged, and makes no call of a tool twice.

Clients talk to sandboxed and client-side agents, upload bundles and begin workspaces, while `atoll serve` is killed
again and again: during a turn, an upload, a boot and a call. What breaks off they send again with the same key. The
model is one that answers from the conversation, over HTTP; the tool of the bundle appends a line for each call, so that
a call that is made twice shows. `ATOLL_SERVER_KILLS` is how often: `make chaos SERVER_KILLS=100`. The seed is printed
and can be given: `ATOLL_CHAOS_SEED`.
"""

from __future__ import annotations

import io
import json
import os
import random
import secrets
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx2
import pytest

import atoll
from atoll.testing.leaks import Ledger
from atoll.testing.server import RunningServer
from atoll.testing.waiting import SLOWNESS, eventually
from tests.agents.messages_api import MessagesApi, Raw, Refuse, Say, serving
from tests.chaos.model import Broken
from tests.chaos.orphans import orphans
from tests.conftest import REPORTED
from tests.postgresql import Postgresql, running

KILLS = int(os.environ.get("ATOLL_SERVER_KILLS", "4"))
DATABASES = ("sqlite", "postgresql") if "ATOLL_SERVER_KILLS" in os.environ else ("sqlite",)
SEED = os.environ.get("ATOLL_CHAOS_SEED") or secrets.token_hex(4)
CLIENTS = 3
BOUND_S = 60.0 * SLOWNESS
"""Within this a request is answered, however often the server is killed meanwhile."""
MOMENTS_S = (0.0, 0.1, 0.5)
MOST_DONE = 8
"""A server is killed once it has done so many things at most, and a moment later."""
LIFE_S = 5.0 * SLOWNESS
"""How long it lives at most."""
CALLS = 2
"""Of each turn, one after the other."""
LOG = "/workspace/calls.log"
TOOL = f"""
def run(args):
    with open("{LOG}", "a") as file:
        file.write(args["line"] + "\\n")
    return {{"ok": True, "content": "appended " + args["line"]}}
"""


class AppendingModel(MessagesApi):
    """Calls `append` some times with a line of its own, then answers. All of it follows from the conversation."""

    def answer(self, body: dict[str, Any]) -> Say | Refuse | Raw:
        token, calls = "", 0
        for message in body["messages"]:
            for block in message["content"] if isinstance(message["content"], list) else [message["content"]]:
                text = block if isinstance(block, str) else block.get("text", "")
                if message["role"] == "user" and text.startswith("token "):
                    token, calls = text.removeprefix("token "), 0
                elif isinstance(block, dict) and block["type"] == "tool_use":
                    calls += 1
        if calls >= CALLS:
            return Say(f"done {token}")
        return Say(calls=[("append", {"line": f"{token}.{calls}"})], id=f"call_{secrets.token_hex(8)}")


def packed(note: str) -> bytes:
    manifest = {"schema_version": 1, "tools": [{"name": "append", "entrypoint": "tools.append:run"}]}
    files = {"manifest.json": json.dumps(manifest), "tools/__init__.py": f"# {note}\n", "tools/append.py": TOOL}
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return target.getvalue()


@dataclass
class Talk:
    """A conversation, as its client knows it."""

    config: str
    id: str | None = None
    said: list[str] = field(default_factory=list)
    """The tokens of its turns, all of which were answered."""


class ChatClient:
    """Talks, uploads and begins workspaces, one thing after the other."""

    def __init__(self, name: str, server: RunningServer, draw: random.Random) -> None:
        self.name = name
        self._server = server
        self._draw = draw
        self._client = httpx2.AsyncClient(timeout=BOUND_S, trust_env=False)
        self._bundle: dict[str, str] = {}
        self.configs: dict[str, str] = {}
        """The kinds of agents that it has made, by id."""
        self.talks: list[Talk] = []
        self.bundles: dict[str, int] = {}
        """Those whose upload was answered, with their sizes."""
        self.lines: Counter[str] = Counter()
        """What it appended itself, for client-side agents."""
        self.done: Counter[str] = Counter()
        self.doing = ""
        """What it does now."""
        self.again = 0

    async def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """The answer, however long that takes. A request that is lost is sent again, as it is."""
        options["headers"] = {**self._server.headers, **options.get("headers", {})}
        with anyio.fail_after(BOUND_S):
            while True:
                try:
                    answer = await self._client.request(method, f"{self._server.url}/api/v1/{path}", **options)
                except httpx2.TransportError:
                    self.again += 1
                    await anyio.sleep(0.02)
                    continue
                if answer.status_code != 503:
                    return answer
                await anyio.sleep(0.02)

    async def make(self, path: str, **options: Any) -> Any:
        """What comes of a request that makes something, with a key, however often it is sent."""
        key = {"Idempotency-Key": self._draw.randbytes(12).hex()}
        while True:
            answer = await self.ask("POST", path, **{**options, "headers": {**options.get("headers", {}), **key}})
            if answer.is_success:
                return answer.json()
            if answer.json()["code"] == "outcome_unknown":
                key = {"Idempotency-Key": self._draw.randbytes(12).hex()}
                continue
            raise Broken(f"{path}: {answer.status_code} {answer.text}")

    async def run(self, is_over: Callable[[], bool]) -> None:
        await self._upload()
        await self._new_config()
        while not is_over():
            action = self._draw.choices([self._chat, self._upload, self._new_config], [8, 2, 1])[0]
            await action()
            self.doing = ""

    async def _upload(self) -> None:
        self.doing = "upload"
        data = packed(f"{self.name} {self._draw.randbytes(8).hex()}")
        answer = await self.ask("POST", "bundles", content=data, headers={"Content-Type": "application/gzip"})
        if not answer.is_success:
            raise Broken(f"an upload was answered with {answer.text}")
        made = answer.json()
        self.bundles[made["bundle_id"]] = len(data)
        self._bundle = {"url": f"nap-bundle://{made['bundle_id']}", "sha256": made["sha256"]}
        self.done["upload"] += 1

    async def _new_config(self) -> None:
        self.doing = "config"
        kind = self._draw.choice(["sandboxed", "client-side"]) if self.configs else "sandboxed"
        body: dict[str, Any] = {"name": self.name, "agent_type": kind, "tools_config": ["append"]}
        if kind == "sandboxed":
            body["provisioning_bundle"] = self._bundle
        made = await self.make("configs", json=body)
        self.configs[made["id"]] = kind
        self.done["config"] += 1

    async def _chat(self) -> None:
        old = [talk for talk in self.talks if len(talk.said) < 4]
        is_old = bool(old) and self._draw.random() < 0.6
        talk = self._draw.choice(old) if is_old else Talk(self._draw.choice([*self.configs]))
        is_booted = any(each.config == talk.config for each in self.talks)
        self.doing = f"{self.configs[talk.config]} turn"
        if self.configs[talk.config] == "sandboxed" and not is_booted:
            self.doing = "turn that boots a workspace"
        token = self._draw.randbytes(8).hex()
        given = {} if talk.id is None else {"conversation_id": talk.id}
        answer = await self.make(f"chat/{talk.config}", json={"message": f"token {token}", **given})
        while answer["tool_calls"]:
            results = []
            for call in answer["tool_calls"]:
                self.lines[call["arguments"]["line"]] += 1
                results.append({"tool_call_id": call["id"], "name": call["name"], "content": "appended"})
            body = {"conversation_id": answer["conversation_id"], "tool_results": results}
            answer = await self.make(f"chat/{talk.config}", json=body)
        if answer["response"] != f"done {token}":
            raise Broken(f"the turn {token} was answered with {answer}")
        if talk.id is None:
            talk.id = answer["conversation_id"]
            self.talks.append(talk)
        talk.said.append(token)
        self.done[self.configs[talk.config]] += 1

    # ---- what must be true ----

    async def check(self) -> None:
        for talk in self.talks:
            await self._check_talk(talk)
        for id, size in self.bundles.items():
            stored = (await self.ask("GET", f"bundles/{id}")).json()
            if stored.get("size_bytes") != size:
                raise Broken(f"the bundle {id} that was acknowledged is {stored}")

    async def _check_talk(self, talk: Talk) -> None:
        shown = (await self.ask("GET", f"conversations/{talk.id}", params={"limit": 1000})).json()
        messages = shown["messages"]
        said = [each["content"].removeprefix("token ") for each in messages if each["role"] == "user"]
        if said != talk.said:
            raise Broken(f"of the conversation {talk.id}, {talk.said} was acknowledged, and {said} is stored")
        calls = {call["id"]: call["arguments"]["line"] for each in messages for call in each["tool_calls"]}
        results = {each["tool_call_id"]: each["outcome"] for each in messages if each["role"] == "tool"}
        if [*calls] != [*results]:
            raise Broken(f"of the conversation {talk.id}, the calls {calls} have the results {results}")
        lines = self.lines if self.configs[talk.config] == "client-side" else await self._appended(talk.config)
        for id, line in calls.items():
            times, made = lines[line], [call for call, each in calls.items() if each == line]
            if times > len(made) or (results[id] == "success" and times < 1):
                raise Broken(f"the call {id} ({line}, {results[id]}) was made {times} times")

    async def _appended(self, config: str) -> Counter[str]:
        name = (await self.ask("GET", f"configs/{config}/workspace")).json()["sandbox"]
        answer = await self.ask("GET", f"sandboxes/{name}/files", params={"path": LOG})
        return Counter(answer.text.splitlines()) if answer.is_success else Counter()

    async def end(self) -> None:
        """Remove all that it has, also what was made by a request whose answer was lost."""
        listed = (await self.ask("GET", "configs", params={"limit": 1000})).json()["items"]
        for id in [each["id"] for each in listed if each["name"] == self.name]:
            await self.ask("DELETE", f"configs/{id}")

    async def aclose(self) -> None:
        await self._client.aclose()


async def live(clients: list[ChatClient], draw: random.Random) -> None:
    """Until a few things more are done, or for a while, and a moment longer."""

    def done() -> int:
        return sum(client.done.total() for client in clients)

    wanted = done() + draw.randrange(MOST_DONE)
    with anyio.move_on_after(LIFE_S):
        while done() < wanted:
            await anyio.sleep(0.005)
    await anyio.sleep(draw.uniform(0, draw.choice(MOMENTS_S)))


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Postgresql]:
    with running() as server:
        yield server


@pytest.mark.skipif(os.geteuid() != 0, reason="its sandboxes are made from checkpoints while others run: needs root")
@pytest.mark.timeout((180 + 15 * KILLS) * SLOWNESS)
@pytest.mark.parametrize("database", DATABASES)
async def test_a_server_that_is_killed_while_agents_work_loses_nothing_and_makes_no_call_twice(
    make_state_dir: Callable[[], Path],
    ledger: Ledger,
    record_property: Callable[[str, object], None],
    request: pytest.FixtureRequest,
    database: str,
) -> None:
    state_dir, draw = make_state_dir(), random.Random(SEED)
    print(f"seed {SEED}, {KILLS} kills: ATOLL_CHAOS_SEED={SEED} ATOLL_SERVER_KILLS={KILLS}", flush=True)
    began, over, hit = time.monotonic(), False, Counter[str]()
    with serving(AppendingModel([])) as api:
        environment = {"ANTHROPIC_BASE_URL": api.url, "ANTHROPIC_API_KEY": "test-key", "PYTHONFAULTHANDLER": "1"}
        if database == "postgresql":
            environment["ATOLL_DATABASE_URL"] = request.getfixturevalue("postgresql").create()
        server = RunningServer(state_dir, (), environment)
        await anyio.to_thread.run_sync(server.start)
        clients = [ChatClient(f"c{number}", server, random.Random(f"{SEED}-{number}")) for number in range(CLIENTS)]
        try:
            async with anyio.create_task_group() as tasks:
                for client in clients:
                    tasks.start_soon(client.run, lambda: over)
                for _ in range(KILLS):
                    await live(clients, draw)
                    hit.update(client.doing or "nothing" for client in clients)
                    await anyio.to_thread.run_sync(server.kill)
                    await anyio.to_thread.run_sync(server.start)
                over = True
            for client in clients:
                await client.check()
            for client in clients:
                await client.end()
            for bundle in (await clients[0].ask("GET", "bundles", params={"limit": 1000})).json()["items"]:
                await clients[0].ask("DELETE", f"bundles/{bundle['bundle_id']}")
            assert api.complaints == []
            server.stop()
        except BaseException as error:
            error.add_note(f"with the seed {SEED}, after {[dict(each.done) for each in clients]}")
            error.add_note(server.log.read_text()[-6000:])
            raise
        finally:
            server.kill()
            for client in clients:
                await client.aclose()
    async with atoll.open(state_dir) as engine:
        assert (await engine.list(), await engine.volumes.list()) == ([], [])
        for checkpoint in await engine.checkpoints():
            raise Broken(f"the checkpoint {checkpoint} of a bundle that was deleted is left")
    await eventually(lambda: not ledger.all_of(state_dir), "nothing is left of it", bound_s=10 * SLOWNESS)
    assert orphans(ledger, state_dir) == []
    done, again = sum((client.done for client in clients), Counter[str]()), sum(client.again for client in clients)
    told = f"{database}, seed {SEED}, {KILLS} kills, {time.monotonic() - began:.0f} s, done {dict(done)}, "
    record_property(REPORTED, f"{told}killed while clients did {dict(hit)}, {again} sent again")
