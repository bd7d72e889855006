"""The workspace of an agent: a sandbox with a bundle in it, made by the first call of a tool.

Owns when a sandbox is made, woken, made anew and put to sleep, what is recorded about it, and the tools that a model
gets. `/workspace` is a volume, so that files outlive the sandbox when another bundle needs a new one. Not here: what is
installed (`build.py`), how calls are made (`dispatch.py`), where instances are stored and which tenant may have one
(`server/`). Used by the server and by `atoll bundle check`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio
import anyio.to_thread
import pydantic_core
from pydantic import BaseModel, ConfigDict, SecretStr

from atoll.bundles import build as building
from atoll.bundles.archive import TAR_END_BYTES, repack, verify
from atoll.bundles.build import VENV, Admission, BuildSpec
from atoll.bundles.builtin import BUILTIN_TOOLS, builtin_tools
from atoll.bundles.dispatch import WORKSPACE, Dispatcher
from atoll.bundles.manifest import BundleManifest, BundleReason
from atoll.bundles.schemas import ToolSchema
from atoll.contract.errors import (
    AtollError,
    BundleFailed,
    CheckpointNotFound,
    InvalidRequest,
    SandboxError,
    SandboxNotFound,
    TooManyProcesses,
    Unenforceable,
    VolumeExists,
    VolumeNotFound,
    told_elsewhere,
)
from atoll.contract.model import RESERVED_LABELS, VOLUME_PREFIX, Limits, Mount, RuntimeName, SandboxInfo, Status
from atoll.contract.network import REGISTRIES, NetworkPolicy
from atoll.contract.secret import Secret
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from atoll.tools.tool import (
    GivenArguments,
    Hints,
    SchemaTool,
    StrictModel,
    ToolResult,
    ToolSet,
    failure,
    nearest,
)

MAX_LOG_BYTES = 16 * 1024
"""Of the log of a boot that an instance keeps."""
RETRY_S = 30.0
"""After a boot that failed, calls fail with the same reason for this long. `boot` tries at once."""
SPEC_LABEL = f"{RESERVED_LABELS}workspace"
"""Of a workspace's sandbox: what it was made of."""
INSTANCE_LABEL = f"{RESERVED_LABELS}workspace-instance"
_USER_ID = 1000
_RECORD_S = 1.0
"""How often an instance is recorded only because tools have printed something."""
_STATES: Mapping[Status, WorkspaceState] = {
    "provisioning": "provisioning",
    "running": "running",
    "paused": "sleeping",
    "sleeping": "sleeping",
    "shutdown": "sleeping",
    "error": "failed",
}
_log = logging.getLogger(__name__)

WorkspaceState = Literal["provisioning", "running", "sleeping", "failed", "destroyed"]


class BundleFile(StrictModel):
    """A stored bundle: its bytes on this machine, and what was read of them."""

    path: Path
    sha256: str
    """What the bytes must have; they are checked again at each boot."""
    manifest: BundleManifest
    tools: tuple[ToolSchema, ...]
    """As `read_bundle` gave them."""


class WorkspaceSpec(BaseModel):
    """What a workspace is made of. Values of secrets are not shown when it is printed."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    sandbox: str
    """The name of its sandbox in the engine, the same for as long as the config exists. Its volume has it too."""
    bundle: BundleFile | None = None
    """Unset: it has built-in tools only, and no sandbox is made."""
    image: str | None = None
    """Unset: the engine's default."""
    runtime: RuntimeName | None = None
    """Unset: the engine's default."""
    network: NetworkPolicy | None = None
    """The policy of its egress, once it is built. Unset: no connection leaves it."""
    build_network: NetworkPolicy | None = NetworkPolicy(allow=REGISTRIES)
    """The policy while a bundle is built. Unset: no connection leaves it then, so that no packages can be installed."""
    limits: Limits = Limits()
    build_limits: Limits = Limits()
    """Of the sandbox that a bundle is built in. What is built serves all workspaces, so it should not depend on one."""
    environment: Mapping[str, str] = {}
    secret_env: Mapping[str, SecretStr] = {}
    """Variables that tools see in clear, and that are shown nowhere else."""
    secrets: Mapping[str, Secret] = {}
    """Values that stay outside: tools see placeholders, replaced in requests to the hosts of each."""
    revision: str = ""
    """Has to change when the value of a secret does: no value is written down to compare it with."""
    labels: Mapping[str, str] = {}
    """Of its sandbox."""
    sleep_after_s: float = 600
    """How long it may be unused before it sleeps."""
    call_timeout_s: float = 60
    """How long a call of a tool may take."""

    def fingerprint(self) -> str:
        """What tells one spec from another, of what a sandbox has from its beginning."""
        made_of = {
            "bundle": self.bundle and self.bundle.sha256,
            "image": self.image,
            "runtime": self.runtime,
            "environment": dict(self.environment),
            "secret_env": sorted(self.secret_env),
            "secrets": {name: [secret.hosts, secret.header] for name, secret in sorted(self.secrets.items())},
            "revision": self.revision,
        }
        return hashlib.sha256(pydantic_core.to_json(made_of)).hexdigest()[:40]


class WorkspaceInstance(StrictModel):
    """One life of a workspace: from the boot of its sandbox to its end."""

    external_id: str
    """Known before the boot begins, and unique."""
    state: WorkspaceState
    reason: BundleReason | None = None
    """Why it failed, if its bundle is the cause."""
    message: str | None = None
    """What failed, in words. Unset: nothing did."""
    created_at: datetime
    ready_at: datetime | None = None
    """When its first call could be made. Unset: it has not been ready."""
    ended_at: datetime | None = None
    """When it failed or was destroyed. Unset: it has not ended."""
    log: str = ""
    """The end of what its boot and its tools printed, at most `MAX_LOG_BYTES`."""


VolumeAdmission = Callable[[str, int | None], AbstractAsyncContextManager[object]]
"""A context in which a volume of this name and size may be made."""
OnInstance = Callable[[WorkspaceInstance], Awaitable[None]]
"""Receives an instance each time it changes, in order; called again with the same `external_id`, it replaces what was
stored."""


@dataclass(frozen=True)
class BundleTool(SchemaTool):
    """A tool of a bundle. Its name is the bundle's, whatever is built in."""

    _any_name: ClassVar[bool] = True


class Workspace:
    """The sandbox of one agent config, and its tools. Nothing is made until a tool of the bundle is called.

    `last` is the newest stored instance of this config, if there is one: a process that comes later goes on with it.
    `admit` is entered while a sandbox is made, with its name and the limits in force, and `admit_volume` while
    `/workspace` is: they may refuse.
    Use one object for a sandbox at a time in a process; calls may be concurrent. `aclose` leaves the sandbox.
    """

    def __init__(
        self,
        engine: Engine,
        spec: WorkspaceSpec,
        record: OnInstance,
        *,
        last: WorkspaceInstance | None = None,
        admit: Admission | None = None,
        admit_volume: VolumeAdmission | None = None,
    ) -> None:
        self.engine = engine
        self.spec = spec
        self._record = record
        self._instance = last
        self._admit = admit
        self._admit_volume = admit_volume
        self._dispatcher: Dispatcher | None = None
        self._booting = anyio.Lock()
        self._boot_scope = anyio.CancelScope()
        """Of the last boot."""
        self._failure: tuple[float, AtollError] | None = None
        self._log = bytearray((last.log if last is not None else "").encode())
        self._recorded_at = 0.0
        self._unrecorded = False
        self._used_at = 0.0
        self._calls = 0
        self._idle: asyncio.Task[None] | None = None

    @property
    def instance(self) -> WorkspaceInstance | None:
        """The newest one, as it was last recorded."""
        return self._instance

    @property
    def _runtime(self) -> RuntimeName:
        return self.spec.runtime or self.engine.default_runtime

    @property
    def _limits(self) -> Limits:
        """Those in force."""
        return self.engine.effective_limits(self.spec.limits, self._runtime)

    # ------------------------------------------------------------------------------------------------------- tools

    def tools(self, names: Sequence[str]) -> ToolSet:
        """The tools of these names, of the bundle or built in. Boots nothing.

        A call of one boots the workspace if it does not run, and waits for it. A boot that fails is the result of the
        call, as an error that names the reason.

        Raises:
            InvalidRequest: a name is neither in the bundle nor built in; the message has those that are.
        """
        own = {tool.name: tool for tool in (self.spec.bundle.tools if self.spec.bundle else ())}
        known = [*own, *(name for name in BUILTIN_TOOLS if name not in own)]
        if unknown := [name for name in names if name not in known]:
            raise InvalidRequest(
                f"the bundle has no tool {unknown[0]!r} (tools: {', '.join(known)}){nearest(unknown[0], known)}"
            )
        chosen = dict.fromkeys(names)
        made = ToolSet([self._tool(own[name]) for name in chosen if name in own])
        return made | builtin_tools().only(*(name for name in chosen if name not in own))

    def _tool(self, tool: ToolSchema) -> BundleTool:
        async def handle(given: GivenArguments, _context: object) -> ToolResult:
            return await self.call(tool.name, given.arguments)

        return BundleTool(
            name=tool.name,
            description=tool.description,
            input=GivenArguments,
            result=None,
            handler=handle,
            hints=Hints(open_world=True),
            schema=tool.input_schema,
        )

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Make a call of a tool of the bundle. Every failure is a result with `is_error`."""
        try:
            async with self.in_use():
                dispatcher = await self._running()
                return await dispatcher.call(tool, arguments, self.spec.call_timeout_s)
        except BundleFailed as error:
            return failure(f"the workspace did not start ({error.reason}): {error.message}", error.reason)
        except AtollError as error:
            return failure(f"the workspace failed: {told_elsewhere(error)}", error.code, retryable=error.retryable)

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """While the block runs, the workspace is not put to sleep."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._used_at = anyio.current_time()
            if self._unrecorded and self._used_at - self._recorded_at > _RECORD_S:
                with anyio.CancelScope(shield=True):
                    await self._note()

    async def _running(self) -> Dispatcher:
        """The dispatcher. Boots if need be, unless that has just failed."""
        if self._dispatcher is not None and self._dispatcher.is_alive:
            return self._dispatcher
        if self._failure is not None and anyio.current_time() < self._failure[0]:
            raise self._failure[1]
        await self.boot()
        if self._dispatcher is None:
            raise SandboxError("the workspace was ended while a call was about to be made")
        return self._dispatcher

    # -------------------------------------------------------------------------------------------------------- boot

    async def boot(self) -> WorkspaceInstance:
        """Make sure that the workspace runs and its tools can be called. Does nothing if they can be.

        A workspace whose sandbox was made of another bundle, image, environment or secrets is made anew; the files in
        `/workspace` stay. The network policy and limits of a sandbox that exists are updated.

        Raises:
            InvalidRequest: it has no bundle.
            BundleFailed: `reason` says at which step; the instance is recorded as failed.
            AtollError: the sandbox could not be made. The instance is recorded as failed, without a reason.
        """
        if self.spec.bundle is None:
            raise InvalidRequest("the workspace has no bundle, and needs no sandbox")
        async with self._booting:
            if self._instance is not None and self._dispatcher is not None and self._dispatcher.is_alive:
                return self._instance
            self._failure = None
            try:
                with anyio.CancelScope() as self._boot_scope:
                    return await self._boot(self.spec.bundle)
                raise SandboxError("the workspace was removed while it was booted")
            except AtollError as error:
                self._failure = anyio.current_time() + RETRY_S, error
                raise

    async def _boot(self, bundle: BundleFile) -> WorkspaceInstance:
        sandbox = await self._existing()
        if sandbox is None:
            await self._begin()
        try:
            if sandbox is None:
                await self._make(bundle)
            else:
                self._go_on_with(sandbox.info)
                await self._start(bundle, sandbox)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                # Its sources were edited, or processes that tools have left take all that it may have.
                if sandbox is not None and isinstance(error, BundleFailed | SandboxError | TooManyProcesses):
                    with suppress(AtollError):
                        await self._destroy_sandbox()  # it is made anew next time, and `/workspace` stays
                await self._fail(error)
            raise
        self._used_at = anyio.current_time()
        if self._idle is None or self._idle.done():
            self._idle = asyncio.create_task(self._sleep_when_unused())
        ready = {"ready_at": datetime.now(UTC), "ended_at": None, "reason": None, "message": None}
        return await self._note(state="running", **ready)

    async def _existing(self) -> Sandbox | None:
        """The sandbox that was made of this spec, running. One that was made of another is destroyed."""
        try:
            sandbox = await self.engine.get(self.spec.sandbox)
        except SandboxNotFound:
            return None
        if sandbox.info.labels.get(SPEC_LABEL) != self.spec.fingerprint():
            await self._destroy_sandbox()
            return None
        if await sandbox.status() in {"sleeping", "error"}:
            sandbox = await self.engine.wake(self.spec.sandbox)
        if sandbox.info.network != self.spec.network:
            await self.engine.set_network(self.spec.sandbox, self.spec.network)
        wanted = self._limits
        if sandbox.info.limits != wanted:
            try:
                async with nullcontext() if self._admit is None else self._admit(self.spec.sandbox, wanted):
                    await self.engine.update(self.spec.sandbox, limits=wanted)
            except Unenforceable:  # not while it runs
                await self._destroy_sandbox()
                return None
        return sandbox

    async def _make(self, bundle: BundleFile) -> None:
        spec = self.spec
        await verify(bundle.path, bundle.sha256)
        source = BuildSpec(
            path=bundle.path,
            sha256=bundle.sha256,
            image=spec.image or self.engine.default_image,
            runtime=self._runtime,
            limits=spec.build_limits,
            network=spec.build_network,
        )
        label = await building.label_of(self.engine, source)
        sandbox, has_new_volume = None, False
        try:
            while sandbox is None:
                try:
                    sandbox = await self._create(label)
                except CheckpointNotFound:
                    await building.build(self.engine, source, label, self._take_output, admit=self._admit)
                except VolumeNotFound:
                    has_new_volume = await self._make_volume(bundle)
            await self._start(bundle, sandbox)
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(AtollError):
                if sandbox is not None:
                    await self._destroy_sandbox()
                if has_new_volume:  # another bundle may have another template
                    await self.engine.volumes.remove(spec.sandbox)
            raise

    async def _make_volume(self, bundle: BundleFile) -> bool:
        """Make the volume of `/workspace`, with the bundle's template, whole or not at all. False: there is one."""
        name, size_bytes = self.spec.sandbox, self._limits.disk_bytes
        with tempfile.TemporaryFile(dir=self.engine.state_dir) as file:
            async for piece in building.chunks(repack(bundle.path, bundle.sha256, below="template", owner=_USER_ID)):
                await anyio.to_thread.run_sync(file.write, piece)
            file.flush()
            try:
                async with nullcontext() if self._admit_volume is None else self._admit_volume(name, size_bytes):
                    if file.tell() > TAR_END_BYTES:
                        await self.engine.volumes.import_(name, f"/proc/self/fd/{file.fileno()}", size_bytes)
                    else:  # there is no template; unpacking nothing takes 10 to 30 ms
                        await self.engine.volumes.create(name, size_bytes)
            except VolumeExists:  # of another process
                return False
        return True

    async def _create(self, label: str) -> Sandbox:
        spec = self.spec
        limits = self._limits
        own = {SPEC_LABEL: spec.fingerprint(), INSTANCE_LABEL: self._instance.external_id if self._instance else ""}
        async with nullcontext() if self._admit is None else self._admit(spec.sandbox, limits):
            return await self.engine.create(
                spec.sandbox,
                limits=limits,
                env=spec.environment,
                secrets=spec.secrets,
                secret_env=spec.secret_env,
                user="user",
                cwd=WORKSPACE,
                network=spec.network,
                labels={**spec.labels, **own},
                ttl_s=spec.sleep_after_s,
                on_expiry="sleep",
                ttl_renewed_by_use=True,
                mounts=[Mount(source=VOLUME_PREFIX + spec.sandbox, target=WORKSPACE)],
                from_checkpoint=label,
            )

    async def _start(self, bundle: BundleFile, sandbox: Sandbox) -> None:
        python = f"{VENV}/bin/python" if bundle.manifest.requirements else "python3"
        self._dispatcher = await Dispatcher.start(
            sandbox, bundle.manifest.tools, python=python, on_output=self._take_output
        )

    # --------------------------------------------------------------------------------------------------- instances

    async def _begin(self) -> None:
        """A new instance, before anything is made for it."""
        if self._instance is not None and self._instance.ended_at is None:
            was = "its process was interrupted" if self._instance.state == "provisioning" else "its sandbox is gone"
            ended = "failed" if self._instance.state == "provisioning" else "destroyed"
            await self._note(state=ended, message=was, ended_at=datetime.now(UTC))
        self._log.clear()
        made = WorkspaceInstance(
            external_id=f"wsi_{os.urandom(10).hex()}", state="provisioning", created_at=datetime.now(UTC)
        )
        self._instance = made
        await self._note()

    def _go_on_with(self, info: SandboxInfo) -> None:
        """Take up the instance of a sandbox that an earlier process has made."""
        known = info.labels.get(INSTANCE_LABEL) or f"wsi_{info.id}"
        if self._instance is None or self._instance.external_id != known:
            self._instance = WorkspaceInstance(external_id=known, state="provisioning", created_at=info.created_at)

    async def _fail(self, error: BaseException) -> None:
        reason = error.reason if isinstance(error, BundleFailed) else None
        message = told_elsewhere(error) if isinstance(error, AtollError) else "the boot was interrupted"
        self._take_output(f"{message}\n".encode())
        try:
            await self._note(state="failed", reason=reason, message=message, ended_at=datetime.now(UTC))
        except AtollError:
            _log.exception("the failure of workspace %s could not be recorded", self.spec.sandbox)

    async def _note(self, **changes: Any) -> WorkspaceInstance:
        """Record the instance with these changes."""
        if self._instance is None:
            raise AssertionError("a boot has begun")
        log = self._log.decode("utf-8", "replace")
        self._instance = WorkspaceInstance.model_validate({**self._instance.model_dump(), **changes, "log": _tail(log)})
        self._unrecorded, self._recorded_at = False, anyio.current_time()
        await self._record(self._instance)
        return self._instance

    def _take_output(self, data: bytes) -> None:
        self._log += data
        del self._log[: max(0, len(self._log) - MAX_LOG_BYTES)]
        self._unrecorded = True

    # --------------------------------------------------------------------------------------------------------- end

    async def record_output(self) -> None:
        """Record what tools have printed since the last time. While they print, that is done about once per second."""
        if self._unrecorded and self._instance is not None and not self._booting.locked():
            await self._note()

    async def refresh(self) -> WorkspaceInstance | None:
        """Look whether the sandbox runs or sleeps, and record it if that has changed; and what tools have printed."""
        await self.record_output()
        if self._instance is None or self._instance.ended_at is not None or self._booting.locked():
            return self._instance
        found = [each for each in await self.engine.list(self.spec.sandbox) if each.name == self.spec.sandbox]
        state: WorkspaceState = _STATES[found[0].status] if found else "destroyed"
        if self._instance.state in {"provisioning", state}:
            return self._instance
        ended = datetime.now(UTC) if state == "destroyed" else None
        return await self._note(state=state, ended_at=ended)

    async def _sleep_when_unused(self) -> None:
        """Put the sandbox to sleep once it has not been used for long enough. Its keeper would do so too, but not while
        the dispatcher runs."""
        is_asleep = False
        while not is_asleep:
            await anyio.sleep(max(self._unused_left_s(), 0.05))
            async with self._booting:
                if self._unused_left_s() > 0:
                    continue
                try:
                    await self._end_dispatcher()
                    await self.engine.sleep(self.spec.sandbox)
                    await self._note(state="sleeping")
                except AtollError as error:  # it is gone, or its runtime cannot save what it holds
                    _log.warning("workspace %s was not put to sleep: %s", self.spec.sandbox, error.message)
                is_asleep = True

    def _unused_left_s(self) -> float:
        """How long it may still be unused."""
        used_at = anyio.current_time() if self._calls else self._used_at
        return used_at + self.spec.sleep_after_s - anyio.current_time()

    async def _end_dispatcher(self) -> None:
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            await dispatcher.aclose()

    async def destroy(self) -> None:
        """End the sandbox, or its boot, and remove it with its files. Does nothing if there is none."""
        await self._stop_idling()
        self._boot_scope.cancel()
        async with self._booting:
            await self._destroy_sandbox()
            with suppress(VolumeNotFound):
                await self.engine.volumes.remove(self.spec.sandbox)
            if self._instance is not None and self._instance.ended_at is None:
                await self._note(state="destroyed", ended_at=datetime.now(UTC))

    async def _destroy_sandbox(self) -> None:
        await self._end_dispatcher()
        with suppress(SandboxNotFound):
            await self.engine.destroy(self.spec.sandbox)

    async def _stop_idling(self) -> None:
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.cancel()
            await asyncio.gather(idle, return_exceptions=True)

    async def aclose(self) -> None:
        """Let go of the sandbox, which goes on and sleeps when it has not been used for a while. Does not raise."""
        await self._stop_idling()
        async with self._booting:
            await self._end_dispatcher()


def _tail(text: str) -> str:
    """The end of a text, of at most `MAX_LOG_BYTES` in UTF-8."""
    return text.encode()[-MAX_LOG_BYTES:].decode("utf-8", "ignore")
