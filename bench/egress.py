"""How much time the egress proxy adds to a connection."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
from anyio.abc import ByteStream, SocketAttribute

import atoll
from atoll.contract.model import RuntimeName
from bench.lab import Lab
from bench.results import Section, Spread, Target, Value, times
from bench.sampling import Contender, in_turns

HOW = """\
From `connect` until the first byte has come back from an echo server on the host's loopback: by a program on the
host that connects to it, and by the same program in a sandbox that connects through the egress proxy (CONNECT).
Interleaved; the program runs all the time and takes the times itself."""

HOST = "host, direct"
PROGRAM = """
import socket, sys, time
port, proxy = int(sys.argv[1]), int(sys.argv[2])
for _ in sys.stdin:
    start = time.perf_counter()
    with socket.create_connection(("127.0.0.1", proxy or port)) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if proxy:
            s.sendall(b"CONNECT 127.0.0.1:%d HTTP/1.0\\r\\n\\r\\n" % port)
            assert s.recv(1000).startswith(b"HTTP/1.1 200 ")
        s.sendall(b"x")
        assert s.recv(1) == b"x"
        print(time.perf_counter() - start, flush=True)
"""
PROXY = 1023


async def measure(lab: Lab) -> Section:
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(_server())
        contenders = [Contender(HOST, await stack.enter_async_context(_on_host(port)))]
        for runtime in lab.runtimes:
            take = await stack.enter_async_context(_inside(lab, port, runtime))
            contenders.append(Contender(f"Atoll, {runtime}", take))
        rounds = lab.amount(500, 50)
        with lab.progress("connections, interleaved", rounds) as advance:
            samples = await in_turns(contenders, rounds, advance)
    host, ours = (Spread.of(samples[contender.label]).median for contender in contenders[:2])
    target = Target(
        what=f"egress connection set-up with {lab.fastest}, median, over a direct one",
        bound=Value(number=0.003, unit="s"),
        at_most=True,
        measured=Value(number=ours - host, unit="s"),
    )
    return Section(
        subject="egress",
        title="Egress connections",
        how=HOW,
        tables=(times("Until the first byte is back", samples, against=HOST),),
        targets=(target,),
    )


@asynccontextmanager
async def _server() -> AsyncIterator[int]:
    async def echo(stream: ByteStream) -> None:
        async with stream:
            async for chunk in stream:
                await stream.send(chunk)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, echo)
        yield listener.extra(SocketAttribute.local_port)
        group.cancel_scope.cancel()


@asynccontextmanager
async def _on_host(port: int) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    async with await anyio.open_process([sys.executable, "-c", PROGRAM, str(port), "0"]) as process:

        async def once() -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdin.send(b"\n")
            said = b""
            while not said.endswith(b"\n"):
                said += await process.stdout.receive()
            return float(said)

        yield once
        process.kill()


@asynccontextmanager
async def _inside(lab: Lab, port: int, runtime: RuntimeName) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    policy = atoll.NetworkPolicy(allow=f"127.0.0.1:{port}")
    async with await lab.engine.create(runtime=runtime, network=policy) as box:
        command = ["python3", "-c", PROGRAM, str(port), str(PROXY)]
        async with await box.spawn(command, stdin=True, keep=False) as process:
            yield partial(_once, process)


async def _once(process: atoll.Process) -> float:
    assert process.stdin is not None
    await process.stdin.send(b"\n")
    said = b""
    while not said.endswith(b"\n"):
        event = await anext(process)
        if not isinstance(event, atoll.Output):
            raise TypeError(f"the program in the sandbox ended: {event}")
        said += event.data
    return float(said)
