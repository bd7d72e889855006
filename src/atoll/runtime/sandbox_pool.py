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
import posixpath
import re
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Unpack

import anyio

from atoll.contract.errors import AtollError, InvalidRequest, SandboxExists, SandboxNotFound
from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits, Mount, Status, TemplateVersion
from atoll.contract.names import TEMPLATE_PREFIX, is_name
from atoll.contract.network import NetworkPolicy
from atoll.runtime.images.contents import ImageContents
from atoll.runtime.interface import CreateOptions, Engine, SandboxKeywords
from atoll.runtime.provisioning import DEFAULT_USER
from atoll.runtime.sandbox import Sandbox

if TYPE_CHECKING:
    from atoll.runtime.project.project import Project, ProjectCopy
    from atoll.tools.tool import ToolSet

DEFAULT = "default"
SLEEP_AFTER_S = 600.0
SESSION_RULE = "1 to 32 characters: lower-case letters, digits, '-' and '_', beginning with a letter or a digit"
_SESSION = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
NAME_RULE = "1 to 30 characters: lower-case letters, digits, '-', '_' and '.', beginning with a letter or a digit"
"""For the names of sandboxes in a session: the engine's names have the session's id in them too."""
_MAX_NAME_CHARACTERS = 30
_HOME = "/home/user"
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
    project: str | None = None
    """Where the sandbox `default` has a copy of the user's project, and commands start in it. None: it has none."""
    limits: Limits
    network: NetworkPolicy | None
    secrets: tuple[str, ...]
    """The names of variables that hold placeholders of secrets."""
    mounts: tuple[Mount, ...] = ()
    """Directories of the host and volumes that they see."""


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
        sleep_after_s: float | None = SLEEP_AFTER_S,
        **options: Unpack[SandboxKeywords],
    ) -> None:
        if unknown := options.keys() - SandboxKeywords.__annotations__:
            raise TypeError(f"a pool has no option {', '.join(map(repr, sorted(unknown)))}")
        if not _SESSION.fullmatch(session_id):
            raise InvalidRequest(f"{session_id!r} is not a session id; allowed are {SESSION_RULE}")
        self.session_id = session_id
        self.image: str = options.get("image") or engine.default_image
        """The image of sandboxes that do not name one."""
        self.user: str | None = options.get("user")
        """The user of commands that name none. None: the image's, or `user`."""
        self.cwd: str | None = options.get("cwd")
        """Where commands start. None: where the image says, or in the home of their user."""
        self.project: Project | None = None
        """What the sandbox `default` has a copy of when it is created, where its commands start. None: of nothing.
        `Engine.pool` sets it."""
        self.project_copy: ProjectCopy | None = None
        """That copy, once this pool has made it."""
        self.sleep_after_s: float | None = _check_sleep(sleep_after_s)
        self._sleep_after_s: dict[str, float | None] = {}
        """By name, for the sandboxes with a time of their own."""
        self._times_changed = anyio.Event()
        self._engine = engine
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._making: dict[str, anyio.Lock] = {}
        self._options = options

    async def get(self, name: str = DEFAULT, **options: Unpack[CreateOptions]) -> Sandbox:
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
                return await self._make(name, options)
            except SandboxExists:  # another process was faster
                return await self._engine.get(full)

    async def create(self, name: str, **options: Unpack[CreateOptions]) -> Sandbox:
        """Create a sandbox. `options` as for `get`.

        Raises:
            SandboxExists: the session has one of this name.
            and what `Engine.create` raises.
        """
        self._full_name(name)
        async with self._making.setdefault(name, anyio.Lock()):
            try:
                return await self._make(name, options)
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

    async def check(self) -> None:
        """Raise what `get` would raise of the pool's options, as far as that is known without creating a sandbox: the
        person who chose them is told, and not a model.

        Raises:
            InvalidRequest, Unenforceable, RuntimeUnavailable, VolumeNotFound: an option is wrong.
        """
        await self._engine.check_options(self._options)

    async def describe(self) -> PoolDescription:
        """What sandboxes with the pool's options have and may do. Nothing is created, started or fetched."""
        limits = self._options.get("limits") or Limits()
        contents, template = ImageContents(os=None, programs=()), None
        with contextlib.suppress(AtollError):  # what is wrong is said when a sandbox is created
            limits = self._engine.effective_limits(limits, self._options.get("runtime"))
            template = await self._template()
            image = self.image if template is None else template.image
            contents = await self._engine.images.contents(image) or contents
        user = self.user or (template and template.user) or contents.user
        place = self._project_place(user)
        return PoolDescription(
            image=self.image,
            os=contents.os,
            programs=contents.programs,
            user=user or DEFAULT_USER,
            cwd=self._options.get("cwd") or (template and template.cwd) or contents.working_directory,
            project=place and place[1],
            limits=limits,
            network=self._options.get("network"),
            secrets=tuple(self._options.get("secrets") or {}),
            mounts=tuple(self._options.get("mounts") or ()),
        )

    def tools(self) -> ToolSet:
        """The agent's tools for the sandboxes of this session, to be offered to a model."""
        from atoll.tools.pool import pool_tools

        return pool_tools(self)

    async def _make(self, name: str, options: CreateOptions) -> Sandbox:
        full, place = self._full_name(name), await self._known_project_place()
        merged: CreateOptions = {**self._options, **options}
        if name != DEFAULT or place is None:
            return await self._engine.create(full, **merged)
        merged["cwd"] = place[1]
        made = await self._engine.create(full, **merged)
        try:
            await self._forget_project()
            self.project_copy = await place[0].copy_in(made.files, place[1])
        except BaseException:
            with anyio.CancelScope(shield=True):
                await made.destroy()
            raise
        return made

    def _project_place(self, user: str | None) -> tuple[Project, str] | None:
        """The project, and where its copy is in a sandbox whose commands are those of `user`."""
        if self.project is None:
            return None
        # The home of another user is not known before there is a sandbox; in /tmp every user can make a directory.
        home = _HOME if user in {None, DEFAULT_USER, "root"} else "/tmp"
        return self.project, posixpath.join(self._options.get("cwd") or home, self.project.name)

    async def _known_project_place(self) -> tuple[Project, str] | None:
        if self.project is None or self.user is not None:
            return self._project_place(self.user)
        version = await self._template()
        if version is not None and version.user is not None:
            return self._project_place(version.user)
        image = self.image if version is None else version.image
        await self._engine.images.resolve(image)  # what it says of its user is known then
        contents = await self._engine.images.contents(image)
        return self._project_place(None if contents is None else contents.user)

    async def _template(self) -> TemplateVersion | None:
        """The template that sandboxes begin as. None: an image."""
        return await self._engine.templates.version(self.image) if self.image.startswith(TEMPLATE_PREFIX) else None

    async def bring_project(self) -> ProjectCopy:
        """The copy of the project in the sandbox `default`, which is created if it does not exist.

        In a sandbox that is older than this pool, the earlier copy becomes the project as it is now; what git ignores
        stays.

        Raises:
            InvalidRequest: the pool has no project, or the sandbox was made without it; or as `Project.copy_in`.
            and what `Engine.create` raises.
        """
        place = await self._known_project_place()
        if place is None:
            raise InvalidRequest("the pool has no project; give it one when it is opened")
        sandbox = await self.get(DEFAULT)
        if self.project_copy is None:
            if sandbox.info.cwd != place[1]:
                raise InvalidRequest(
                    f"the session {self.session_id!r} has a sandbox that was made without the project "
                    f"{place[0].name!r}; choose another session"
                )
            self.project_copy = await place[0].copy_in(sandbox.files, place[1], replace=True)
        return self.project_copy

    async def _forget_project(self) -> None:
        copy, self.project_copy = self.project_copy, None
        if copy is not None:
            with anyio.CancelScope(shield=True):
                await copy.aclose()

    @property
    def engine(self) -> Engine:
        """The engine that has the sandboxes."""
        return self._engine

    def on_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have `close` called when the pool ends, before its sandboxes are removed or left."""
        self._closers.append(close)

    async def end(self) -> None:
        """Forget what this process keeps of the session. `Engine.pool` calls it; the sandboxes stay."""
        with anyio.CancelScope(shield=True):
            while self._closers:
                await self._closers.pop()()
        await self._forget_project()

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
        """End a sandbox and remove all of it, with `checkpoints` also those. Returns how many it had.

        Raises:
            SandboxNotFound: there is none of this name.
        """
        full = self._full_name(name)
        try:
            count = await self._engine.destroy(full, checkpoints=checkpoints)
        except SandboxNotFound:
            raise await self._unknown(name) from None
        self._sleep_after_s.pop(name, None)
        return count

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
