"""Sessions of the OpenAI Agents SDK on Atoll's sandboxes. The SDK publishes no suite for clients of sandboxes, so its
own client, which runs commands on this machine, walks the same walk where it can.
"""

from __future__ import annotations

import asyncio
import io
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from agents.sandbox import LocalSnapshotSpec, Manifest
from agents.sandbox.entries import Dir, File
from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    InvalidManifestPathError,
    PtySessionNotFoundError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient
from agents.sandbox.session import SandboxSession
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from agents.sandbox.types import Group, User
from examples.integrations import openai_agents as example

import atoll
from atoll.integrations.openai_agents import AtollSandboxClient, AtollSandboxClientOptions, AtollSandboxSession
from atoll.testing.server import running_server
from atoll.testing.waiting import eventually

pytestmark = pytest.mark.anyio

SERVER_PYTHON = str(Path(__file__).parents[3] / ".venv/bin/python")
"""What `atoll serve` needs is not in the environment of a framework, and may be forbidden there."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["crun", "runsc"])
async def client(
    request: pytest.FixtureRequest, make_state_dir: Callable[[], Path], anyio_backend: str
) -> AsyncIterator[AtollSandboxClient]:
    settings = atoll.Settings(state_dir=make_state_dir(), runtime=request.param)
    async with AtollSandboxClient(settings=settings) as client:
        yield client
        async with atoll.open(settings=settings) as engine:
            left = [each.name for each in await engine.list()]
            for name in left:
                await engine.destroy(name)
            assert not left


@pytest.fixture(scope="module")
async def session(client: AtollSandboxClient) -> AsyncIterator[SandboxSession]:
    session = await client.create(options=AtollSandboxClientOptions(exposed_ports=(8000,), env={"FROM": "options"}))
    async with session:
        yield session
    await client.delete(session)


MANIFEST = Manifest(
    entries={
        "note.txt": File(content=b"hello\n"),
        "src": Dir(children={"main.py": File(content=b"print('main')\n")}),
        "secret.txt": File(content=b"not kept\n", ephemeral=True),
    },
    environment={"value": {"WHO": "world"}},
)


@pytest.mark.parametrize("whose", ["sdk", "crun", "runsc"])
async def test_a_walk_over_a_session(whose: str, make_state_dir: Callable[[], Path], tmp_path: Path) -> None:
    """What passes with the SDK's own client passes with Atoll's."""
    snapshot = LocalSnapshotSpec(base_path=tmp_path)
    options: BaseSandboxClientOptions | None = None
    if whose == "sdk":
        client = UnixLocalSandboxClient()
    else:
        client = AtollSandboxClient(settings=atoll.Settings(state_dir=make_state_dir(), runtime=whose))
        options = AtollSandboxClientOptions()
    session = await client.create(manifest=MANIFEST, snapshot=snapshot, options=options)
    async with session:
        assert await session.running()
        ran = await session.exec("echo $WHO; cat note.txt; echo error >&2; exit 3")
        assert (ran.stdout, ran.stderr, ran.exit_code) == (b"world\nhello\n", b"error\n", 3)
        assert (await session.exec("printf", "%s", "a b", shell=False)).stdout == b"a b"
        assert (await session.exec("python3", "src/main.py")).stdout == b"main\n"
        with pytest.raises(ExecTimeoutError):
            await session.exec("sleep 60", timeout=1)

        data = bytes(range(256)) * 1000
        await session.mkdir("made/below", parents=True)
        await session.write(Path("made/below/binary"), io.BytesIO(data))
        assert await _contents(session, "made/below/binary") == data
        assert await session.read_bounded(Path("made/below/binary"), max_bytes=10) == data[:10]
        assert "binary" in [Path(each.path).name for each in await session.ls("made/below")]
        await session.mv("made/below/binary", "made/moved")
        assert await session.same_file("made/moved", "made/../made/moved")
        await session.rm("made/below", recursive=True)
        with pytest.raises(WorkspaceReadNotFoundError):
            await session.read(Path("made/below/binary"))
        with pytest.raises(InvalidManifestPathError):
            await session.read(Path("../outside"))
        await session.exec("ln -s /etc etc")
        with pytest.raises(InvalidManifestPathError):
            await session.read(Path("etc/passwd"))
        await session.exec("rm etc")
        await session.apply_patch([{"type": "update_file", "path": "note.txt", "diff": "@@\n-hello\n+hello patched\n"}])
        assert await _contents(session, "note.txt") == b"hello patched\n"

        # A terminal: what is written is echoed, a program knows that it has one, and its end is told.
        update = await session.pty_exec_start("tty && read line && echo got $line; exit 4", tty=True, yield_time_s=1)
        assert update.process_id is not None
        assert b"/dev/" in update.output
        update = await session.pty_write_stdin(session_id=update.process_id, chars="words\n", yield_time_s=5)
        assert b"got words" in update.output
        assert (update.process_id, update.exit_code) == (None, 4)
        with pytest.raises(PtySessionNotFoundError):
            await session.pty_write_stdin(session_id=1, chars="")
        update = await session.pty_exec_start("echo out; echo err >&2; sleep 60", yield_time_s=1)
        assert update.process_id is not None
        assert sorted(update.output.split()) == [b"err", b"out"]
        with pytest.raises(RuntimeError, match="stdin is not available"):
            await session.pty_write_stdin(session_id=update.process_id, chars="x")
        await session.pty_terminate_all()
    payload = json.loads(json.dumps(client.serialize_session_state(session.state)))
    await client.delete(session)

    again = await client.resume(client.deserialize_session_state(payload))
    async with again:
        assert await _contents(again, "note.txt") == b"hello patched\n"
        assert await _contents(again, "made/moved") == data
        assert (await again.exec("cat secret.txt; echo $WHO")).stdout == b"not kept\nworld\n"
    await client.delete(again)
    if isinstance(client, AtollSandboxClient):
        await client.close()


async def _contents(session: SandboxSession, path: str) -> bytes:
    with await session.read(Path(path)) as file:
        return file.read()


async def test_a_session_that_was_not_deleted_is_found_again(client: AtollSandboxClient) -> None:
    session = await client.create(manifest=MANIFEST)
    async with session:
        await session.exec("echo kept > kept; echo outside > /root/outside")
    payload = client.serialize_session_state(session.state)
    another = AtollSandboxClient(settings=client._settings)
    async with another:
        again = await another.resume(another.deserialize_session_state(payload))
        async with again:
            assert (await again.exec("cat kept /root/outside")).stdout == b"kept\noutside\n"
        await another.delete(again)
        await another.delete(again)
    with pytest.raises(ExecTransportError):
        await session.exec("true")
    assert not await session.running()


async def test_users_are_those_of_the_manifest(client: AtollSandboxClient) -> None:
    manifest = Manifest(users=[User(name="alice")], groups=[Group(name="staff2", users=[User(name="alice")])])
    session = await client.create(manifest=manifest)
    async with session:
        assert (await session.exec("id -un; id -Gn", user="alice")).stdout.split()[0] == b"alice"
        await session.exec("chmod 777 .")
        await session.write(Path("mine"), io.BytesIO(b"x"), user=User(name="alice"))
        assert (await session.exec("stat", "-c", "%U", "mine")).stdout == b"alice\n"
        with pytest.raises(ExecTransportError):
            await session.exec("true", user="nobody-at-all")
        await session.exec("mkdir locked; chmod 700 locked")
        with pytest.raises(WorkspaceArchiveWriteError):
            await session.write(Path("locked/file"), io.BytesIO(b"x"), user="alice")
    await client.delete(session)


async def test_nothing_of_a_command_outlives_its_time_or_its_caller(session: SandboxSession) -> None:
    with pytest.raises(ExecTimeoutError):
        await session.exec("sleep 4001 & sleep 4001", timeout=1)
    call = asyncio.create_task(session.exec("sleep 4001 & sleep 4001"))

    async def found() -> bool:
        return (await session.exec("pgrep -fx 'sleep 4001'")).exit_code == 0

    await eventually(found, "the command runs")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not await found()
    update = await session.pty_exec_start("sleep 4001 & sleep 4001", tty=True, yield_time_s=0.3)
    assert update.process_id is not None
    await session.pty_terminate_all()
    assert not await found()
    update = await session.pty_exec_start("sleep 4001", timeout=1, yield_time_s=10)
    assert update.exit_code == 124
    assert b"timed out" in update.output


async def test_output_that_nobody_reads_does_not_stop_a_command(session: SandboxSession) -> None:
    update = await session.pty_exec_start("sleep 1; seq 3000000; touch through; sleep 60", yield_time_s=0.3)
    assert (update.process_id is not None, update.output) == (True, b"")

    async def through() -> bool:
        return (await session.exec("test -e through")).ok()

    await eventually(through, "the command went on")
    update = await session.pty_write_stdin(session_id=update.process_id, chars="", max_output_tokens=100)
    assert b"3000000" in update.output
    await session.pty_terminate_all()


async def test_snapshots_leave_out_what_is_ephemeral_and_nothing_else(session: SandboxSession) -> None:
    inner = session._inner
    assert isinstance(inner, AtollSandboxSession)
    await session.exec("rm -rf ./*")
    for path in ("a[b]", "*", "deep/x", "other/deep/x", "ab", "x"):
        await session.mkdir(Path(path).parent, parents=True)
        await session.write(Path(path), io.BytesIO(path.encode()))
    for path in ("a[b]", "*", "deep/x"):
        session.register_persist_workspace_skip_path(path)
    with await session.persist_workspace() as archive:
        await session.exec("rm -rf ./* && ls -A")
        await session.hydrate_workspace(archive)
    kept = (await session.exec("find . -type f | sort")).stdout.decode().split()
    assert kept == ["./ab", "./other/deep/x", "./x"]


async def test_ports(session: SandboxSession) -> None:
    await session.exec("mkdir -p web; echo page > web/index.html")
    await session.pty_exec_start("python3 -m http.server 8000 --bind 127.0.0.1 -d web", yield_time_s=0.3)
    endpoint = await session.resolve_exposed_port(8000)
    url = endpoint.url_for("http")

    def fetch() -> bytes:
        # The name is below .localhost, which not every resolver knows.
        host = {"Host": f"{endpoint.host}:{endpoint.port}"}
        request = urllib.request.Request(url.replace(endpoint.host, "127.0.0.1"), headers=host)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.read()
        except urllib.error.HTTPError:
            return b""

    async def page() -> bool:
        return await asyncio.to_thread(fetch) == b"page\n"

    await eventually(page, "the page is served")
    with pytest.raises(ExposedPortUnavailableError):
        await session.resolve_exposed_port(8001)
    await session.pty_terminate_all()


async def test_the_example_runs(client: AtollSandboxClient) -> None:
    assert "09:25" in (await example.play(client))[1]


async def test_the_sandbox_may_be_of_a_server(
    make_state_dir: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(make_state_dir(), python=SERVER_PYTHON) as server:
        monkeypatch.setenv("ATOLL_URL", server.url)
        monkeypatch.setenv("ATOLL_API_KEY", server.key)
        async with AtollSandboxClient() as client:
            assert "09:25" in (await example.play(client))[1]
        async with atoll.connect() as engine:
            assert await engine.list() == []
