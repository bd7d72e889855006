"""The engine of a server: `connect`, and `RemoteEngine`, which asks a server for what `LocalEngine` does itself.

Owns how each public method becomes requests, and what a server cannot be asked for. Its sandboxes are the usual ones
(`runtime/sandbox.py`), reached through tunnels (`sandboxes.py`). Not here: what the methods promise (`Engine` in
`runtime/interface.py`), images and volumes (`stores.py`), templates and builds (`builds.py`), requests (`http.py`).
Used by programs, and by the command line where ATOLL_URL is set.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

import anyio
import anyio.lowlevel

from atoll.client.builds import RemoteBuilds, RemoteTemplates
from atoll.client.failures import error_of
from atoll.client.http import HttpClient, new_key, path_of
from atoll.client.sandboxes import RemoteSandboxes
from atoll.client.stores import RemoteImages, RemoteVolumes, events_of
from atoll.client.transfer import read_chunks, written_file
from atoll.client.tunnel import Fact, Tunnel, open_tunnel
from atoll.contract.driver import Capabilities, Diagnostic
from atoll.contract.errors import (
    AtollError,
    CheckpointNotFound,
    InvalidRequest,
    OutcomeUnknown,
    RuntimeUnavailable,
    SandboxNotFound,
    ServerUnavailable,
)
from atoll.contract.frozen import Frozen
from atoll.contract.model import (
    Checkpoint,
    ExportResult,
    GcResult,
    Limits,
    Mount,
    OnExpiry,
    RuntimeName,
    SandboxInfo,
    WarmPool,
    check_labels,
)
from atoll.contract.names import DEFAULT_NAMESPACE, TEMPLATE_PREFIX, check_name
from atoll.contract.network import AuditRecord, NetworkPolicy
from atoll.runtime.interface import Engine, SandboxKeywords
from atoll.runtime.lifecycle.warm_pool import check_count
from atoll.runtime.lifetimes import AwaitableContext, BackgroundTasks
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.state.spec import validate_spec, with_defaults
from atoll.settings import Settings

if TYPE_CHECKING:
    from pydantic import SecretStr

    from atoll.contract.secret import Secret
    from atoll.runtime.archive.export import ArchiveFile
    from atoll.runtime.images.fetch import ProgressCallback
    from atoll.runtime.sandbox_pool import SandboxPool
    from atoll.runtime.state.loop_storage import LoopStorage

_RECEIVE_BYTES = 1024 * 1024
UNDO_S = 60.0
"""How long a create that was cancelled may take to be undone."""
_UNDO_PAUSE_S = 1.0


def connect(
    url: str | None = None,
    key: str | SecretStr | None = None,
    *,
    tenant: str | None = None,
    trust: ssl.SSLContext | None = None,
    settings: Settings | None = None,
) -> AwaitableContext[Engine]:
    """The engine of a server (`atoll serve`), with the interface of the one that `atoll.open()` gives.

    `url` and `key` unset: those of ATOLL_URL and ATOLL_API_KEY. `tenant` is for a key of the server itself: whose
    sandboxes these are; unset, the namespace of the settings. `trust` verifies the server's certificate; unset, by the
    certificate authorities that this machine trusts. Closing the engine leaves the sandboxes as they are.

    Paths of `mounts` are directories of the server's machine, which its operator has to allow. Files are copied, and
    ports forwarded, to and from this machine.

    Raises:
        InvalidRequest: there is no address or no key, or they are malformed.
        Unauthenticated: the server does not accept the key.
        ServerUnavailable: the server cannot be reached.
    """
    return AwaitableContext(_connect(url, key, tenant, trust, settings))


async def _connect(
    url: str | None,
    key: str | SecretStr | None,
    tenant: str | None,
    trust: ssl.SSLContext | None,
    settings: Settings | None,
) -> RemoteEngine:
    settings = settings or Settings.from_environment()
    http = http_client(url, key, tenant=tenant, trust=trust, settings=settings)
    try:
        host = await http.get(path_of("host"))
        tasks = await BackgroundTasks.open()
    except BaseException:
        await http.aclose()
        raise
    return RemoteEngine(http, tasks, settings, host)


def http_client(
    url: str | None = None,
    key: str | SecretStr | None = None,
    *,
    tenant: str | None = None,
    trust: ssl.SSLContext | None = None,
    settings: Settings | None = None,
) -> HttpClient:
    """What `connect` sends requests with. Nothing is sent yet.

    Raises:
        InvalidRequest: as `connect`.
    """
    from pydantic import SecretStr

    settings = settings or Settings.from_environment()
    url = url or settings.url
    if url is None:
        raise InvalidRequest("there is no server to connect to: give its address, or set ATOLL_URL")
    key = key or settings.api_key
    if key is None:
        raise InvalidRequest("there is no key for the server: give one, or set ATOLL_API_KEY")
    if trust is None and settings.ca_file is not None:
        trust = _trust(settings.ca_file)
    if tenant is None and settings.namespace != DEFAULT_NAMESPACE:
        tenant = settings.namespace
    return HttpClient(url, SecretStr(key) if isinstance(key, str) else key, tenant=tenant, trust=trust)


def _trust(file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        raise InvalidRequest(
            f"the certificates {file} cannot be read: {error}; name others with ATOLL_CA_FILE"
        ) from error


class RemoteEngine(Engine):
    """The sandboxes of a tenant of a server. Made by `atoll.connect()`."""

    def __init__(self, http: HttpClient, tasks: BackgroundTasks, settings: Settings, host: Mapping[str, Any]) -> None:
        self._http = http
        self._tasks = tasks
        self._settings = settings
        self._sandboxes = RemoteSandboxes(self, http, tasks)
        self._images = RemoteImages(http)
        self._volumes = RemoteVolumes(http)
        self._templates = RemoteTemplates(http)
        self._builds = RemoteBuilds(http)
        self._default_image = str(host["image"])
        self._default_runtime: RuntimeName | None = host.get("runtime")
        self._namespace = str(host["tenant"])
        self._runtimes: dict[RuntimeName, Capabilities] = {
            each["name"]: Capabilities.model_validate(each["capabilities"]) for each in host["runtimes"]
        }

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._http.url

    async def upload_bundle(self, path: Path) -> dict[str, Any]:
        """Upload a bundle of tools, and return what the server calls it: `bundle_id`, `sha256` and `size_bytes`.

        Raises:
            BundleFailed: it is no bundle.
        """
        content = read_chunks(path, lambda _done: None)
        gzip = {"Content-Type": "application/gzip"}
        async with self._http.stream("POST", path_of("bundles"), content=content, headers=gzip) as answer:
            stored: dict[str, Any] = json.loads(await answer.aread())
            return stored

    @property
    def images(self) -> RemoteImages:
        return self._images

    @property
    def volumes(self) -> RemoteVolumes:
        return self._volumes

    @property
    def templates(self) -> RemoteTemplates:
        return self._templates

    @property
    def builds(self) -> RemoteBuilds:
        """Builds of templates by the server."""
        return self._builds

    @property
    def storage(self) -> LoopStorage:
        self._elsewhere("its storage", "atoll storage")

    @property
    def state_dir(self) -> Path:
        return self._settings.resolve_state_dir()

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def default_image(self) -> str:
        return self._own_image() or self._default_image

    @property
    def default_runtime(self) -> RuntimeName:
        chosen = self._settings.runtime or self._default_runtime
        if chosen is None:
            raise RuntimeUnavailable("the server's machine has no container runtime that can be used")
        return chosen

    def runtimes(self) -> Mapping[RuntimeName, Capabilities]:
        return self._runtimes

    def doctor(self) -> builtins.list[Diagnostic]:
        self._elsewhere("what it can do", "atoll doctor")

    def _elsewhere(self, what: str, command: str) -> NoReturn:
        raise InvalidRequest(
            f"the sandboxes are those of {self.url}, and clients are not shown {what}; run '{command}' on that "
            "machine, without ATOLL_URL"
        )

    def effective_limits(self, limits: Limits, runtime: RuntimeName | None = None) -> Limits:
        wanted = runtime or self._settings.runtime
        able = self._runtimes.get(wanted) if wanted is not None else None
        if wanted is None:
            able = next((each for each in self._runtimes.values() if each.chosen_by_default), None)
        if able is None:
            what = f"the runtime {wanted}" if wanted else "a container runtime"
            usable = ", ".join(self._runtimes) or "none"
            raise RuntimeUnavailable(f"{what} cannot be used on the server's machine (usable: {usable})")
        return with_defaults(limits, able)

    # ---- creating ----

    def create(  # noqa: PLR0913 - the options of a sandbox, by keyword
        self,
        name: str | None = None,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, Secret] | None = None,
        secret_env: Mapping[str, str | SecretStr] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        runtime: RuntimeName | None = None,
        ephemeral: bool = False,
        pause_after_s: float | None = None,
        sudo: bool = False,
        network: NetworkPolicy | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        on_expiry: OnExpiry = "destroy",
        ttl_renewed_by_use: bool = False,
        mounts: Sequence[Mount] = (),
        from_checkpoint: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> AwaitableContext[Sandbox]:
        body: dict[str, object] = {
            "name": f"sandbox-{os.urandom(4).hex()}" if name is None else name,
            "limits": _plain(limits),
            "env": dict(env or {}),
            "user": user,
            "cwd": cwd,
            "ephemeral": ephemeral,
            "pause_after_s": pause_after_s,
            "sudo": sudo,
            "network": _plain(network),
            "labels": dict(labels or {}),
            "ttl_s": ttl_s,
            "on_expiry": on_expiry,
            "ttl_renewed_by_use": ttl_renewed_by_use,
            "mounts": [_plain(each) for each in mounts],
            "from_checkpoint": from_checkpoint,
            "image": image,
            "runtime": runtime,
        }
        if from_checkpoint is None:
            body |= {"image": image or self._own_image(), "runtime": runtime or self._settings.runtime}

        async def making() -> Sandbox:
            spec = {name: value for name, value in body.items() if name != "from_checkpoint" and value is not None}
            validate_spec(**{"image": self.default_image, **spec})
            if secrets:
                body["secrets"] = {each: _secret(one) for each, one in secrets.items()}
            if secret_env:
                body["secret_env"] = {each: _clear(value) for each, value in secret_env.items()}
            wanted = image or self.default_image
            if progress is not None and from_checkpoint is None and not wanted.startswith(TEMPLATE_PREFIX):
                await self._images.resolve(wanted, progress=progress)
            made = await self._made(path_of("sandboxes"), body, undo=self._undo_create)
            sandbox = self._sandboxes.open(SandboxInfo.model_validate(made))
            if ephemeral:  # it ends with its last client, which is this one
                await sandbox.connect()
            return sandbox

        return AwaitableContext(making())

    async def check_options(self, options: SandboxKeywords) -> None:
        given = {name: value for name, value in options.items() if value is not None and "secret" not in name}
        defaults = {"image": self.default_image, "runtime": self._settings.runtime}
        spec = validate_spec(**{**defaults, **given, "name": "sandbox"})
        self.effective_limits(spec.limits, spec.runtime)
        # What only the server's machine can tell: its directories, its volumes, and what its operator allows.
        body = {"image": self._own_image(), "runtime": self._settings.runtime, **given}
        wanted = {each: _plain(value) for each, value in _given(body).items()}
        await self._http.post(path_of("sandboxes", "check"), wanted)

    def _own_image(self) -> str | None:
        """The image that the settings of this program name. None: the server's default."""
        return None if self._settings.image == Settings().image else self._settings.image

    async def _made(self, path: str, body: Mapping[str, object], *, undo: Any) -> Any:
        """Send a request that makes something, with an `Idempotency-Key`. If this is cancelled, or the server is away
        for too long, `undo` is given the answer that it would have had: nothing is left.

        Raises:
            ServerUnavailable: it is away, and nothing was made.
            OutcomeUnknown: it is away for longer than `UNDO_S`, and may have made it.
        """
        key = new_key()
        given = _given(body)
        try:
            return await self._http.post(path, given, key=key)
        except anyio.get_cancelled_exc_class():
            await self._undone(path, given, key, undo)
            raise
        except ServerUnavailable as error:
            if not error.details.get("sent", True) or await self._undone(path, given, key, undo):
                raise
            raise OutcomeUnknown(
                "the server went away while it carried this request out, and it is not known how far it came; look at "
                "the state when it is back, and ask for what is missing"
            ) from error

    async def _undone(self, path: str, body: Mapping[str, object], key: str, undo: Any) -> bool:
        """Whether nothing is left of a request. A server that is away is waited for, for `UNDO_S`."""
        with anyio.move_on_after(UNDO_S, shield=True):
            while True:
                try:
                    await undo(await self._http.post(path, body, key=key))
                except OutcomeUnknown:
                    return False
                except AtollError as error:
                    if error.retryable:
                        await anyio.sleep(_UNDO_PAUSE_S)
                        continue
                return True  # or it was refused, or what it made is gone
        return False

    async def _undo_create(self, made: Mapping[str, Any]) -> None:
        await self.destroy_id(made["id"])

    async def warm(
        self,
        count: int,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        runtime: RuntimeName | None = None,
    ) -> WarmPool:
        check_count(count)
        body = {
            "count": count,
            "image": image or self._own_image(),
            "limits": _plain(limits),
            "runtime": runtime or self._settings.runtime,
        }
        given = _given(body)
        return WarmPool.model_validate((await self._http.send("PUT", path_of("warm-pools"), given)).json())

    async def warm_pools(self) -> builtins.list[WarmPool]:
        return [WarmPool.model_validate(each) for each in await self._http.items(path_of("warm-pools"))]

    async def remove_warm_pools(self) -> None:
        await self._http.send("DELETE", path_of("warm-pools"))

    async def wait_refilled(self) -> None:
        await anyio.lowlevel.checkpoint()  # the server refills them

    async def update(
        self,
        name: str,
        *,
        labels: Mapping[str, str | None] | None = None,
        ttl_s: float | None = None,
        on_expiry: OnExpiry | None = None,
        ttl_renewed_by_use: bool | None = None,
        limits: Limits | None = None,
    ) -> SandboxInfo:
        check_labels({key: value or "" for key, value in (labels or {}).items()})
        lifetime = {"on_expiry": on_expiry, "ttl_renewed_by_use": ttl_renewed_by_use}
        body: dict[str, object] = {"labels": dict(labels or {})}
        body |= _given(lifetime)
        if ttl_s is not None:
            body["ttl_s"] = None if ttl_s == math.inf else ttl_s
        given = {each: value for each, value in (labels or {}).items() if value is not None}
        validate_spec(
            name="sandbox", image=self.default_image, labels=given, ttl_s=body.get("ttl_s"), **_given(lifetime)
        )
        if limits is not None:
            body["limits"] = _plain(limits)
        async with self._named(name):
            answer = await self._http.send("PATCH", path_of("sandboxes", name), body)
        info = SandboxInfo.model_validate(answer.json())
        self._sandboxes.renew(info)
        return info

    # ---- sleeping and waking ----

    async def _do(self, name: str, verb: str) -> SandboxInfo:
        return (await self._ask_to(name, verb, {}))[0]

    async def _ask_to(
        self, name: str, verb: str, params: Mapping[str, object]
    ) -> tuple[SandboxInfo, Mapping[str, str]]:
        """The sandbox afterwards, and the headers of the answer."""
        async with self._named(name):
            answer = await self._http.send("POST", path_of("sandboxes", name, verb), params=params)
        info = SandboxInfo.model_validate(answer.json())
        self._sandboxes.renew(info)
        return info, answer.headers

    async def pause(self, name: str) -> None:
        await self._do(name, "pause")

    async def resume(self, name: str) -> Sandbox:
        return self._sandboxes.open(await self._do(name, "resume"))

    async def sleep(self, name: str) -> None:
        await self._sandboxes.disconnect((await self._do(name, "sleep")).id)

    async def shutdown(self, name: str) -> None:
        await self._sandboxes.disconnect((await self._do(name, "shutdown")).id)

    async def sleep_unused(self, name: str, after: timedelta) -> bool:
        info, headers = await self._ask_to(name, "sleep", {"unused_for_s": after.total_seconds()})
        if headers.get("Atoll-Slept") != "true":  # its status does not tell: it may be paused for it, or have slept
            return False
        await self._sandboxes.disconnect(info.id)
        return True

    async def wake(self, name: str) -> Sandbox:
        info = await self._do(name, "wake")
        self._sandboxes.restarted(info.id)
        return self._sandboxes.open(info)

    @contextlib.asynccontextmanager
    async def _leased(self, pool: SandboxPool, temporary: bool, sleeps: bool) -> AsyncIterator[None]:
        query = f"?temporary={str(temporary).lower()}&sleeps={str(sleeps).lower()}"
        path = path_of("sessions", pool.session_id) + query
        async with self._socket(path, lambda _fact: None) as lease:
            try:
                yield
            finally:
                # The server answers a message when it has done what the end of the session asks for.
                with (
                    anyio.CancelScope(shield=True),
                    contextlib.suppress(anyio.BrokenResourceError, anyio.EndOfStream),
                ):
                    await lease.send(b"end")
                    await lease.receive()

    def _session(self, pool: SandboxPool, *, temporary: bool, sleeps: bool) -> AbstractAsyncContextManager[None]:
        return self._leased(pool, temporary, sleeps)

    # ---- the network ----

    async def set_network(self, name: str, policy: NetworkPolicy | None) -> None:
        async with self._named(name):
            await self._http.send("PUT", path_of("sandboxes", name, "network"), {"policy": _plain(policy)})
        self._sandboxes.renew(await self._info(name))

    async def audit(self, name: str) -> builtins.list[AuditRecord]:
        async with self._named(name):
            found = await self._http.items(path_of("sandboxes", name, "network", "audit"))
        return [AuditRecord.model_validate(each) for each in found]

    async def follow_audit(self, name: str) -> AsyncIterator[AuditRecord]:
        async with self._named(name):
            async for _, data in events_of(self._http, "GET", path_of("sandboxes", name, "network", "audit")):
                yield AuditRecord.model_validate(data)

    # ---- checkpoints ----

    async def checkpoint(self, name: str, label: str | None = None, *, move: bool = False) -> Checkpoint:
        body = {"label": label, "move": move}
        async with self._named(name):
            made = await self._made(path_of("sandboxes", name, "checkpoints"), body, undo=self._undo_checkpoint)
        return Checkpoint.model_validate(made)

    async def _undo_checkpoint(self, made: Mapping[str, Any]) -> None:
        await self._http.send("DELETE", path_of("checkpoints", made["id"]))

    async def checkpoints(self, name: str | None = None) -> builtins.list[Checkpoint]:
        if name is None:
            return [Checkpoint.model_validate(each) for each in await self._http.items(path_of("checkpoints"))]
        try:
            found = await self._http.items(path_of("sandboxes", name, "checkpoints"))
        except SandboxNotFound:
            former = [each for each in await self.checkpoints() if each.sandbox == name]
            if not former:
                raise SandboxNotFound(name, await self._names()) from None
            return former
        return [Checkpoint.model_validate(each) for each in found]

    async def restore(self, name: str, checkpoint: str, *, foreign: bool = False) -> Sandbox:
        body = {"checkpoint": checkpoint, "foreign": foreign}
        async with self._named(name, checkpoint):
            if not checkpoint:
                raise CheckpointNotFound(checkpoint, {})
            info = SandboxInfo.model_validate(await self._http.post(path_of("sandboxes", name, "restore"), body))
        await self._sandboxes.disconnect(info.id)
        self._sandboxes.restarted(info.id)
        return self._sandboxes.open(info)

    async def fork(
        self, source: str, count: int = 1, *, checkpoint: str | None = None, names: Sequence[str] | None = None
    ) -> builtins.list[Sandbox]:
        names = names or [f"{source[:50]}-{os.urandom(4).hex()}" for _ in range(count)]
        body = {"count": count, "names": list(names), "checkpoint": checkpoint}
        async with self._named(source, checkpoint):
            try:
                made = await self._made(path_of("sandboxes", source, "fork"), body, undo=self._undo_fork)
            except SandboxNotFound:
                if checkpoint is None:
                    raise
                return await self._fork_former(source, checkpoint, names)
        return [self._sandboxes.open(SandboxInfo.model_validate(each)) for each in made["items"]]

    async def _undo_fork(self, made: Mapping[str, Any]) -> None:
        for each in made["items"]:
            with contextlib.suppress(SandboxNotFound):
                await self.destroy_id(each["id"])

    async def _fork_former(self, source: str, checkpoint: str, names: Sequence[str]) -> builtins.list[Sandbox]:
        """Of a sandbox that was destroyed, whose checkpoints there are. All of them, or none."""
        found = await self._find(checkpoint, source)
        forks: builtins.list[Sandbox] = []
        try:
            for name in names:
                forks.append(await self.create(name, from_checkpoint=found.id))  # noqa: PERF401 - those made are undone
        except BaseException:
            with anyio.CancelScope(shield=True):
                for fork in forks:
                    await fork.destroy()
            raise
        return forks

    async def delete_checkpoint(self, checkpoint: str, *, sandbox: str | None = None) -> None:
        found = await self._find(checkpoint, sandbox)
        try:
            await self._http.send("DELETE", path_of("checkpoints", found.id), key=new_key())
        except CheckpointNotFound:
            raise await self._no_checkpoint(checkpoint, sandbox) from None

    async def _find(self, wanted: str, sandbox: str | None) -> Checkpoint:
        """As `Checkpoints.find`: by its id, whosever it is, or by its label."""
        known = await self.checkpoints()
        for each in known:
            if each.id == wanted:
                return each
        own = known if sandbox is None else await self.checkpoints(sandbox)
        labelled = [each for each in own if each.label == wanted]
        if len({each.sandbox_id for each in labelled}) > 1:
            these = ", ".join(f"{each.id} of {each.sandbox!r}" for each in labelled[:8])
            raise InvalidRequest(f"several checkpoints have the label {wanted!r}: {these}; use the id of one")
        if not labelled:
            raise await self._no_checkpoint(wanted, sandbox)
        return labelled[-1]

    async def _no_checkpoint(self, wanted: str, sandbox: str | None) -> CheckpointNotFound:
        known = await self.checkpoints()
        own = {each.id for each in (known if sandbox is None else await self.checkpoints(sandbox))}
        mine = {each.id: each.label for each in known if each.id in own}
        return CheckpointNotFound(wanted, mine | {each.id: None for each in known if each.id not in own})

    # ---- other machines ----

    async def export(
        self, name: str, target: ArchiveFile, *, checkpoint: str | None = None, progress: ProgressCallback | None = None
    ) -> ExportResult:
        told: dict[str, Any] = {}
        query = "" if checkpoint is None else f"?checkpoint={quote(checkpoint, safe='')}"
        async with (
            self._named(name, checkpoint),
            self._socket(path_of("sandboxes", name, "archive") + query, told.update) as archive,
            written_file(target) as file,
        ):
            size = await file.write_all(_until_end(archive), partial(_report, progress, f"exporting {name}"))
            if "error" in told:
                raise error_of(500, json.dumps(told["error"]).encode())
            if "result" not in told:
                raise ServerUnavailable("the server went away before the archive was complete")
        result = ExportResult.model_validate(told["result"])
        return result.model_copy(update={"size_bytes": size if isinstance(target, Path | str) else None})

    @contextlib.asynccontextmanager
    async def _socket(self, path: str, on_fact: Callable[[Fact], None]) -> AsyncIterator[Tunnel]:
        tunnel = await open_tunnel(self._http.websocket_url(path), self._http.headers, self._http.trust, on_fact)
        try:
            yield tunnel
        finally:
            with anyio.CancelScope(shield=True):
                await tunnel.aclose()

    async def import_(
        self,
        source: ArchiveFile,
        name: str | None = None,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        runtime: RuntimeName | None = None,
        limit_bytes: int | None = None,
        progress: ProgressCallback | None = None,
    ) -> Sandbox:
        options = {
            "name": name,
            "image": image,
            "runtime": runtime or self._settings.runtime,
            "limit_bytes": limit_bytes,
            **(_plain(limits) or {}),
        }
        content = read_chunks(source, partial(_report, progress, "importing"))
        async with self._http.stream("POST", path_of("sandboxes", "import"), params=options, content=content) as answer:
            info = SandboxInfo.model_validate(json.loads(await answer.aread()))
        return self._sandboxes.open(info)

    # ---- finding ----

    async def get(self, name: str) -> Sandbox:
        async with self._named(name):
            return self._sandboxes.open(await self._info(name))

    async def _info(self, name: str) -> SandboxInfo:
        return SandboxInfo.model_validate(await self._http.get(path_of("sandboxes", name)))

    async def list(
        self, prefix: str = "", *, labels: Mapping[str, str | None] | None = None
    ) -> builtins.list[SandboxInfo]:
        wanted = [key if value is None else f"{key}={value}" for key, value in (labels or {}).items()]
        found = await self._http.items(path_of("sandboxes"), prefix=prefix or None, label=wanted or None)
        return [SandboxInfo.model_validate(each) for each in found]

    async def _names(self) -> builtins.list[str]:
        return [each.name for each in await self.list()]

    @contextlib.asynccontextmanager
    async def _named(self, name: str, checkpoint: str | None = None) -> AsyncIterator[None]:
        """Around a request for a sandbox: an error says which there are, which the server's answer does not.

        Raises:
            InvalidRequest: no sandbox can have this name.
        """
        check_name(name)
        try:
            yield
        except SandboxNotFound:
            raise SandboxNotFound(name, await self._names()) from None
        except CheckpointNotFound:
            if checkpoint is None:
                raise
            raise await self._no_checkpoint(checkpoint, name) from None

    async def unreadable_records(self) -> dict[str, str]:
        found: builtins.list[SandboxInfo | Checkpoint] = [*await self.list(), *await self.checkpoints()]
        return {each.id: each.reason for each in found if each.runtime == "unknown" and each.reason is not None}

    # ---- ending ----

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._tasks.close()
        finally:
            with anyio.CancelScope(shield=True):
                await self._http.aclose()

    async def destroy(self, name: str, *, checkpoints: bool = False) -> int:
        async with self._named(name):
            return await self.destroy_id(name, checkpoints=checkpoints)

    async def destroy_id(self, name: str, *, checkpoints: bool = False) -> int:
        """`destroy`, with the server's own error. Of a sandbox that was given by its id, no other is destroyed."""
        params = {"checkpoints": checkpoints}
        answer = await self._http.send("DELETE", path_of("sandboxes", name), key=new_key(), params=params)
        if (id := answer.headers.get("Atoll-Sandbox")) is not None:
            await self._sandboxes.forget(id)
        return int(answer.headers.get("Atoll-Checkpoints", "0"))

    async def remove_abandoned(self) -> builtins.list[str]:
        result = GcResult.model_validate(await self._http.post(path_of("gc"), abandoned_only=True))
        return [*result.sandboxes]

    async def gc(self) -> GcResult:
        return GcResult.model_validate(await self._http.post(path_of("gc")))


async def _until_end(tunnel: Tunnel) -> AsyncIterator[bytes]:
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            yield await tunnel.receive(_RECEIVE_BYTES)


def _report(progress: ProgressCallback | None, what: str, done: int) -> None:
    if progress is not None:
        progress(what, done, None)


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _plain(value: Any) -> Any:
    """As JSON has it. A model without what is unset."""
    if isinstance(value, Frozen):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _secret(secret: Secret) -> dict[str, object]:
    return {"value": _clear(secret.value), "hosts": list(secret.hosts), "header": secret.header}


def _clear(value: str | SecretStr) -> str:
    return value if isinstance(value, str) else value.get_secret_value()
