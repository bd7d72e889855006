"""How much time tools add to the API that they call, and the throughput of transfers between sandboxes."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from functools import partial

import atoll
from atoll.tools.coding import coding_tools
from atoll.tools.sprites import sprite_tools
from atoll.tools.tool import ToolSet
from bench.lab import Lab
from bench.results import Row, Section, Spread, Table, Target, Value
from bench.sampling import Contender, in_turns, timed

HOW = """\
Each tool through `handle_tool_call`, as a model calls it (arguments parsed, sandbox looked up in its session, result
as JSON and as data), interleaved with the `Sandbox` method that it calls; the added time is the difference of the
medians. Transfers go between two running sandboxes, through the host: one file of 256 MiB, which is on the disk at
the end, and a directory of 256 files of 1 MiB. MB are 10⁶ bytes."""

MIB = 1024 * 1024
TEXT = "a line of text, as there are many\n" * 100
Plain = Callable[[], Awaitable[object]]


async def measure(lab: Lab) -> Section:
    async with lab.engine.pool("bench", runtime=lab.fastest) as pool:
        box = await pool.get()
        await box.files.write_text("file", TEXT)
        agent, coding, sprites = pool.tools(), coding_tools(box), sprite_tools(pool)
        calls: list[tuple[ToolSet, str, dict[str, object], Plain]] = [
            (agent, "shell", {"command": "true"}, partial(box.exec, "true", cwd="/home/user", timeout_s=30)),
            (agent, "read_file", {"path": "file"}, partial(box.files.read_bytes, "/home/user/file")),
            (agent, "write_file", {"path": "f", "content": TEXT}, partial(box.files.write_text, "/home/user/f", TEXT)),
            (agent, "glob", {"pattern": "*"}, partial(box.files.glob, "*", cwd="/home/user")),
            (sprites, "sprite_exec", {"name": "default", "command": "true"}, partial(box.exec, "true", timeout_s=30)),
            (coding, "read", {"path": "file"}, partial(box.files.read_bytes, "/home/user/file")),
            (coding, "bash", {"command": "true"}, partial(box.exec, "true", timeout_s=120, merge_stderr=True)),
        ]
        overhead, table = await _overhead(lab, calls)
        rates = await _transfers(lab, pool.tools(), box)
        await pool.aclose()
    rows = tuple(Row(label=label, cells=(Value(number=rate, unit="B/s"),)) for label, rate in rates.items())
    targets = (
        Target(
            what=f"time that an agent tool adds to a call, median, with {lab.fastest} (the slowest tool)",
            bound=Value(number=0.0005, unit="s"),
            at_most=True,
            measured=Value(number=overhead, unit="s"),
        ),
        Target(
            what=f"transfer between two sandboxes with {lab.fastest} (the slower of both)",
            bound=Value(number=150e6, unit="B/s"),
            at_most=False,
            measured=Value(number=min(rates.values()), unit="B/s"),
        ),
    )
    transfers = Table(title="Transfers", columns=("", "median"), rows=rows)
    return Section(subject="tools", title="Tools", how=HOW, tables=(table, transfers), targets=targets)


async def _overhead(lab: Lab, calls: list[tuple[ToolSet, str, dict[str, object], Plain]]) -> tuple[float, Table]:
    samples: dict[str, list[float]] = {}
    rounds = lab.amount(400, 60)
    with lab.progress("tools and what they call, in turns", rounds * len(calls)) as advance:
        for (
            tools,
            name,
            arguments,
            plain,
        ) in calls:  # separately, so that the after-effects of other calls are not measured
            pair = (
                Contender(name, partial(_called, tools, name, arguments)),
                Contender(f"{name}, plain", partial(_plainly, plain)),
            )
            samples |= await in_turns(pair, rounds, advance)
    rows = []
    most = 0.0
    for tools, name, _arguments, _plain in calls:
        ours, without = (Spread.of(samples[label]).median for label in (name, f"{name}, plain"))
        if tools is calls[0][0]:
            most = max(most, ours - without)
        cells = (Value(number=without, unit="s"), Value(number=ours, unit="s"), Value(number=ours - without, unit="s"))
        rows.append(Row(label=name, cells=cells))
    return most, Table(title="One call, median", columns=("", "plain", "as a tool", "added"), rows=tuple(rows))


async def _called(tools: ToolSet, name: str, arguments: dict[str, object]) -> float:
    return await timed(_ask(tools, name, arguments))


async def _plainly(plain: Plain) -> float:
    return await timed(plain())


async def _ask(tools: ToolSet, name: str, arguments: dict[str, object]) -> None:
    result = await tools.handle_tool_call(name, arguments)
    if result.is_error:
        raise RuntimeError(f"{name}: {result.text}")


async def _transfers(lab: Lab, tools: ToolSet, box: atoll.Sandbox) -> dict[str, float]:
    make = "head -c 268435456 /dev/urandom > large; mkdir tree; cd tree; split -b 1048576 ../large"
    await box.exec(make)
    ask: dict[str, object] = {"from_sandbox": "default", "to_sandbox": "target"}
    await _ask(tools, "sandbox_create", {"sandbox": "target"})
    rates = {}
    for label, wanted in (
        ("one file", {"from_path": "large", "to_path": "large"}),
        ("a directory", {"from_path": "tree", "to_path": "tree", "recursive": True}),
    ):
        taken = []
        for _ in range(lab.amount(5, 2)):
            taken.append(await _called(tools, "transfer", {**ask, **wanted}))
            await _ask(tools, "shell", {"sandbox": "target", "command": "rm -rf large tree; sync"})
        rates[label] = 256 * MIB / statistics.median(taken)
    return rates
