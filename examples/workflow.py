"""An agent builds a page in one sandbox and a server in another, combines them, and exposes the port.

    python -m examples.workflow

Without a key the model is scripted (`workflow.toml`); everything else is real. With ANTHROPIC_API_KEY it is Claude,
and ATOLL_MODEL selects any other model.
"""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from rich.console import Console

import atoll
from atoll import AgentEvent, RetryEvent, TextEvent, ToolCallEvent, ToolResultEvent, UsageEvent

SCRIPT = Path(__file__).with_suffix(".toml")
INSTRUCTIONS = """\
You build software in sandboxes. They have Python 3 and a shell, and no internet access. A server has to be started
in the background, listen on 127.0.0.1, and write its output to a file. Call tools that do not need each other's results
at the same time. Be brief."""
PROMPT = """\
Build the frontend and the backend separately, then combine them.

1. and 2. Make the sandboxes "frontend" and "backend".
3. and 4. At the same time: in "frontend", a script generates a small page, app/dist/index.html; in "backend", make app.
5. In "backend", write /home/user/app/main.py: a server that gives /home/user/app/static, and JSON at /api/tide.
6. Transfer frontend's /home/user/app/dist to backend's /home/user/app/static.
7. Start the server on port 8000.
8. Browse port 8000 of "backend", and tell me its URL."""


def choose_model() -> str:
    if "ATOLL_MODEL" in os.environ or "ANTHROPIC_API_KEY" in os.environ:
        return atoll.Settings.from_environment().model
    return f"script:{SCRIPT}"


async def play(engine: atoll.Engine, console: Console) -> None:
    """Run the whole workflow, showing its events. All sandboxes are destroyed at the end."""
    model = choose_model()
    console.print(f"model: {model}", style="dim", markup=False)
    url = None
    async with engine.pool("workflow") as pool:
        try:
            agent = atoll.Agent(model, pool.tools(), INSTRUCTIONS)
            async with agent.stream(PROMPT) as stream:
                async for event in stream:
                    tell(console, event)
                    if isinstance(event, ToolResultEvent) and event.tool == "browse" and event.result.structured:
                        url = event.result.structured.get("url", url)
            tokens = stream.answer.tokens
            console.print(f"{stream.answer.steps} steps, {tokens.input} + {tokens.output} tokens", style="dim")
            if url is None:
                raise SystemExit("the agent exposed no port")
            console.print(f"[green]$[/] curl '{url}'", soft_wrap=True)
            console.print(await anyio.to_thread.run_sync(fetch, url), markup=False, soft_wrap=True)
        finally:
            await pool.aclose()


def tell(console: Console, event: AgentEvent) -> None:
    match event:
        case TextEvent(text=text):
            console.print(text, end="", markup=False, soft_wrap=True)
        case UsageEvent():
            console.print()  # ends the line of the streamed text
        case ToolCallEvent(tool=tool, input=input):
            line(console, f"  → {tool} {json.dumps(input)}", "cyan")
        case ToolResultEvent(result=result, duration_s=seconds, tool=tool):
            mark, style = ("✗", "red") if result.is_error else ("✓", "green")
            line(console, f"  {mark} {tool} {seconds * 1000:.0f} ms {result.text}", style)
        case RetryEvent(reason=reason):
            line(console, f"(retrying: {reason})", "yellow")


def line(console: Console, text: str, style: str) -> None:
    console.print(text, style=style, markup=False, no_wrap=True, overflow="ellipsis")


def fetch(url: str) -> str:
    """The page at `url`. Browsers resolve *.localhost by themselves; this client connects to 127.0.0.1 instead."""
    there = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", there.port or 80, timeout=10)
    try:
        token = there.query.removeprefix("atoll_token=")
        connection.request("GET", there.path or "/", headers={"Host": there.netloc, "Atoll-Token": token})
        return connection.getresponse().read().decode().rstrip()
    finally:
        connection.close()


async def main() -> None:
    async with atoll.open() as engine:
        await play(engine, Console(highlight=False))


if __name__ == "__main__":
    anyio.run(main)
