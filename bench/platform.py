"""What a hosted agent costs beyond its model: turns over REST with a scripted model."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import anyio.to_thread
import httpx2

from atoll.agents import models
from atoll.agents.loop import Agent
from atoll.testing.server import RunningServer
from bench.lab import Lab
from bench.results import Row, Section, Spread, Table, Value, times
from bench.sampling import Contender, in_turns, timed
from bench.server import Load, RestConnection, load_of, request_for, target_of

HOW = """\
`atoll serve` as a process of its own, with SQLite. One at a time, interleaved: a turn of the scripted model in this
process, with nothing stored (`Agent.run`); `POST /api/v1/chat/CONFIG` with a message that begins a conversation, on one
connection that is kept open, for a client-side agent, which answers at once, and for a sandboxed agent, which calls a
tool first that needs no workspace (`echo`), so that it is asked twice. Many at once: 50 connections, each of which
begins one conversation after the other."""
ALONE, CLIENT_SIDE, SANDBOXED = "the model alone", "chat, client-side", "chat, sandboxed, with a call"
AT_ONCE = 50
OVERHEAD_BOUND_S = 0.015
SCRIPT = {
    "step": [{"text": "Good day."}],
    "conversation": [
        {"prompt": "Call", "step": [{"call": [{"tool": "echo", "input": {"text": "sea"}}]}, {"text": "Good day."}]}
    ],
}


async def measure(lab: Lab) -> Section:
    script = lab.scratch / "platform.json"
    script.write_text(json.dumps(SCRIPT))
    async with AsyncExitStack() as stack:
        environment = {"ATOLL_LOG_LEVEL": "warning", "ATOLL_AGENT_MODELS": f"script:{script}"}
        server = RunningServer(lab.engine.state_dir, (), environment)
        stack.callback(server.stop)
        await anyio.to_thread.run_sync(server.start)
        client = stack.enter_context(httpx2.Client(base_url=server.url, headers=server.headers, timeout=60))
        configs = {kind: _config(client, kind, script) for kind in ("client-side", "sandboxed")}
        turns = {kind: _turn(server, config, kind) for kind, config in configs.items()}
        with closing(RestConnection(server)) as connection:
            samples = await _turns(lab, connection, turns, script)
        many = await load_of(server, [turns["client-side"]] * AT_ONCE, lab.amount(10, 2))
        for config in configs.values():
            client.delete(f"/api/v1/configs/{config}").raise_for_status()
    over = Spread.of(samples[CLIENT_SIDE]).median - Spread.of(samples[ALONE]).median
    targets = (
        target_of("a chat turn beyond the model's own time, median", OVERHEAD_BOUND_S, "s", over),
        target_of(f"errors of {AT_ONCE} conversations at once", 0, "", sum(many.errors.values())),
    )
    tables = (times("A turn, one at a time", samples, against=ALONE), _many_table(many))
    return Section(subject="platform", title="Hosted agents", how=HOW, tables=tables, targets=targets)


def _config(client: httpx2.Client, kind: str, script: Path) -> str:
    body = {
        "name": kind,
        "agent_type": kind,
        "system_prompt": "You are {agent_name} of {tenant_name}.",
        "model_config": {"provider": "script", "model": str(script)},
        "tools_config": ["echo"],
    }
    return str(client.post("/api/v1/configs", json=body).raise_for_status().json()["id"])


def _turn(server: RunningServer, config: str, kind: str) -> bytes:
    message = "Hello" if kind == "client-side" else "Call"
    return request_for(server, "POST", f"/api/v1/chat/{config}", {"message": message})


async def _turns(lab: Lab, connection: RestConnection, turns: dict[str, bytes], script: Path) -> dict[str, list[float]]:
    async def alone() -> None:
        await Agent(models.resolve(f"script:{script}")).run("Hello")

    contenders = (
        Contender(ALONE, lambda: timed(alone())),
        Contender(CLIENT_SIDE, partial(connection.exec_true, turns["client-side"])),
        Contender(SANDBOXED, partial(connection.exec_true, turns["sandboxed"])),
    )
    for contender in contenders:
        await contender.take()
    rounds = lab.amount(300, 30)
    with lab.progress("turns over REST, interleaved", rounds) as advance:
        return await in_turns(contenders, rounds, advance)


def _many_table(many: Load) -> Table:
    cells = (
        Value(number=many.rate, unit="1/s"),
        Value(number=many.spread.median, unit="s"),
        Value(number=many.spread.p99, unit="s"),
    )
    return Table(
        title=f"{AT_ONCE} conversations at once",
        columns=("", "turns", "median", "p99"),
        rows=(Row(label=CLIENT_SIDE, cells=cells),),
    )
