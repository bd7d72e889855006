"""What the newest E2B SDK takes against `atoll serve`: a sandbox, a command, a file, a cell; beside it, Docker."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio.to_thread

from atoll.testing.server import RunningServer
from bench.baselines import Baselines
from bench.lab import Lab
from bench.results import Section, Spread, Target, Value, times

HOW = """\
`atoll serve` as a process of its own, and E2B's Python SDK, unmodified, in this one. Cold: `Sandbox.create` and
`commands.run("true")` in it, until its result; warm: the same with a warm pool. The SDK runs each command in a login
shell. A file of 100 MB is read whole, as bytes. Beside them, where an engine can be started, what Docker's SDKs do over
its socket: create and start a container and run `true` in it, and `true` in a running one, without a shell."""
CREATE_S, WARM_S, RUN_S, CODE_S, READ_BYTES_S = 0.060, 0.025, 0.010, 0.015, 200e6
DOCKER_CREATE, DOCKER_RUN = "Docker over HTTP, create and run", "Docker over HTTP, exec true"
COLD, WARM, RUN, CODE = "create and run, cold", "create and run, warm", 'commands.run("true")', 'run_code("1+1")'
_FILE_BYTES = 100_000_000


async def measure(lab: Lab) -> Section:
    server = RunningServer(lab.engine.state_dir, (), {"ATOLL_LOG_LEVEL": "warning"})
    await anyio.to_thread.run_sync(server.start)
    try:
        samples, rate = await _measure(lab, server)
        with Baselines(lab.scratch / "e2b") as baselines:
            if baselines.docker is not None:
                samples[DOCKER_CREATE] = [await baselines.docker.take_create() for _ in range(lab.amount(20, 4))]
                samples[DOCKER_RUN] = [await baselines.docker.take_exec() for _ in range(lab.amount(100, 10))]
    finally:
        await anyio.to_thread.run_sync(server.stop)
    targets = [
        _target(f"E2B SDK: {what}, median", bound, "s", Spread.of(samples[what]).median)
        for what, bound in ((COLD, CREATE_S), (WARM, WARM_S), (RUN, RUN_S), (CODE, CODE_S))
    ]
    targets.append(_target("E2B SDK: files.read of 100 MB", READ_BYTES_S, "B/s", rate, least=True))
    table = times("E2B's SDK", samples, against=RUN)
    return Section(subject="e2b", title="E2B's SDK", how=HOW, tables=(table,), targets=tuple(targets))


async def _measure(lab: Lab, server: RunningServer) -> tuple[dict[str, list[float]], float]:
    from e2b_code_interpreter import Sandbox

    where = {"api_key": server.key, "api_url": server.url, "sandbox_url": server.url}
    made: list[Any] = []

    def create() -> None:
        made.append(Sandbox.create(timeout=300, **where))
        made[-1].commands.run("true")

    async def take(count: int, work: Callable[[], object]) -> list[float]:
        found = []
        with lab.progress("calls of E2B's SDK", count) as advance:
            for _ in range(count):
                found.append(await anyio.to_thread.run_sync(_timed, work))
                advance()
        return found

    few, many = lab.amount(40, 8), lab.amount(300, 40)
    try:
        samples = {COLD: await take(few, create)}
        await lab.engine.warm(few)
        samples[WARM] = await take(few, create)
        await lab.engine.warm(0)
        box = made[0]
        samples[RUN] = await take(many, partial(box.commands.run, "true"))
        await take(1, partial(box.run_code, "1"))
        samples[CODE] = await take(many, partial(box.run_code, "1+1"))
        await take(1, partial(box.commands.run, f"head -c {_FILE_BYTES} /dev/urandom > /tmp/large"))
        reads = await take(lab.amount(10, 3), partial(box.files.read, "/tmp/large", format="bytes"))
    finally:
        for each in made:
            await anyio.to_thread.run_sync(each.kill)
    return samples, _FILE_BYTES / Spread.of(reads).median


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _target(what: str, bound: float, unit: Any, measured: float, *, least: bool = False) -> Target:
    return Target(
        what=what, bound=Value(number=bound, unit=unit), at_most=not least, measured=Value(number=measured, unit=unit)
    )
