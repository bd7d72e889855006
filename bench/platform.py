"""What a hosted agent costs beyond its model: turns over REST with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import anyio.to_thread
import httpx2

from atoll.agents import models
from atoll.agents.loop import Agent
from atoll.bundles.archive import pack, read_bundle
from atoll.bundles.build import remove_built
from atoll.bundles.workspace import BundleFile, Workspace, WorkspaceInstance, WorkspaceSpec
from atoll.contract.errors import BundleFailed
from atoll.contract.model import RuntimeName
from atoll.testing.server import RunningServer
from bench.lab import Lab
from bench.results import Row, Section, Spread, Table, Target, Value, times
from bench.sampling import Contender, in_turns, timed
from bench.server import Load, RestConnection, load_of, request_for, target_of

HOW = """\
`atoll serve` as a process of its own, with SQLite. One at a time, interleaved: a turn of the scripted model in this
process, with nothing stored (`Agent.run`); `POST /api/v1/chat/CONFIG` with a message that begins a conversation, on one
connection that is kept open, for a client-side agent, which answers at once, and for a sandboxed agent, which calls a
tool first that needs no workspace (`echo`), so that it is asked twice. Many at once: 50 connections, each of which
begins one conversation after the other. Workspaces: a bundle with one pinned requirement that its tool imports, built
before; a new workspace from its first call to the answer, one call more, and the call that wakes it after it slept."""
ALONE, CLIENT_SIDE, SANDBOXED = "the model alone", "chat, client-side", "chat, sandboxed, with a call"
AT_ONCE = 50
OVERHEAD_BOUND_S = 0.015
FIRST_CALL_BOUND_S = 0.3
REQUIREMENT = "six==1.17.0"
TOOL = "import six\n\n\ndef version(args):\n    return {'ok': True, 'content': six.__version__}\n"
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
    targets: tuple[Target, ...] = (
        target_of("a chat turn beyond the model's own time, median", OVERHEAD_BOUND_S, "s", over),
        target_of(f"errors of {AT_ONCE} conversations at once", 0, "", sum(many.errors.values())),
    )
    calls, note = await _workspace_calls(lab)
    targets += tuple(
        target_of(f"{label}, median", FIRST_CALL_BOUND_S, "s", Spread.of(taken).median)
        for label, taken in calls.items()
        if "first call" in label
    )
    tables = (
        times("A turn, one at a time", samples, against=ALONE),
        _many_table(many),
        times("Calls of a bundle that was built before", calls, against=next(iter(calls)), note=note),
    )
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


async def _workspace_calls(lab: Lab) -> tuple[dict[str, list[float]], str | None]:
    """On each runtime, interleaved. The note says so if the requirement could not be installed."""
    made = lab.scratch / "bundle"
    (made / "tools").mkdir(parents=True, exist_ok=True)
    (made / "tools" / "__init__.py").touch()
    runtimes = [name for name in lab.runtimes if name != "bwrap"]
    try:
        (made / "tools" / "version.py").write_text(TOOL)
        bundle, note = await _built(lab, made, runtimes, [REQUIREMENT]), None
    except BundleFailed as error:
        (made / "tools" / "version.py").write_text(
            TOOL.replace("import six\n", "").replace("six.__version__", "'none'")
        )
        bundle = await _built(lab, made, runtimes, [])
        note = f"without the requirement, which could not be installed: {error.message.splitlines()[0]}"
    samples: dict[str, list[float]] = {}
    rounds = lab.amount(20, 3)
    with lab.progress("calls of workspaces, interleaved", rounds * len(runtimes)) as advance:
        for number in range(rounds):
            for runtime in runtimes:
                workspace = _workspace(lab, f"{runtime}-{number}", bundle, runtime)
                for what in ("first call", "next call", "call that wakes it"):
                    if what == "call that wakes it":
                        await workspace.aclose()
                        await lab.engine.sleep(workspace.spec.sandbox)
                    taken = await timed(_called(workspace))
                    samples.setdefault(f"{what}, {runtime}", []).append(taken)
                await workspace.destroy()
                advance()
    await remove_built(lab.engine, bundle.sha256)
    return samples, note


async def _built(lab: Lab, directory: Path, runtimes: Sequence[RuntimeName], requirements: list[str]) -> BundleFile:
    tools = [{"name": "version", "entrypoint": "tools.version:version"}]
    manifest = {"schema_version": 1, "tools": tools, "requirements": requirements}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    path = directory.with_suffix(".tgz")
    with path.open("wb") as file:
        pack(directory, file)
    read = await read_bundle(path)
    bundle = BundleFile(path=path, sha256=read.sha256, manifest=read.manifest, tools=read.tools)
    for runtime in runtimes:
        workspace = _workspace(lab, f"{runtime}-built", bundle, runtime)
        try:
            await workspace.boot()
        finally:
            await workspace.destroy()
    return bundle


def _workspace(lab: Lab, name: str, bundle: BundleFile, runtime: RuntimeName) -> Workspace:
    async def record(_instance: WorkspaceInstance) -> None: ...

    return Workspace(lab.engine, WorkspaceSpec(sandbox=name, bundle=bundle, runtime=runtime), record)


async def _called(workspace: Workspace) -> None:
    result = await workspace.call("version", {})
    if result.is_error:
        raise RuntimeError(result.text)


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
