"""`atoll.connect`: the engine of a real server, beside what the conformance suite shows through it."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

import atoll
import atoll.sync
from atoll import Engine, InvalidRequest, Sandbox, SandboxExists, SandboxNotFound, ServerUnavailable, Unauthenticated
from atoll.client.engine import RemoteEngine, connect
from atoll.client.failures import error_of
from atoll.client.http import RETRY_S
from atoll.contract import errors
from atoll.runtime.engine import LocalEngine
from atoll.testing.server import RunningServer, running_server
from atoll.testing.serving import ServerProcess
from atoll.testing.waiting import eventually

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def server(servers: Callable[[Path], ServerProcess], state_dir: Path) -> ServerProcess:
    return servers(state_dir)


@pytest.fixture(scope="module")
async def remote(server: ServerProcess) -> AsyncIterator[Engine]:
    async with connect(server.url, server.key) as engine:
        yield engine


@pytest.fixture(scope="module")
async def box(remote: Engine) -> AsyncIterator[Sandbox]:
    async with remote.create("connected", env={"PLAIN": "1"}, secret_env={"TOKEN": "of the server"}) as sandbox:
        yield sandbox


def _public(kind: type) -> dict[str, object]:
    return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [LocalEngine, RemoteEngine])
def test_every_engine_has_the_methods_of_the_interface_with_their_arguments(kind: type[Engine]) -> None:
    for name, promised in _public(Engine).items():
        if inspect.isfunction(promised):
            ours, given = inspect.signature(promised), inspect.signature(getattr(kind, name))
            assert given.parameters == ours.parameters, name
            assert given.return_annotation == ours.return_annotation, name


async def test_a_command_has_the_sandboxs_environment_which_the_client_does_not_know(box: Sandbox) -> None:
    assert (await box.exec("echo $PLAIN $TOKEN $OWN", env={"OWN": "mine"})).stdout == "1 of the server mine\n"
    assert "of the server" not in repr(vars(box)) + box.info.model_dump_json()


async def test_code_that_is_typed_with_engine_takes_both(remote: Engine, state_dir: Path) -> None:
    async def names(engine: Engine) -> list[str]:
        return [info.name for info in await engine.list()]

    async with atoll.open(state_dir) as local, remote.create("seen-by-both"):
        assert "seen-by-both" in await names(remote)
        assert "seen-by-both" in await names(local)


async def test_errors_of_the_server_are_the_classes_that_a_local_engine_raises(remote: Engine, box: Sandbox) -> None:
    with pytest.raises(SandboxExists, match="'connected' exists already"):
        await remote.create("connected")
    with pytest.raises(SandboxNotFound, match=r"no sandbox is named 'nothing' \(sandboxes: 'connected'\)") as caught:
        await remote.get("nothing")
    assert caught.value.known == ["connected"]
    with pytest.raises(atoll.PathNotFound) as missing:
        await box.files.read_text("missing")
    assert missing.value.path == "missing"


def test_every_error_comes_back_as_its_class_and_an_unknown_one_as_the_root() -> None:
    for name in dir(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, atoll.AtollError) and "code" in vars(kind):
            body = b'{"code": "%s", "message": "why", "details": {"a": 1}, "request_id": "req_1"}' % kind.code.encode()
            error = error_of(400, body)
            assert type(error) is kind
            assert (error.message, error.details["a"], str(error)) == ("why", 1, "why")
    assert type(error_of(418, b'{"code": "teapot", "message": "m", "details": {}}')) is atoll.AtollError
    for body in (b"<html>", b"[]", b"{}", b'{"code": 1, "message": 2, "details": 3}', b"\xff"):
        assert type(error_of(502, body)) is ServerUnavailable


async def test_a_certificate_that_is_not_trusted_is_told_with_what_to_set(
    make_state_dir: Callable[[], Path],
) -> None:
    with (
        running_server(make_state_dir(), "--tls-self-signed") as own,
        pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED") as refused,
    ):
        await connect(own.url, own.key)
    assert refused.value.hint is not None
    assert "ATOLL_CA_FILE" in refused.value.hint


async def test_a_wrong_key_a_wrong_address_and_none_are_told_apart(server: ServerProcess) -> None:
    with pytest.raises(Unauthenticated, match="does not know it, or it was revoked, or it has expired"):
        await connect(server.url, "atoll_0000_wrong")
    with pytest.raises(ServerUnavailable, match=f"the server {NOWHERE} cannot be reached") as refused:
        with anyio.fail_after(RETRY_S / 2):  # it is not waited for: it never answered
            await connect(NOWHERE, server.key)
    assert refused.value.hint is not None
    assert "atoll serve" in refused.value.hint
    for url in ("localhost:8080", "ftp://host", "http://", "https://user@host"):
        with pytest.raises(InvalidRequest, match="is no address of a server"):
            await connect(url, server.key)
    with pytest.raises(InvalidRequest, match="ATOLL_URL"):
        await connect(None, server.key)
    with pytest.raises(InvalidRequest, match="ATOLL_API_KEY"):
        await connect(server.url)


async def test_what_is_about_the_servers_machine_says_where_it_is_shown(remote: Engine) -> None:
    with pytest.raises(InvalidRequest, match="atoll doctor"):
        remote.doctor()
    with pytest.raises(InvalidRequest, match="atoll storage"):
        _ = remote.storage
    with pytest.raises(InvalidRequest, match="import"):
        await remote.images.import_(Path("x.tar"), "team/tools:1")


async def test_sudo_is_asked_for_and_used_through_a_server(remote: Engine, box: Sandbox) -> None:
    assert (await box.exec("sudo id -u")).exit_code != 0
    await remote.check_options({"sudo": True})
    async with await remote.create(sudo=True) as sandbox:
        assert sandbox.info.sudo
        assert (await sandbox.exec("sudo id -u")).stdout == "0\n"
        (fork,) = await sandbox.fork()
        async with fork:
            assert (await fork.exec("sudo id -u")).stdout == "0\n"


async def test_an_ephemeral_sandbox_ends_with_the_client_that_made_it(server: ServerProcess, remote: Engine) -> None:
    async with connect(server.url, server.key) as engine:
        sandbox = await engine.create("passing", ephemeral=True)
        assert sandbox.info.ephemeral
        await sandbox.exec(["true"])

    async def is_gone() -> bool:
        return "passing" not in {info.name for info in await remote.list() if info.status != "error"}

    await eventually(is_gone, "it ends with its last client")
    await remote.remove_abandoned()


async def test_a_create_that_is_cancelled_leaves_nothing(remote: Engine) -> None:
    for delay_s in (0.0, 0.01, 0.05):
        with anyio.move_on_after(delay_s) as scope:
            await remote.create("half-made")
        if not scope.cancelled_caught:  # it was quicker
            await remote.destroy("half-made")
        assert "half-made" not in [info.name for info in await remote.list()]


async def test_the_blocking_face_connects_too(server: ServerProcess) -> None:
    def work() -> str:
        with atoll.sync.connect(server.url, server.key) as engine, engine.create("blocking") as box:
            return str(box.exec("echo blocked").stdout)

    assert await anyio.to_thread.run_sync(work) == "blocked\n"


async def test_a_port_is_forwarded_and_one_is_exposed_by_the_server(box: Sandbox) -> None:
    async with await box.spawn(["python3", "-m", "http.server", "8123"], keep=False):
        preview = await box.expose(8123, wait_s=30)
        assert [each.port for each in await box.previews()] == [8123]
        assert preview.token in preview.url
        async with box.forward(8123) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(b"GET / HTTP/1.0\r\n\r\n")
            assert (await client.receive()).startswith(b"HTTP/1.0 200")
        await box.unexpose(8123)
        assert await box.previews() == []


async def test_what_was_being_made_when_the_server_went_away_for_long_is_undone_when_it_is_back(
    make_state_dir: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir = make_state_dir()
    killed = RunningServer(state_dir, (), {})
    killed.start()
    errors: list[BaseException] = []

    async def fails(making: Awaitable[object]) -> None:
        with pytest.raises(ServerUnavailable) as caught:
            await making
        errors.append(caught.value)

    try:
        async with connect(killed.url, killed.key) as engine:
            await engine.create("source")
            monkeypatch.setattr("atoll.client.http.RETRY_S", 0.2)
            for name, making in (("made", engine.create("made")), ("fork-a", engine.fork("source", names=["fork-a"]))):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fails, making)
                    await eventually((state_dir / "names" / name).is_symlink, "it is being made")
                    await anyio.to_thread.run_sync(killed.kill)
                    await anyio.sleep(0.5)  # longer than requests are repeated
                    await anyio.to_thread.run_sync(killed.start)
                assert [info.name for info in await engine.list()] == ["source"]
            await engine.destroy("source")
    finally:
        killed.kill()
    assert len(errors) == 2


# ---- requests that are repeated ----


class Flaky:
    """A server that reads a request and goes away, so often, before it answers one."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        task_status.started()
        async with listener:
            await listener.serve(self._answer)

    async def _answer(self, client: anyio.abc.SocketStream) -> None:
        async with client:
            self.requests.append(await client.receive())
            if len(self.requests) > self.failures:
                await client.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")


@pytest.mark.parametrize("method", ["GET", "POST with a key", "DELETE"])
async def test_a_request_that_is_safe_to_repeat_is_repeated_with_the_same_key(method: str) -> None:
    from pydantic import SecretStr

    from atoll.client.http import HttpClient

    flaky = Flaky(2)
    async with anyio.create_task_group() as group:
        await group.start(flaky.serve)
        http = HttpClient(flaky.url, SecretStr("k"), tenant=None, trust=None)
        await http.send(method.split(maxsplit=1)[0], "/x", key="one-key" if "key" in method else None)
        await http.aclose()
        group.cancel_scope.cancel()
    assert len(flaky.requests) == 3
    assert len(set(flaky.requests)) == 1
    assert (b"one-key" in flaky.requests[0]) == ("key" in method)


async def test_a_request_that_is_not_safe_to_repeat_is_sent_once() -> None:
    from pydantic import SecretStr

    from atoll.client.http import HttpClient

    flaky = Flaky(1)
    async with anyio.create_task_group() as group:
        await group.start(flaky.serve)
        http = HttpClient(flaky.url, SecretStr("k"), tenant=None, trust=None)
        with pytest.raises(ServerUnavailable):
            await http.send("POST", "/x")
        await http.aclose()
        group.cancel_scope.cancel()
    assert len(flaky.requests) == 1
