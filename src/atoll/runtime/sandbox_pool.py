"""The sandboxes of one session: they come to life when first used, and sleep when nobody uses them.

Knows which names belong to a session, and for how long each may be unused. Refuses to know how a sandbox is made,
sleeps or wakes (`host.py`, `life.py`).

A session's sandbox `name` is the runtime's sandbox `session.name`. Sessions have no dot in them, so none can be taken
for another's.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import anyio
from pydantic import SecretStr

from atoll.contract.errors import AtollError, InvalidRequest, SandboxExists, SandboxNotFound
from atoll.contract.model import Frozen, Limits, RuntimeName, Status, check_name
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret
from atoll.runtime.engine import Engine
from atoll.runtime.sandbox import Sandbox

if TYPE_CHECKING:
    from atoll.tools.tool import ToolSet

DEFAULT = "default"
SLEEP_AFTER_S = 600.0
SESSION_RULE = "1 to 32 characters: lower-case letters, digits, '-' and '_', beginning with a letter or a digit"
_SESSION = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LONGEST_NAME = 30
_LONGEST_S = 1e8
_LOOKS = 4
"""How often within the time that a sandbox may be unused somebody looks."""
_LEAST_S = 0.05
"""How long is waited between two looks, at least."""
_log = logging.getLogger(__name__)


class PooledSandbox(Frozen):
    """A sandbox of a session, as `SandboxPool.list` shows it."""

    name: str
    id: str
    image: str
    status: Status
    created_at: datetime
    last_used_at: datetime | None
    """When something was last asked of it. Unset: it has not been used since it was made."""


class SandboxPool:
    """Named sandboxes of one session. `Engine.pool` gives one, as a context: while it is open, the unused go to sleep.

    What the pool is given holds for all of them, unless `get` says otherwise of one. They stay when the context ends:
    the session's next pool, here or in another process, finds them.
    """

    def __init__(
        self,
        host: Engine,
        session_id: str,
        *,
        image: str | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, Secret] | None = None,
        secret_env: Mapping[str, str | SecretStr] | None = None,
        user: str = "user",
        runtime: RuntimeName | None = None,
        pause_after_s: float | None = None,
        network: NetworkPolicy | None = None,
        sleep_after_s: float | None = SLEEP_AFTER_S,
    ) -> None:
        if not _SESSION.fullmatch(session_id):
            raise InvalidRequest(f"{session_id!r} is not a session's id; allowed are {SESSION_RULE}")
        self.session_id = session_id
        self.image = image or host.default_image
        """Of sandboxes that do not name one."""
        self.sleep_after_s = _check_sleep(sleep_after_s)
        self._sleep_after_s: dict[str, float | None] = {}
        """Of those that are to be treated otherwise."""
        self._told = anyio.Event()
        self._engine = host
        self._making: dict[str, anyio.Lock] = {}
        self._options: dict[str, object] = {
            "image": image,
            "limits": limits,
            "env": env,
            "secrets": secrets,
            "secret_env": secret_env,
            "user": user,
            "runtime": runtime,
            "pause_after_s": pause_after_s,
            "network": network,
        }

    async def get(self, name: str = DEFAULT, **options: object) -> Sandbox:
        """The sandbox of this name, made now if it is not there. However many ask at once, one is made.

        `options` are those of `Engine.create`, over the pool's own; they count only when the sandbox is made.

        Raises:
            InvalidRequest: the name is not allowed, or an option is wrong.
            and what `Engine.create` raises.
        """
        full = self._full(name)
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
        """Make a sandbox. `options` as for `get`.

        Raises:
            SandboxExists: the session has one of this name.
            and what `Engine.create` raises.
        """
        full = self._full(name)
        async with self._making.setdefault(name, anyio.Lock()):
            try:
                return await self._make(full, options)
            except SandboxExists:
                raise SandboxExists(name) from None

    async def find(self, name: str = DEFAULT) -> Sandbox:
        """The sandbox of this name, which is there.

        Raises:
            SandboxNotFound: the session has none of this name.
        """
        full = self._full(name)
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
        full = self._full(name)
        found = await self.find(source)
        try:
            (made,) = await found.fork(checkpoint=checkpoint, names=[full])
        except SandboxExists:
            raise SandboxExists(name) from None
        return made

    def tools(self) -> ToolSet:
        """The agent's tools for the sandboxes of this session, to be offered to a model."""
        from atoll.tools.pool import pool_tools

        return pool_tools(self)

    async def _make(self, full: str, options: Mapping[str, object]) -> Sandbox:
        return await self._engine.create(full, **{**self._options, **options})  # type: ignore[arg-type]

    async def _unknown(self, name: str) -> SandboxNotFound:
        return SandboxNotFound(name, [each.name for each in await self.list()])

    def sleep_after(self, name: str, seconds: float | None) -> None:
        """How long this sandbox may be unused, other than the rest; None is for ever. It holds for this pool.

        Raises:
            InvalidRequest: the time is not above 0.
        """
        self._full(name)
        self._sleep_after_s[name] = _check_sleep(seconds)
        self._told.set()

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

    async def destroy(self, name: str = DEFAULT) -> None:
        """End a sandbox and remove all of it.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        full = self._full(name)
        try:
            await self._engine.destroy(full)
        except SandboxNotFound:
            raise await self._unknown(name) from None
        self._sleep_after_s.pop(name, None)

    async def aclose(self) -> None:
        """Destroy all sandboxes of the session."""
        for each in await self.list():
            with contextlib.suppress(SandboxNotFound):
                await self.destroy(each.name)

    async def sleep(self) -> None:
        """Put all sandboxes of the session to sleep that nobody uses in this moment."""
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

    def _full(self, name: str) -> str:
        check_name(name)
        if len(name) > _LONGEST_NAME:
            raise InvalidRequest(
                f"{name!r} is too long for a name in a session; it may have {_LONGEST_NAME} characters"
            )
        return f"{self.session_id}.{name}"

    async def reap(self) -> None:
        """Put to sleep what has been unused for too long, for ever."""
        while True:
            self._told = anyio.Event()
            times = [each for each in (self.sleep_after_s, *self._sleep_after_s.values()) if each is not None]
            with anyio.move_on_after(max(min(times) / _LOOKS, _LEAST_S) if times else None):
                await self._told.wait()
            try:
                names = [each.name for each in await self.list() if each.status in ("running", "paused")]
            except (AtollError, OSError):
                _log.exception("the sandboxes of the session %s could not be looked at", self.session_id)
                continue
            for name in names:
                seconds = self._sleep_after_s.get(name, self.sleep_after_s)
                if seconds is not None:
                    await self._sleep_unused(name, seconds)


def _check_sleep(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds <= _LONGEST_S:
        raise InvalidRequest(
            f"sleep_after_s is {seconds}; it must be above 0 and at most {_LONGEST_S:g}, or None for never"
        )
    return seconds
