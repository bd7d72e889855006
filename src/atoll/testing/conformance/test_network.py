"""`dial` and `listen`: connections to and from programs inside, and nothing else.

The host's two ends are each other's counterpart here: what dials a port on which the host listens goes in, through the
sandbox's loopback interface, and out again.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
from anyio.abc import ByteStream

from atoll import Capabilities, InvalidRequest, PortRefused, Sandbox
from atoll.contract.inside import EGRESS_PORT
from atoll.contract.model import RuntimeName
from atoll.testing.inside import Peak, until_running

MIB = 1024 * 1024


async def everything(stream: ByteStream) -> bytes:
    return b"".join([chunk async for chunk in stream])


@asynccontextmanager
async def serving(sandbox: Sandbox, handler: Callable[[ByteStream], Awaitable[None]]) -> AsyncIterator[int]:
    """Serve every connection to a port inside; gives the port."""
    async with sandbox.listen() as listener, anyio.create_task_group() as group:

        async def handle(stream: ByteStream) -> None:
            async with stream:
                await handler(stream)

        async def serve() -> None:
            async for stream in listener:
                group.start_soon(handle, stream)

        group.start_soon(serve)
        yield listener.port
        group.cancel_scope.cancel()


async def echo(stream: ByteStream) -> None:
    async for chunk in stream:
        await stream.send(chunk)
    await stream.send_eof()


@pytest.mark.core
async def test_bytes_go_both_ways_and_an_end_is_seen_on_the_other_side(shared: Sandbox) -> None:
    async with shared.listen() as listener:
        assert 1 <= listener.port <= 65535
        async with await shared.dial(listener.port) as near:
            far = await anext(listener)
            async with far:
                await near.send(b"to the host")
                assert await far.receive() == b"to the host"
                await far.send(b"and back")
                assert await near.receive() == b"and back"
                await near.send_eof()
                with pytest.raises(anyio.EndOfStream):
                    await far.receive()
                await far.send(b"still talking")
                await far.send_eof()
                assert await everything(near) == b"still talking"


@pytest.mark.core
async def test_programs_inside_reach_the_port_on_which_the_host_listens(shared: Sandbox) -> None:
    async def shout(stream: ByteStream) -> None:
        await stream.send((await stream.receive()).upper())

    async with serving(shared, shout) as port:
        result = await shared.exec(
            ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo hello >&3; cat <&3"], timeout_s=20
        )
    assert result.stdout == "HELLO\n"


@pytest.mark.core
async def test_a_port_without_a_listener_is_refused(shared: Sandbox) -> None:
    with pytest.raises(PortRefused) as caught:
        await shared.dial(59)
    assert isinstance(caught.value, ConnectionRefusedError)
    with pytest.raises(PortRefused):
        await shared.dial(59, "::1")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_both_families_of_loopback_can_be_listened_on_and_dialled(shared: Sandbox, host: str) -> None:
    async with (
        shared.listen(host=host) as listener,
        await shared.dial(listener.port, host) as near,
        await anext(listener) as far,
    ):
        await far.send(b"hello")
        assert await near.receive() == b"hello"


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "10.0.0.1", "127.0.0.2", "example.com", ""])
async def test_nothing_but_loopback_can_be_dialled(shared: Sandbox, host: str) -> None:
    with pytest.raises(InvalidRequest):
        await shared.dial(80, host)


@pytest.mark.parametrize("port", [0, -1, 65536])
async def test_a_port_that_is_none_is_an_invalid_request(shared: Sandbox, port: int) -> None:
    with pytest.raises(InvalidRequest):
        await shared.dial(port)


async def test_a_port_can_be_chosen_and_is_free_again_afterwards(shared: Sandbox) -> None:
    for _ in range(3):
        async with shared.listen(8123) as listener:
            assert listener.port == 8123
            with pytest.raises(PortRefused):
                async with shared.listen(8123):
                    pass
        with pytest.raises(PortRefused):
            await shared.dial(8123)


async def test_a_port_below_1024_can_be_listened_on(shared: Sandbox) -> None:
    async with shared.listen(80) as listener, await shared.dial(80):
        await (await anext(listener)).aclose()


async def test_megabytes_go_both_ways_at_once(shared: Sandbox) -> None:
    data = os.urandom(8 * MIB)
    async with serving(shared, echo) as port, await shared.dial(port) as near:
        received = bytearray()

        async def receive() -> None:
            async for chunk in near:
                received.extend(chunk)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                await near.send(data)
                await near.send_eof()
        assert bytes(received) == data


async def test_a_hundred_connections_at_once_do_not_mix(shared: Sandbox) -> None:
    async def one(port: int, number: int) -> None:
        data = f"{number}:".encode() * 2000
        async with await shared.dial(port) as near:
            await near.send(data)
            await near.send_eof()
            assert await everything(near) == data

    with anyio.fail_after(60):
        async with serving(shared, echo) as port, anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(one, port, number)


async def test_a_receiver_that_does_not_read_stops_its_sender_only(shared: Sandbox) -> None:
    peak = Peak(os.getpid())
    async with shared.listen() as listener, await shared.dial(listener.port) as near, await anext(listener):
        with anyio.move_on_after(1) as waiting:
            await near.send(bytes(128 * MIB))
        assert waiting.cancelled_caught, "128 MiB were sent to a receiver that does not read"
        assert (await shared.exec("echo fine")).stdout == "fine\n"
    assert peak.growth_bytes < (128 + 32) * MIB


async def test_max_bytes_are_respected_and_nothing_is_lost(shared: Sandbox) -> None:
    async with shared.listen() as listener, await shared.dial(listener.port) as near, await anext(listener) as far:
        await far.send(b"0123456789")
        assert await near.receive(4) == b"0123"
        assert await near.receive(4) == b"4567"
        assert await near.receive(4) == b"89"


async def test_closing_one_end_ends_the_other(shared: Sandbox) -> None:
    async with shared.listen() as listener:
        near = await shared.dial(listener.port)
        far = await anext(listener)
        await near.aclose()
        with anyio.fail_after(20):
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await far.receive()
            with pytest.raises(anyio.ClosedResourceError):
                await near.receive()
        await far.aclose()


async def test_a_program_that_goes_away_ends_its_connection(shared: Sandbox) -> None:
    async with shared.listen() as listener, anyio.create_task_group() as group:
        command = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{listener.port}; echo here >&3; exec sleep 31536801"]
        group.start_soon(shared.exec, command)
        async with await anext(listener) as far:
            assert await far.receive() == b"here\n"
            await until_running(shared, "sleep 31536801")
            group.cancel_scope.cancel()
            ended = (anyio.EndOfStream, anyio.BrokenResourceError)
            with anyio.CancelScope(shield=True), anyio.fail_after(20), pytest.raises(ended):
                await far.receive()


async def test_connections_that_wait_are_taken_later(shared: Sandbox) -> None:
    async with shared.listen() as listener:
        near = [await shared.dial(listener.port) for _ in range(10)]
        for number, stream in enumerate(near):
            await stream.send(f"{number}".encode())
            await stream.send_eof()
        said = []
        for _ in near:
            async with await anext(listener) as far:
                said.append(await everything(far))
        assert sorted(said) == [f"{number}".encode() for number in range(10)]
        for stream in near:
            await stream.aclose()


async def test_leaving_the_listener_closes_the_port_and_keeps_what_was_accepted(shared: Sandbox) -> None:
    async with shared.listen() as listener:
        near = await shared.dial(listener.port)
        far = await anext(listener)
    with pytest.raises(PortRefused):
        await shared.dial(listener.port)
    async with near, far:
        await far.send(b"still here")
        assert await near.receive() == b"still here"


@pytest.mark.core
async def test_there_is_no_interface_but_loopback(shared: Sandbox) -> None:
    lines = (await shared.files.read_text("/proc/net/dev")).splitlines()
    interfaces = {line.split(":")[0].strip() for line in lines if ":" in line}
    assert interfaces == {"lo"}


@pytest.mark.core
async def test_there_is_no_route_to_anywhere_else(shared: Sandbox) -> None:
    """Nothing is sent: connecting a datagram socket only asks for a route. The address is one of documentation."""
    ask = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    result = await shared.exec(["python3", "-c", ask], timeout_s=20)
    assert result.exit_code == 1
    assert "OSError" in result.stderr


@pytest.mark.core
async def test_two_sandboxes_have_each_their_own_ports(sandbox: Sandbox, neighbour: Sandbox) -> None:
    async with sandbox.listen(8124):
        with pytest.raises(PortRefused):
            await neighbour.dial(8124)
        async with neighbour.listen(8124) as listener:
            assert listener.port == 8124


FETCH = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=20)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode(), end="")
except OSError as error:
    print(error)
"""


@pytest.fixture
def answers_inside(capabilities: Capabilities, runtime_name: RuntimeName) -> None:
    """For tests of what the guest answers, where it may wait for a port: see `Capabilities.saves_epoll_waiters`."""
    if not capabilities.saves_epoll_waiters:
        pytest.skip(f"{runtime_name} declares that it cannot save epoll waiters, of which the guest would be one")


@pytest.mark.usefixtures("answers_inside")
async def test_without_a_policy_a_refused_request_says_how_to_allow_it(shared: Sandbox) -> None:
    said = (await shared.exec(["python3", "-c", FETCH, "http://example.com/page"])).stdout
    assert said.startswith("403 No connection leaves this sandbox")
    assert said.endswith(f"atoll network {shared.name} --allow example.com:80\n")
    tunnel = (await shared.exec(["python3", "-c", FETCH, "https://example.com/"])).stdout
    assert f"403 No network policy; to allow this: atoll network {shared.name} --allow example.com:443" in tunnel


@pytest.mark.usefixtures("answers_inside")
async def test_the_host_takes_the_proxys_port_and_the_guest_answers_when_it_is_free_again(shared: Sandbox) -> None:
    async with shared.listen(EGRESS_PORT) as listener:
        async with await shared.dial(EGRESS_PORT) as near, await anext(listener) as far:
            await near.send(b"x")
            assert await far.receive() == b"x"
        with pytest.raises(PortRefused):
            async with shared.listen(EGRESS_PORT):
                pass
    async with await shared.dial(EGRESS_PORT) as near:
        await near.send(b"CONNECT h:1 HTTP/1.1\r\n\r\n")
        assert (await near.receive()).startswith(b"HTTP/1.1 403 ")


@pytest.mark.usefixtures("answers_inside")
async def test_connections_that_say_nothing_keep_neither_the_guest_nor_others_from_an_answer(shared: Sandbox) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(100):  # the guest has answers for 32 at a time
            await stack.enter_async_context(await shared.dial(EGRESS_PORT))
        assert (await shared.exec("echo still here")).stdout == "still here\n"
        said = (await shared.exec(["python3", "-c", FETCH, "http://example.com/"], timeout_s=40)).stdout
        assert said.startswith("403 ")


@pytest.mark.parametrize("sent", [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * 300_000, b"CONNECT " + b"a" * 5000])
@pytest.mark.usefixtures("answers_inside")
async def test_whatever_is_sent_to_the_proxys_port_is_answered_or_cut(shared: Sandbox, sent: bytes) -> None:
    async with await shared.dial(EGRESS_PORT) as near:
        try:
            await near.send(sent)
            assert (await near.receive()).startswith(b"HTTP/1.1 403 ")
        except anyio.BrokenResourceError:
            assert len(sent) > 256 * 1024
    assert (await shared.exec("true")).exit_code == 0
