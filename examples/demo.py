"""Shows what Atoll does, in one minute: run by `make demo`.

Creates sandboxes in a temporary state directory and removes everything at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import anyio
from examples import team_expenses, workflow
from rich.console import Console
from rich.rule import Rule

import atoll

console = Console(highlight=False)


def say(title: str, text: str = "") -> None:
    console.print(Rule(f"[bold]{title}", align="left", style="cyan"))
    if text:
        console.print(text, style="dim")


def show(command: str, result: atoll.ExecResult) -> None:
    console.print(f"[green]$[/] {command}", markup=True)
    if result.stdout:
        console.print(result.stdout.rstrip(), markup=False)
    if result.stderr:
        console.print(result.stderr.rstrip(), markup=False, style="red")
    if result.exit_code:
        console.print(f"exit code {result.exit_code}", style="yellow")


async def run(box: atoll.Sandbox, command: str, **options: object) -> None:
    show(command, await box.exec(command, **options))  # type: ignore[arg-type]


async def runtimes(engine: atoll.Engine) -> None:
    say("Create a sandbox", "Time until the first command has answered, for each runtime on this machine; median of 5.")
    for name in engine.runtimes():
        times: list[float] = []
        kernel = ""
        for _ in range(5):
            start = time.perf_counter()
            async with await engine.create(runtime=name) as box:
                await box.exec("true")
                times.append((time.perf_counter() - start) * 1000)
                kernel = (await box.exec("uname -r")).stdout.strip()
        console.print(f"{name:>6}: {sorted(times)[2]:6.1f} ms   kernel inside: {kernel}")


async def isolation(engine: atoll.Engine) -> None:
    say("Isolation", "Root inside has no rights outside.")
    limits = atoll.Limits(memory_bytes=64 << 20, pids=50) if limits_work(engine) else None
    async with await engine.create("island", limits=limits) as box:
        await run(box, "id; hostname; ls /home /root; cat /etc/shadow", user="root")
        await run(box, "mount -t tmpfs none /mnt; ls /sys/class/net", user="root")
        if limits is not None:
            await run(box, "python3 -c 'b = bytearray(500_000_000)'; echo still here")
            await run(box, ":(){ :|:& };: 2>/dev/null; echo the process limit stopped the fork bomb", timeout_s=5)


def limits_work(engine: atoll.Engine) -> bool:
    first = next(iter(engine.runtimes().values()), None)
    return first is not None and first.memory_limit and first.pids_limit


async def commands(engine: atoll.Engine) -> None:
    say("Exact results", "A time-out keeps the output so far; a result says what was truncated.")
    async with await engine.create("worker") as box:
        command = "for i in $(seq 100); do echo $i; sleep 0.1; done"
        console.print(f"[green]$[/] {command}   [dim](time-out: 0.5 s)")
        try:
            await box.exec(command, timeout_s=0.5)
        except atoll.ExecTimeout as error:
            console.print(f"{error}\noutput so far: {error.result.stdout.split()}", markup=False)
        start = time.perf_counter()
        await run(box, "(sleep 60; echo late) & echo the main process is done")
        took_ms = (time.perf_counter() - start) * 1000
        console.print(f"returned after {took_ms:.0f} ms, though a child still holds its output open", style="dim")
        result = await box.exec("seq 1 3000000", output_limit_bytes=60)
        console.print(f"22 MB of output, limited to 60 bytes: {result.stdout_truncation}", markup=False)


async def many(engine: atoll.Engine) -> None:
    say("Fifty sandboxes at once")
    start = time.perf_counter()
    answers: list[str] = []

    async def one(number: int) -> None:
        async with await engine.create(f"many-{number}") as box:
            answers.append((await box.exec("echo $(hostname)")).stdout)

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(one, number)
    console.print(f"{len(set(answers))} sandboxes created, used and destroyed in {time.perf_counter() - start:.1f} s")


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="atoll-demo-") as state:
        async with atoll.open(state) as engine:
            if not engine.runtimes():
                console.print("No container runtime works on this machine; `atoll doctor` says why.", style="red")
                raise SystemExit(1)
            await runtimes(engine)
            await isolation(engine)
            await commands(engine)
            await many(engine)
            say("An agent", "Two sandboxes in parallel, a transfer between them, a server, a preview.")
            await workflow.play(engine, console)
            say("Code that calls tools", "One question, answered by calls of the model, and by code that it writes.")
            await team_expenses.Example(engine, console, team_expenses.choose_model()).compare()
    program = "atoll" if shutil.which("atoll") else os.path.relpath(Path(sys.executable).with_name("atoll"))
    next_steps = ("run -- python3 -c 'print(6 * 7)'", "create box", "shell box", "agent", "serve", "doctor")
    say("Next", "\n".join(f"{program} {each}" for each in next_steps))


if __name__ == "__main__":
    anyio.run(main)
