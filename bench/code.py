"""Code that calls tools: the start of a session, calls, executions and memory, beside the same without Atoll."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import anyio

import atoll
from atoll.contract.model import RuntimeName
from bench import docker
from bench.baselines import small_root
from bench.footprint import pss_bytes
from bench.kernels import (
    IpyKernel,
    PeerKernel,
    PipeKernel,
    container_with_python,
    ipykernel_is_missing,
    timed_calls,
)
from bench.lab import Lab
from bench.memory import settled
from bench.results import Row, Section, Spread, Table, Target, Value, ratio, times
from bench.sampling import Contender, in_turns

HOW = """\
A session is a `CodeExecutor`'s with its default configuration. *To the first result* is from nothing to the result of
the cell `1`: a sandbox, a kernel in it, and the cell; *prepared*: the executor has one session ready
(`prepared_sessions=1`), which has idled for 0.1 s. A call is `await echo(number)` of an async tool that returns its
argument, timed by the code itself; its time includes validation, the budget and the record of the call. The tools in
`gather` sleep for 50 ms. Ten executions are ten times `x = 1`. Beside it: a subprocess of the same Python that runs
code from a pipe and whose calls are a line out and a line back, answered by a blocking loop; the same through
`docker exec` in a running container, with Docker's client in between; and ipykernel with jupyter_client, whose calls
are `input()`. A subprocess isolates nothing. Memory is the proportional set size of the session when idle: of all
processes of its sandbox, of the Python process alone elsewhere."""

RUNTIMES: tuple[RuntimeName, ...] = ("crun", "runsc")
PIPES, EXEC, IPYKERNEL = "subprocess, pipes", "docker exec", "ipykernel"
CALLS = 10_000
GATHERED, SLEEP_S = 100, 0.05
IDLE_S = 0.1


def _registry() -> atoll.ToolRegistry:
    registry = atoll.ToolRegistry()

    @registry.register
    async def echo(value: int) -> int:
        """The argument."""
        return value

    @registry.register
    async def nap(value: int) -> int:
        """The argument, after a while."""
        await asyncio.sleep(SLEEP_S)
        return value

    return registry


@dataclass(frozen=True)
class Peer:
    """What is measured beside Atoll."""

    label: str
    start: Callable[[], PeerKernel]
    calls: int
    """How many are measured: its calls may be slow."""
    every: int = 1

    async def take_start(self) -> float:
        start = time.perf_counter()
        kernel = self.start()
        try:
            kernel.execute("1")
            return time.perf_counter() - start
        finally:
            kernel.close()


async def measure(lab: Lab) -> Section:
    runtimes = [runtime for runtime in lab.runtimes if runtime in RUNTIMES] or [lab.fastest]
    async with AsyncExitStack() as stack:
        peers, notes = _peers(lab, stack)
        starts = await _starts(lab, runtimes, peers)
        calls = await _calls(lab, runtimes, peers)
        gathered = {runtime: await _gathered(lab, runtime) for runtime in runtimes}
        executions = await _executions(lab, runtimes, peers)
        memory = await _memory(lab, runtimes, peers)
    first = runtimes[0]
    tables = (
        times("To the first result", starts, against=PIPES, note="; ".join(notes) or None),
        _calls_table(calls),
        _gather_table(gathered, await _gathered_on_the_host(lab)),
        times("Ten executions in a session", executions, against=PIPES),
        Table(
            title="Memory of an idle session",
            columns=("", "proportional set size"),
            rows=tuple(
                Row(label=label, cells=(Value(number=size, unit="B"),)) for label, size in memory.items() if size
            ),
        ),
    )
    return Section(
        subject="code",
        title="Code that calls tools",
        how=HOW,
        tables=tables,
        targets=tuple(_targets(first, starts, calls, gathered, executions)),
    )


def _peers(lab: Lab, stack: AsyncExitStack) -> tuple[list[Peer], list[str]]:
    peers, notes = [Peer(PIPES, PipeKernel, lab.amount(CALLS, 2000))], []
    try:
        engine = stack.enter_context(docker.engine(small_root(lab.scratch / "code")))
        wrapper = stack.enter_context(container_with_python(engine))
        peers.append(Peer(EXEC, partial(PipeKernel, wrapper, python="/usr/bin/python3"), lab.amount(2000, 500), 5))
    except docker.Unavailable as error:
        notes.append(f"docker exec: {error}")
    if missing := ipykernel_is_missing():
        notes.append(missing)
    else:
        peers.append(Peer(IPYKERNEL, partial(IpyKernel, lab.scratch / "ipykernel"), lab.amount(500, 50), 5))
    return peers, notes


@asynccontextmanager
async def _session(lab: Lab, runtime: RuntimeName, **config: object) -> AsyncIterator[tuple[atoll.CodeExecutor, str]]:
    """A session with what long measurements need."""
    options = {"runtime": runtime, "max_calls": 10**6, "timeout_s": 600.0, "output_limit_bytes": 1 << 20, **config}
    async with atoll.CodeExecutor(_registry(), atoll.CodeConfig.model_validate(options), engine=lab.engine) as executor:
        session = await executor.open_session()
        await _run(executor, session, "import asyncio, json, time\nawait echo(1)")
        yield executor, session


async def _run(executor: atoll.CodeExecutor, session: str, code: str) -> str:
    result, _ = await executor.execute(code, session)
    if not result.success:
        raise RuntimeError(result.text)
    return result.output


# --------------------------------------------------------------------------------------------------------------- start


async def _starts(lab: Lab, runtimes: list[RuntimeName], peers: list[Peer]) -> dict[str, list[float]]:
    contenders = [Contender(peer.label, peer.take_start, peer.every) for peer in peers]
    async with AsyncExitStack() as stack:
        for runtime in runtimes:
            async with lab.sandbox(runtime):
                pass  # so that its image is there
            every = 5 if runtime == "runsc" else 1
            for how, count in (("cold", 0), ("prepared", 1)):
                config = atoll.CodeConfig(runtime=runtime, prepared_sessions=count)
                executor = atoll.CodeExecutor(_registry(), config, engine=lab.engine)
                await stack.enter_async_context(executor)
                contenders.append(Contender(f"Atoll, {runtime}, {how}", partial(_start, executor), every))
        rounds = lab.amount(50, 10)
        with lab.progress("sessions to their first result, interleaved", rounds) as advance:
            return await in_turns(contenders, rounds, advance)


async def _start(executor: atoll.CodeExecutor) -> float:
    while executor.prepared < executor.config.prepared_sessions:
        await anyio.sleep(0.01)
    await anyio.sleep(IDLE_S)
    start = time.perf_counter()
    _, session = await executor.execute("1", reuse_session=True)
    taken = time.perf_counter() - start
    if session is not None:
        await executor.close_session(session)
    return taken


# --------------------------------------------------------------------------------------------------------------- calls


async def _calls(lab: Lab, runtimes: list[RuntimeName], peers: list[Peer]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    count = lab.amount(CALLS, 2000)
    with lab.progress("calls in sequence", len(runtimes) + len(peers)) as advance:
        for peer in peers:
            kernel = peer.start()
            try:
                kernel.call_times(10)
                found[peer.label] = kernel.call_times(peer.calls)
            finally:
                kernel.close()
            advance()
        for runtime in runtimes:
            async with _session(lab, runtime) as (executor, session):
                code = timed_calls(count, "await echo(number)") + "print(json.dumps([round(t, 7) for t in times]))"
                found[f"Atoll, {runtime}"] = json.loads(await _run(executor, session, code))
            advance()
    return found


def _calls_table(calls: Mapping[str, list[float]]) -> Table:
    rows = []
    pipes = Spread.of(calls[PIPES]).median
    for label, samples in calls.items():
        spread = Spread.of(samples)
        cells = (
            Value(number=spread.median, unit="s"),
            Value(number=spread.p99, unit="s"),
            Value(number=_sequence_s(samples), unit="s"),
            ratio(spread.median, pipes),
            Value(number=spread.count),
        )
        rows.append(Row(label=label, cells=cells))
    columns = ("", "median", "p99", f"{CALLS:,} calls", f"against {PIPES.partition(',')[0]}", "n")
    note = f"{CALLS:,} calls: the sum of the measured ones, multiplied where they were fewer"
    return Table(title="One call after another", columns=columns, rows=tuple(rows), note=note)


def _sequence_s(samples: list[float]) -> float:
    return sum(samples) * CALLS / len(samples)


async def _gathered(lab: Lab, runtime: RuntimeName) -> list[float]:
    code = (
        f"start = time.perf_counter()\nawait asyncio.gather(*(nap(number) for number in range({GATHERED})))\n"
        "print(time.perf_counter() - start)"
    )
    async with _session(lab, runtime) as (executor, session):
        return [float(await _run(executor, session, code)) for _ in range(lab.amount(20, 5))]


async def _gathered_on_the_host(lab: Lab) -> list[float]:
    taken = []
    for _ in range(lab.amount(20, 5)):
        start = time.perf_counter()
        await asyncio.gather(*(asyncio.sleep(SLEEP_S) for _ in range(GATHERED)))
        taken.append(time.perf_counter() - start)
    return taken


def _gather_table(gathered: Mapping[RuntimeName, list[float]], host: list[float]) -> Table:
    samples = {"asyncio.gather on the host": host, **{f"Atoll, {runtime}": each for runtime, each in gathered.items()}}
    title = f"{GATHERED} tools of {SLEEP_S * 1000:.0f} ms in `gather`"
    note = "without `gather`, as through a pipe with one call at a time: at least 5 s"
    return times(title, samples, against="asyncio.gather on the host", note=note)


# --------------------------------------------------------------------------------------------------- executions, memory


async def _executions(lab: Lab, runtimes: list[RuntimeName], peers: list[Peer]) -> dict[str, list[float]]:
    rounds = lab.amount(50, 10)
    async with AsyncExitStack() as stack:
        contenders = []
        for peer in peers:
            kernel = peer.start()
            stack.callback(kernel.close)
            kernel.execute("1")
            contenders.append(Contender(peer.label, partial(_ten_of_peer, kernel)))
        for runtime in runtimes:
            executor, session = await stack.enter_async_context(_session(lab, runtime))
            contenders.append(Contender(f"Atoll, {runtime}", partial(_ten, executor, session)))
        with lab.progress("ten executions, interleaved", rounds) as advance:
            return await in_turns(contenders, rounds, advance)


async def _ten_of_peer(kernel: PeerKernel) -> float:
    start = time.perf_counter()
    for _ in range(10):
        kernel.execute("x = 1")
    return time.perf_counter() - start


async def _ten(executor: atoll.CodeExecutor, session: str) -> float:
    start = time.perf_counter()
    for _ in range(10):
        await executor.execute("x = 1", session)
    return time.perf_counter() - start


async def _memory(lab: Lab, runtimes: list[RuntimeName], peers: list[Peer]) -> dict[str, int]:
    found: dict[str, int] = {}
    with lab.progress("memory of idle sessions", len(runtimes) + len(peers)) as advance:
        for peer in peers:
            kernel = peer.start()
            try:
                kernel.execute("1")
                found[peer.label] = 0 if kernel.pid is None else pss_bytes(kernel.pid)
            finally:
                kernel.close()
            advance()
        for runtime in runtimes:
            async with _session(lab, runtime) as (executor, session):
                sandbox = await lab.engine.get(executor.active_sessions[session].sandbox)
                found[f"Atoll, {runtime}"] = (await settled(lab, [sandbox])).total
            advance()
    return found


# ------------------------------------------------------------------------------------------------------------- targets


def _targets(
    runtime: RuntimeName,
    starts: Mapping[str, list[float]],
    calls: Mapping[str, list[float]],
    gathered: Mapping[RuntimeName, list[float]],
    executions: Mapping[str, list[float]],
) -> list[Target]:
    cold, prepared = (median(starts[f"Atoll, {runtime}, {how}"]) for how in ("cold", "prepared"))
    label = f"Atoll, {runtime}"
    bounds = (
        ("a call of a tool, median", 200e-6, median(calls[label])),
        (f"{CALLS:,} calls in sequence", 4.0, _sequence_s(calls[label])),
        (f"{GATHERED} tools of 50 ms in `gather`, median", 0.09, median(gathered[runtime])),
        ("ten executions, median", 0.01, median(executions[label])),
        ("a session to its first result, median", 0.08, cold),
        ("a prepared session to its first result, median", 0.012, prepared),
    )
    targets = [
        Target(
            what=f"{what}, with {runtime}",
            bound=Value(number=bound, unit="s"),
            at_most=True,
            measured=Value(number=measured, unit="s"),
        )
        for what, bound, measured in bounds
    ]
    with suppress(KeyError):
        targets.append(
            Target(
                what=f"a first result, sooner than ipykernel's, with {runtime}",
                bound=Value(number=10, unit="×"),
                at_most=False,
                measured=ratio(median(starts[IPYKERNEL]), cold),
            )
        )
    return targets
