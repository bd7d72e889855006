"""How long a command takes over MCP, with the official client over stdio and HTTP."""

from __future__ import annotations

import os
import sys
from functools import partial

import anyio
from mcp import Client, StdioServerParameters

from atoll.surfaces.mcp import ServerConfig
from atoll.surfaces.mcp.http import listen
from bench.lab import Lab
from bench.results import Section, Spread, Target, Value, times
from bench.sampling import Contender, in_turns, timed

HOW = """\
`shell` with the command `true`, from the official Python client's `call_tool` to its result, checked against the
tool's schema: with `atoll mcp` as a separate process over pipes, and with its HTTP server in the process of the
client. Interleaved with `sandbox.exec("true")`, which all of them end up calling."""
PLAIN = "sandbox.exec"


async def measure(lab: Lab) -> Section:
    program = StdioServerParameters(
        command=sys.executable,
        args=["-m", "atoll", "mcp", "--runtime", lab.fastest],
        env={**os.environ, "ATOLL_STATE_DIR": str(lab.engine.state_dir)},
    )
    async with anyio.create_task_group() as tasks:
        url: list[str] = []
        ready = anyio.Event()

        def tell(told: str) -> None:
            url.append(told)
            ready.set()

        offer = ServerConfig(options={"runtime": lab.fastest})
        tasks.start_soon(partial(listen, lab.engine, offer, "127.0.0.1", 0, on_ready=tell))
        await ready.wait()
        async with Client(program) as piped, Client(url[0]) as served, lab.sandbox(lab.fastest) as sandbox:
            contenders = (
                Contender(PLAIN, lambda: timed(sandbox.exec("true"))),
                Contender("MCP over stdio", partial(_called, piped)),
                Contender("MCP over HTTP", partial(_called, served)),
            )
            for contender in contenders:
                await contender.take()
            rounds = lab.amount(400, 60)
            with lab.progress("calls over MCP, interleaved", rounds) as advance:
                samples = await in_turns(contenders, rounds, advance)
        tasks.cancel_scope.cancel()
    target = Target(
        what=f"shell true over MCP, stdio, median, with {lab.fastest}",
        bound=Value(number=0.006, unit="s"),
        at_most=True,
        measured=Value(number=Spread.of(samples["MCP over stdio"]).median, unit="s"),
    )
    table = times("shell true, there and back", samples, against=PLAIN)
    return Section(subject="mcp", title="MCP", how=HOW, tables=(table,), targets=(target,))


async def _called(client: Client) -> float:
    return await timed(_ask(client))


async def _ask(client: Client) -> None:
    result = await client.call_tool("shell", {"command": "true"})
    if result.is_error:
        raise RuntimeError(f"shell: {result.content}")
