"""A sandbox pool: the sandboxes of one session, created when first used and put to sleep when unused.

Owns which names belong to a session, and for how long each sandbox may be unused. Not here: how a sandbox is created,
sleeps or wakes (`engine.py`, `lifecycle/`), and how many processes have a session open (`state/leases.py`). Used by
`Engine.pool`, `tools/` and `surfaces/mcp/`.

The sandbox `name` of a session is the engine's sandbox `session.name`. Session ids have no dot in them, so the
sandboxes of two sessions cannot have the same name.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import anyio

from atoll.contract.errors import AtollError, CheckpointNotFound, InvalidRequest, SandboxExists, SandboxNotFound
from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits, RuntimeName, Status
from atoll.contract.names import is_name
from atoll.contract.network import NetworkPolicy
from atoll.runtime.engine import Engine
from atoll.runtime.images.contents import ImageContents
from atoll.runtime.provisioning import DEFAULT_USER
from atoll.runtime.sandbox import Sandbox

if TYPE_CHECKING:
    from pydantic import SecretStr

    from atoll.contract.secret import Secret
    from atoll.tools.tool import ToolSet

DEFAULT = "default"
SLEEP_AFTER_S = 600.0
SESSION_RULE = "1 to 32 characters: lower-case letters, digits, '-' and '_', beginning with a letter or a digit"
_SESSION = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
NAME_RULE = "1 to 30 characters: lower-case letters, digits, '-', '_' and '.', beginning with a letter or a digit"
"""For the names of sandboxes in a session: the engine's names have the session's id in them too."""
_MAX_NAME_CHARACTERS = 30
_MAX_SLEEP_AFTER_S = 1e8
_CHECKS = 4
"""How often `reap` looks for unused sandboxes within the shortest time that one may be unused."""
_MIN_CHECK_S = 0.05
"""The shortest time between two checks."""
_log = logging.getLogger(__name__)


class PooledSandbox(Frozen):
    """A sandbox of a session, as `SandboxPool.list` shows it."""

    name: str
    id: str
    image: str
    status: Status
    created_at: datetime
    last_used_at: datetime | None
    """When it was last used. Unset: it has not been used since it was created."""


class PoolDescription(Frozen):
    """What the sandboxes of a pool have and may do, as `SandboxPool.describe` says."""

    image: str
    os: str | None = None
    """The image's operating system. None: it is not known before the image is present."""
    programs: tuple[str, ...] = ()
    """Some of the programs that the image has. Empty: not known, likewise."""
    user: str
    """The user of commands that name none."""
    cwd: str | None = None
    """Where commands start. None: in the home directory of `user`."""
    limits: Limits
    network: NetworkPolicy | None
    secrets: tuple[str, ...]
    """The names of variables that hold placeholders of secrets."""


class SandboxPool:
    """Named sandboxes of one session. `Engine.pool` opens one: while it is open, unused sandboxes go to sleep.

    The pool's options are those of every sandbox, unless `get` or `create` override them for one. The sandboxes stay
    when the pool is closed: the session's next pool, in this process or another, finds them.
    """

    def __init__(
        self,
        engine: Engine,
        session_id: str,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, Secret] | None = None,
        secret_env: Mapping[str, str | SecretStr] | None = None,
        user: str | None = None,
        cwd: str | None = None,
        runtime: RuntimeName | None = None,
        pause_after_s: float | None = None,
        network: NetworkPolicy | None = None,
        sleep_after_s: float | None = SLEEP_AFTER_S,
    ) -> None:
        if not _SESSION.fullmatch(session_id):
            raise InvalidRequest(f"{session_id!r} is not a session id; allowed are {SESSION_RULE}")
        self.session_id = session_id
        self.image: str = image or engine.default_image
        """The image of sandboxes that do not name one."""
        self.user: str | None = user
        """The user of commands that name none. None: the image's, or `user`."""
        self.sleep_after_s: float | None = _check_sleep(sleep_after_s)
        self._sleep_after_s: dict[str, float | None] = {}
        """By name, for the sandboxes with a time of their own."""
        self._times_changed = anyio.Event()
        self._engine = engine
        self._limits, self._runtime, self._network, self._secrets = limits, runtime, network, secrets or {}
        self._cwd = cwd
        self._making: dict[str, anyio.Lock] = {}
        self._options: dict[str, object] = {
            "image": image,
            "limits": limits,
            "env": env,
            "secrets": secrets,
            "secret_env": secret_env,
            "user": user,
            "cwd": cwd,
            "runtime": runtime,
            "pause_after_s": pause_after_s,
            "network": network,
        }

    async def get(self, name: str = DEFAULT, **options: object) -> Sandbox:
        """The sandbox of this name, created now if it does not exist. Concurrent calls create one.

        `options` are those of `Engine.create`, over the pool's own; they are used only when the sandbox is created.

        Raises:
            InvalidRequest: the name is not allowed, or an option is wrong.
            and what `Engine.create` raises.
        """
        full = self._full_name(name)
        making = self._making.setdefault(name, anyio.Lock())
        if not making.locked():
            with contextlib.suppress(SandboxNotFound):
                return await self._engine.get(full)
        async with making:
            with contextlib.suppress(SandboxNotFound):
                return await self._engine.get(full)
            try:
                return await self._make(full, options)
            except SandboxExists:  # another process was faster
                return await self._engine.get(full)

    async def create(self, name: str, **options: object) -> Sandbox:
        """Create a sandbox. `options` as for `get`.

        Raises:
            SandboxExists: the session has one of this name.
            and what `Engine.create` raises.
        """
        full = self._full_name(name)
        async with self._making.setdefault(name, anyio.Lock()):
            try:
                return await self._make(full, options)
            except SandboxExists:
                raise SandboxExists(name) from None

    async def find(self, name: str = DEFAULT) -> Sandbox:
        """The existing sandbox of this name.

        Raises:
            SandboxNotFound: the session has none of this name.
        """
        full = self._full_name(name)
        try:
            return await self._engine.get(full)
        except SandboxNotFound:
            raise await self._unknown(name) from None

    async def fork(self, source: str, name: str, *, checkpoint: str | None = None) -> Sandbox:
        """A sandbox of the session that begins as `source` is now, or was at a checkpoint: its id, or its label.

        Raises:
            SandboxNotFound, CheckpointNotFound: there is none.
            SandboxExists: the session has one of this name.
        """
        full = self._full_name(name)
        found = await self.find(source)
        try:
            (made,) = await found.fork(checkpoint=checkpoint, names=[full])
        except SandboxExists:
            raise SandboxExists(name) from None
        return made

    async def describe(self) -> PoolDescription:
        """What sandboxes with the pool's options have and may do. Nothing is created, started or fetched."""
        limits = self._limits or Limits()
        contents = ImageContents(os=None, programs=())
        with contextlib.suppress(AtollError):  # what is wrong is said when a sandbox is created
            limits = self._engine.effective_limits(limits, self._runtime)
            contents = await self._engine.images.contents(self.image) or contents
        return PoolDescription(
            image=self.image,
            os=contents.os,
            programs=contents.programs,
            user=self.user or contents.user or DEFAULT_USER,
            cwd=self._cwd or contents.working_directory,
            limits=limits,
            network=self._network,
            secrets=tuple(self._secrets),
        )

    def tools(self) -> ToolSet:
        """The agent's tools for the sandboxes of this session, to be offered to a model."""
        from atoll.tools.pool import pool_tools

        return pool_tools(self)

    async def _make(self, full: str, options: Mapping[str, object]) -> Sandbox:
        return await self._engine.create(full, **{**self._options, **options})  # type: ignore[arg-type]

    async def _unknown(self, name: str) -> SandboxNotFound:
        return SandboxNotFound(name, [each.name for each in await self.list()])

    def sleep_after(self, name: str, seconds: float | None) -> None:
        """Set how long this sandbox may be unused in this pool, instead of the pool's time; None: for ever.

        Raises:
            InvalidRequest: the time is not above 0.
        """
        self._full_name(name)
        self._sleep_after_s[name] = _check_sleep(seconds)
        self._times_changed.set()

    async def list(self) -> list[PooledSandbox]:
        """The session's sandboxes, by name."""
        prefix = f"{self.session_id}."
        return [
            PooledSandbox(
                name=info.name.removeprefix(prefix),
                id=info.id,
                image=info.image,
                status=info.status,
                created_at=info.created_at,
                last_used_at=info.last_used_at,
            )
            for info in await self._engine.list(prefix)
        ]

    async def destroy(self, name: str = DEFAULT, *, checkpoints: bool = False) -> int:
        """End a sandbox and remove all of it, with `checkpoints` also those. Returns how many those were.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        full = self._full_name(name)
        try:
            found = [each.id for each in await self._engine.checkpoints(full)] if checkpoints else []
            await self._engine.destroy(full)
        except SandboxNotFound:
            raise await self._unknown(name) from None
        self._sleep_after_s.pop(name, None)
        for each in found:
            with contextlib.suppress(CheckpointNotFound):
                await self._engine.delete_checkpoint(each)
        return len(found)

    async def aclose(self) -> None:
        """Destroy all sandboxes of the session."""
        for each in await self.list():
            with contextlib.suppress(SandboxNotFound):
                await self.destroy(each.name)

    async def sleep(self) -> None:
        """Put the sandboxes of the session to sleep that are not in use at this moment."""
        for each in await self.list():
            if each.status in ("running", "paused"):
                await self._sleep_unused(each.name, 0)

    async def _sleep_unused(self, name: str, seconds: float) -> None:
        try:
            await self._engine.sleep_unused(f"{self.session_id}.{name}", timedelta(seconds=seconds))
        except SandboxNotFound:
            pass
        except (AtollError, OSError):
            _log.exception("the unused sandbox %s could not be put to sleep", name)

    def _full_name(self, name: str) -> str:
        if not is_name(name) or len(name) > _MAX_NAME_CHARACTERS:
            raise InvalidRequest(
                f"{name!r} is not a name for a sandbox of a session; allowed are {NAME_RULE}", name=name
            )
        return f"{self.session_id}.{name}"

    async def reap(self) -> None:
        """Put sandboxes to sleep that have been unused for too long. Runs until it is cancelled."""
        while True:
            self._times_changed = anyio.Event()
            times = [each for each in (self.sleep_after_s, *self._sleep_after_s.values()) if each is not None]
            with anyio.move_on_after(max(min(times) / _CHECKS, _MIN_CHECK_S) if times else None):
                await self._times_changed.wait()
            try:
                names = [each.name for each in await self.list() if each.status in ("running", "paused")]
            except (AtollError, OSError):
                _log.exception("the sandboxes of session %s could not be listed", self.session_id)
                continue
            for name in names:
                seconds = self._sleep_after_s.get(name, self.sleep_after_s)
                if seconds is not None:
                    await self._sleep_unused(name, seconds)


def _check_sleep(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= _MAX_SLEEP_AFTER_S:
        raise InvalidRequest(
            f"sleep_after_s is {seconds}; it must be above 0 and at most {_MAX_SLEEP_AFTER_S:g}, or None for never"
        )
    return seconds
