"""Sandboxes of Atoll for the OpenAI Agents SDK: `SandboxRunConfig(client=AtollSandboxClient())`.

Owns the client, which makes, finds again and removes sandboxes, and the session, which is one sandbox with a workspace.
Commands, files, terminals and archives are Atoll's own operations; what the SDK derives from these, such as patches,
manifests and snapshots, is the SDK's. A session that ends puts its sandbox to sleep, the client's `delete` destroys it,
and `resume` finds it again, in any process, or makes another that gets the workspace of the snapshot. Not here: what a
sandbox promises (`runtime/sandbox.py`), and the operator's settings, which hold for what the options leave out
(`settings.py`).
"""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

import atoll
from atoll.contract.errors import install_extra

try:
    from agents.sandbox.errors import (
        ExecTimeoutError,
        ExecTransportError,
        ExposedPortUnavailableError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
        WorkspaceWriteTypeError,
    )
    from agents.sandbox.manifest import Manifest
    from agents.sandbox.session import SandboxSession, SandboxSessionState
    from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
    from agents.sandbox.session.dependencies import Dependencies
    from agents.sandbox.session.manager import Instrumentation
    from agents.sandbox.session.pty_output import collect_pty_output
    from agents.sandbox.session.pty_types import (
        PTY_PROCESSES_MAX,
        PtyExecUpdate,
        allocate_pty_process_id,
        clamp_pty_yield_time_ms,
        process_id_to_prune_from_meta,
        resolve_pty_write_yield_time_ms,
    )
    from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
    from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
    from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
except ModuleNotFoundError as error:
    missing = f"{__name__} needs {error.name}, which is not installed; {install_extra('openai-agents')}"
    raise ImportError(missing) from error

UNUSED_TTL_S = 7 * 24 * 3600.0
"""How long a sandbox is kept that nobody uses and nobody deleted, as after a crash. The options may say otherwise."""
_LABEL = "openai-agents/session"
_ROWS, _COLUMNS = 24, 80
_CHUNK_BYTES = 64 * 1024
_KEPT_CHUNKS, _JOINED_BYTES = 1024, 4096
"""Output that a model has not read yet: the newest so many pieces, small ones being joined."""
_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""A workspace archive beyond this is a temporary file."""


class AtollSandboxClientOptions(BaseSandboxClientOptions):
    """The sandbox of a session. What is unset is as in `Engine.create`: what the operator's settings say, else Atoll's
    defaults."""

    type: Literal["atoll"] = "atoll"
    image: str | None = None
    runtime: str | None = None
    limits: atoll.Limits | None = None
    env: dict[str, str] | None = None
    """For every command. Those of the manifest go on top."""
    user: str = "root"
    """Who commands run as that name no user. Manifests make users and groups, which only root can; and root inside is
    nobody outside."""
    network: atoll.NetworkPolicy | None = None
    """Unset: no connection leaves the sandbox."""
    from_checkpoint: str | None = None
    """The checkpoint that it begins as, by id or label. `image` and `runtime` cannot be given then."""
    exposed_ports: tuple[int, ...] = ()
    """Ports inside for which `resolve_exposed_port` gives a URL."""
    ttl_s: float | None = UNUSED_TTL_S
    """How long it is kept while nobody uses it. None: until it is deleted."""


class AtollSandboxSessionState(SandboxSessionState):
    """What finds the sandbox of a session again."""

    type: Literal["atoll"] = "atoll"
    sandbox_name: str
    options: AtollSandboxClientOptions


class _Running:
    """A command that a model reads bit by bit, in a terminal or not."""

    def __init__(self, process: atoll.Process, *, tty: bool) -> None:
        self.process = process
        self.tty = tty
        self.chunks: deque[bytes] = deque(maxlen=_KEPT_CHUNKS)
        self.lock = asyncio.Lock()
        self.notify = asyncio.Event()
        self.closed = asyncio.Event()
        self.exit_code: int | None = None
        self.last_used = time.monotonic()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self.process:
                if isinstance(event, atoll.Output):
                    await self._keep(event.data)
                elif isinstance(event, atoll.Exited):
                    self.exit_code = event.exit_code
        except atoll.ExecTimeout:
            await self._keep(b"\n[the command timed out; all that it started was killed]\n")
            self.exit_code = 124
        except atoll.SandboxError as error:
            await self._keep(f"\n[{error}]\n".encode())
        finally:
            self.closed.set()
            self.notify.set()

    async def _keep(self, data: bytes) -> None:
        async with self.lock:
            if self.chunks and len(self.chunks[-1]) < _JOINED_BYTES:
                data = self.chunks.pop() + data
            self.chunks.append(data)
        self.notify.set()

    async def end(self) -> None:
        """Kill it with all that it started."""
        self.reader.cancel()
        with suppress(atoll.AtollError):
            if self.exit_code is None:
                await self.process.signal(9, tree=True)
        with suppress(atoll.AtollError):
            await self.process.aclose()
        await asyncio.gather(self.reader, return_exceptions=True)


class AtollSandboxSession(BaseSandboxSession):
    """A sandbox whose workspace is the manifest's root. What each method promises is said in `BaseSandboxSession`."""

    state: AtollSandboxSessionState

    def __init__(self, state: AtollSandboxSessionState, box: atoll.Sandbox) -> None:
        self.state = state
        self.box = box
        """The sandbox itself, for what the SDK has no method for."""
        self._terminals: dict[int, _Running] = {}

    @property
    def _root(self) -> str:
        return self._workspace_root_path().as_posix()

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def _prepare_backend_workspace(self) -> None:
        await self.box.files.mkdir(self._root, user="root")
        await self.box.files.chown(self._root, self.box.info.user, user="root")

    async def running(self) -> bool:
        try:
            return await self.box.status() in ("running", "paused")
        except atoll.AtollError:
            return False

    async def _shutdown_backend(self) -> None:
        """Put the sandbox to sleep: it uses no memory, and `resume` wakes it."""
        with suppress(atoll.SandboxDied, atoll.SandboxNotFound):
            for port in self.state.exposed_ports:
                await self.box.unexpose(port)
            await self.box.sleep()

    # ------------------------------------------------------------------------------------------------------ commands

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        """Run a command to its end. `user` needs no `sudo` inside."""
        return await self._run(self._prepare_exec_command(*command, shell=shell, user=None), timeout, user)

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run([str(word) for word in command], timeout, None)

    async def _run(self, command: Sequence[str], timeout: float | None, user: str | User | None) -> ExecResult:
        try:
            ran = await self.box.exec_bytes(
                command,
                env=await self.state.manifest.environment.resolve(),
                cwd=self._root,
                user=_name(user),
                timeout_s=timeout,
            )
        except atoll.ExecTimeout as error:
            raise ExecTimeoutError(command=command, timeout_s=timeout, cause=error) from error
        except atoll.AtollError as error:
            _raise_transport(command, error)
        return ExecResult(stdout=ran.stdout, stderr=ran.stderr, exit_code=ran.exit_code)

    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        words = self._prepare_exec_command(*command, shell=shell, user=None)
        if len(self._terminals) >= PTY_PROCESSES_MAX:
            await self._prune()
        try:
            process = await self.box.spawn(
                words,
                env=await self.state.manifest.environment.resolve(),
                cwd=self._root,
                user=_name(user),
                stdin=tty,
                merge_stderr=not tty,
                pty=(_ROWS, _COLUMNS) if tty else None,
                keep=False,
                timeout_s=timeout,
            )
        except atoll.AtollError as error:
            _raise_transport(words, error)
        number = allocate_pty_process_id(set(self._terminals))
        running = self._terminals[number] = _Running(process, tty=tty)
        yield_time_ms = clamp_pty_yield_time_ms(10_000 if yield_time_s is None else int(yield_time_s * 1000))
        return await self._update(number, running, yield_time_ms, max_output_tokens)

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        running = self._resolve_pty_session_entry(pty_processes=self._terminals, session_id=session_id)
        if chars:
            if not running.tty:
                raise RuntimeError("stdin is not available for this process")
            with suppress(atoll.AtollError, anyio.BrokenResourceError):  # it has ended, which the update says
                await running.process.stdin.send(chars.encode())
        yield_time_ms = resolve_pty_write_yield_time_ms(
            yield_time_ms=250 if yield_time_s is None else int(yield_time_s * 1000), input_empty=chars == ""
        )
        running.last_used = time.monotonic()
        return await self._update(session_id, running, yield_time_ms, max_output_tokens)

    async def _update(
        self, number: int, running: _Running, yield_time_ms: int, max_output_tokens: int | None
    ) -> PtyExecUpdate:
        output, tokens, closed = await collect_pty_output(
            output_chunks=running.chunks,
            output_lock=running.lock,
            output_notify=running.notify,
            is_done=running.closed.is_set,
            yield_time_ms=yield_time_ms,
            max_output_tokens=max_output_tokens,
        )
        if closed and self._terminals.pop(number, None) is not None:
            await running.end()
        return PtyExecUpdate(
            process_id=None if closed else number,
            output=output,
            exit_code=running.exit_code if closed else None,
            original_token_count=tokens,
        )

    async def _prune(self) -> None:
        known = [(number, each.last_used, each.closed.is_set()) for number, each in self._terminals.items()]
        number = process_id_to_prune_from_meta(known)
        if number is not None:
            await self._terminals.pop(number).end()

    async def pty_terminate_all(self) -> None:
        running, self._terminals = list(self._terminals.values()), {}
        for each in running:
            await each.end()

    # --------------------------------------------------------------------------------------------------------- files

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        return io.BytesIO(await self._read(path, None, user))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        return await self._read(path, max_bytes, None)

    async def _read(self, path: Path, limit: int | None, user: str | User | None) -> bytes:
        inside = (await self._validate_path_access(path)).as_posix()
        try:
            return await self.box.files.read_bytes(inside, limit=limit, user=_name(user))
        except (atoll.PathNotFound, atoll.PathNotDirectory) as error:
            raise WorkspaceReadNotFoundError(path=Path(path), cause=error) from error
        except atoll.AtollError as error:
            raise WorkspaceArchiveReadError(path=Path(path), cause=error, retryable=error.retryable) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        await self._write(path, data, user, exclusive=False)

    async def _write_new_file(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        await self._write(path, data, user, exclusive=True)

    async def _write(self, path: Path, data: io.IOBase, user: str | User | None, *, exclusive: bool) -> None:
        inside = (await self._validate_path_access(path, for_write=True)).as_posix()
        try:
            await self.box.files.write_bytes(inside, _chunks(data, path), exclusive=exclusive, user=_name(user))
        except atoll.AtollError as error:
            raise WorkspaceArchiveWriteError(path=Path(path), cause=error, retryable=error.retryable) from error

    # ----------------------------------------------------------------------------------------- snapshots and ports

    async def persist_workspace(self) -> io.IOBase:
        """The workspace as a tar, without what the manifest calls ephemeral."""
        root = self._workspace_root_path()
        # With a slash, a pattern is for a path of the workspace, not for names anywhere in it.
        skipped = [f"./{_literal(path.as_posix())}" for path in self._persist_workspace_skip_relpaths()]
        archive = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 - whoever persists it closes it
        try:
            async with AsyncExitStack() as mounts:
                for entry, path in self.state.manifest.ephemeral_mount_targets():
                    await entry.mount_strategy.teardown_for_snapshot(entry, self, path)
                    mounts.push_async_callback(entry.mount_strategy.restore_after_snapshot, entry, self, path)
                async for chunk in self.box.files.tar_out(self._root, inside=True, exclude=skipped, user="root"):
                    archive.write(chunk)
        except BaseException as error:
            archive.close()
            if isinstance(error, atoll.AtollError):
                raise WorkspaceArchiveReadError(path=root, cause=error, retryable=error.retryable) from error
            raise
        archive.seek(0)
        return archive

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack a tar into the workspace. Nothing is written outside of it."""
        root = self._workspace_root_path()
        try:
            await self.box.files.tar_in(self._root, _chunks(data, root), user="root")
        except atoll.AtollError as error:
            raise WorkspaceArchiveWriteError(path=root, cause=error, retryable=error.retryable) from error

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        """A URL with a token in its query, for as long as this program's client is open."""
        try:
            url = urlsplit((await self.box.expose(port)).url)
        except atoll.AtollError as error:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=error
            ) from error
        tls = url.scheme == "https"
        return ExposedPortEndpoint(
            host=url.hostname or "", port=url.port or (443 if tls else 80), tls=tls, query=url.query
        )


class AtollSandboxClient(BaseSandboxClient[AtollSandboxClientOptions]):
    """Makes the sandboxes of sessions: on this machine or, where the settings name a server (`ATOLL_URL`), there.

    It opens its engine when it is first used, and belongs to the event loop that it is used in. `close`, or the end of
    its context, disconnects; sandboxes that were not deleted sleep on, until they have not been used for `ttl_s`.
    """

    backend_id = "atoll"
    supports_default_options = True

    def __init__(
        self,
        *,
        settings: atoll.Settings | None = None,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        self._settings = settings
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies
        self._engine: atoll.Engine | None = None
        self._opening = asyncio.Lock()

    async def _open(self) -> atoll.Engine:
        async with self._opening:
            if self._engine is None:
                settings = self._settings or atoll.Settings.from_environment()
                opening = atoll.connect(settings=settings) if settings.url else atoll.open(settings=settings)
                self._engine = await opening
            return self._engine

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.close()

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: AtollSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """
        Raises:
            what `Engine.create` and, with `ATOLL_URL`, `atoll.connect` raise.
        """
        session_id = uuid.uuid4()
        options = options or AtollSandboxClientOptions()
        state = AtollSandboxSessionState(
            session_id=session_id,
            manifest=self._validate_manifest_for_create(manifest or Manifest()),
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            exposed_ports=options.exposed_ports,
            sandbox_name=f"agents-{session_id.hex}",
            options=options,
        )
        return self._session(state, await self._make(state), preserved=False)

    async def _make(self, state: AtollSandboxSessionState) -> atoll.Sandbox:
        options = state.options
        engine = await self._open()
        return await engine.create(
            state.sandbox_name,
            image=options.image,
            runtime=options.runtime,  # type: ignore[arg-type] # checked there
            limits=options.limits,
            env=options.env,
            user=options.user,
            network=options.network,
            from_checkpoint=options.from_checkpoint,
            labels={_LABEL: str(state.session_id)},
            ttl_s=options.ttl_s,
            ttl_renewed_by_use=options.ttl_s is not None,
        )

    def _session(self, state: AtollSandboxSessionState, box: atoll.Sandbox, *, preserved: bool) -> SandboxSession:
        inner = AtollSandboxSession(state, box)
        inner._set_start_state_preserved(preserved)  # noqa: SLF001 - the SDK's own clients tell their sessions so
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """The session in its own sandbox, which is woken. If that is gone, in a new one, which gets the workspace of
        the snapshot when the session is started."""
        if not isinstance(state, AtollSandboxSessionState):
            raise TypeError(f"AtollSandboxClient cannot resume a {type(state).__name__}")
        state.assert_path_grants_rebound()
        engine = await self._open()
        try:
            box = await engine.wake(state.sandbox_name)
        except atoll.SandboxNotFound:
            state.workspace_root_ready = False
            return self._session(state, await self._make(state), preserved=False)
        return self._session(state, box, preserved=True)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Destroy the session's sandbox. Does nothing if it is gone."""
        inner = session._inner  # noqa: SLF001 - as the SDK's own clients do
        if not isinstance(inner, AtollSandboxSession):
            raise TypeError(f"AtollSandboxClient cannot delete a {type(inner).__name__}")
        await inner.pty_terminate_all()
        with suppress(atoll.SandboxNotFound):
            await (await self._open()).destroy(inner.state.sandbox_name)
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, AtollSandboxSessionState)


def _name(user: str | User | None) -> str | None:
    return user.name if isinstance(user, User) else user


def _raise_transport(command: Sequence[str], error: atoll.AtollError) -> NoReturn:
    context: Mapping[str, Any] = {"backend": "atoll", "reason": error.code, "provider_error": str(error)}
    raise ExecTransportError(
        command=command, message=f"exec failed: {error}", context=context, cause=error, retryable=error.retryable
    ) from error


def _literal(path: str) -> str:
    """The pattern that only this path matches."""
    return "".join(f"[{each}]" if each in "*?[{" else each for each in path)


async def _chunks(data: io.IOBase, path: Path) -> AsyncIterator[bytes]:
    """What a file holds, read in a thread.

    Raises:
        WorkspaceWriteTypeError: it is neither text nor bytes.
    """
    while chunk := await anyio.to_thread.run_sync(data.read, _CHUNK_BYTES):
        if isinstance(chunk, str):
            chunk = chunk.encode()
        if not isinstance(chunk, bytes | bytearray):
            raise WorkspaceWriteTypeError(path=path, actual_type=type(chunk).__name__)
        yield bytes(chunk)
