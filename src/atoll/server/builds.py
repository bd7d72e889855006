"""Builds of templates for tenants: asked for, run in the background, and watched by their clients.

Owns which builds a tenant has had, their state and their logs, how many run at once, and the archives that clients have
uploaded for them. A build belongs to this process: one that is interrupted has failed, and what its steps have made is
kept for the next. Not here: how a build runs (`atoll.builds`), what the tenant may use (`policy.py`), and routes.

    server/builds/<tenant>/             archives (`UploadStore`)
    server/build-states/<tenant>/<id>.json   a build that was started, and which process runs it
    server/build-states/<tenant>/<id>.log    the lines of its log, once it has ended
"""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import os
import re
import shutil
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import anyio
import anyio.to_thread

from atoll.builds.builder import BuildEvent, BuildOptions, build_template
from atoll.builds.uploads import UploadStore
from atoll.contract.errors import (
    AtollError,
    BuildNotFound,
    Conflict,
    SandboxError,
    TemplateNotFound,
    told_elsewhere,
)
from atoll.contract.model import Build, BuildLogLine, BuildStatus, Limits, TemplateVersion
from atoll.runtime.state.records import StoredRecord, read_record, write_record
from atoll.server.quotas import QuotaLedger

if TYPE_CHECKING:
    from atoll.builds.plan import BuildPlan
    from atoll.runtime.engine import LocalEngine
    from atoll.server.engines import TenantEngines
    from atoll.server.idempotency import Idempotency
    from atoll.server.tenants import Tenant

MAX_REMEMBERED = 100
"""Builds of one tenant whose state is known. The oldest are forgotten first; one that runs is not."""
MAX_RUNNING = 4
"""Of one tenant, at the same time."""
BUILD_TIMEOUT_S = 2 * 3600.0
MAX_LOG_LINES = 10_000
MAX_LOG_CHARS = 1_000_000
MAX_LINE_CHARS = 2000
MAX_LOGS_CHARS = 8 * MAX_LOG_CHARS
"""Of the logs of all builds of one tenant that have ended and are in memory. The oldest are dropped first."""
_LINE_CHARS = 200
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INTERRUPTED = (
    "the build was interrupted: the server ended, or its tenant was deleted; the next begins with its results"
)
_log = logging.getLogger(__name__)


class BuildRecord(StoredRecord):
    """A build on disk."""

    VERSION: ClassVar[int] = 1
    build: Build
    instance: str
    """The start of the server that runs it, or has run it."""


@dataclass
class TemplateBuild:
    """A build of a tenant."""

    id: str
    tenant: str
    template: str
    tags: tuple[str, ...]
    limits: Limits
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    status: BuildStatus = "waiting"
    lines: list[BuildLogLine] = field(default_factory=list)
    reason: str | None = None
    """Why it failed."""
    failed_step: int | None = None
    version: TemplateVersion | None = None
    ended_at: datetime | None = None
    steps: int = 0
    step: int = 0
    cancelled: bool = False
    """A client has asked for its end."""
    scope: anyio.CancelScope | None = None
    """What it runs in, once it runs. A task's own cancellation comes once, and can come to nothing while a sandbox is
    made."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _fetched: set[str] = field(default_factory=set)
    has_log: bool = True
    """Whether `lines` has its log. Else, the disk has it."""
    _rest: str = ""
    _chars_left: int = MAX_LOG_CHARS

    @property
    def log_chars(self) -> int:
        """What its log counts for: each line has its time, too."""
        return sum(len(line.text) + _LINE_CHARS for line in self.lines)

    def drop_log(self) -> None:
        """Keep no line in memory."""
        self.lines, self.has_log = [], False

    def info(self) -> Build:
        """As clients see it."""
        return Build(
            id=self.id,
            template=self.template,
            tags=self.tags,
            status=self.status,
            created_at=self.created_at,
            ended_at=self.ended_at,
            steps=self.steps,
            step=self.step,
            reason=self.reason,
            failed_step=self.failed_step,
            version=self.version,
        )

    def note(
        self,
        text: str,
        step: int = 0,
        *,
        kind: Literal["step", "cached", "output", "note"] = "note",
        level: Literal["info", "error"] = "info",
    ) -> None:
        if self._chars_left < 0:
            return
        self._chars_left -= min(len(text), MAX_LINE_CHARS)
        if len(self.lines) == MAX_LOG_LINES or self._chars_left < 0:
            text, kind, self._chars_left = "the log is longer than is kept: the rest is left out", "note", -1
        self._append(text, step, kind, level)

    def _append(
        self, text: str, step: int, kind: Literal["step", "cached", "output", "note"], level: Literal["info", "error"]
    ) -> None:
        self.lines.append(
            BuildLogLine(
                number=len(self.lines) + 1,
                at=datetime.now(UTC),
                level=level,
                kind=kind,
                step=step,
                text=text[:MAX_LINE_CHARS],
            )
        )
        self._wake()

    def take(self, event: BuildEvent) -> None:
        """Note what happens in it."""
        if event.kind == "output":
            *lines, self._rest = (self._rest + event.text).split("\n")
            for line in lines:
                self.note(line, event.step, kind="output")
            if len(self._rest) > MAX_LINE_CHARS:
                self.flush(event.step)
            return
        self.flush(self.step)
        self.steps, self.step = event.steps, event.step
        place = f"[{event.step}/{event.steps}]"
        if event.kind == "cached":
            self.note(f"{place} the result is kept from before", event.step, kind="cached")
        else:
            self.note(f"{place} {event.text}", event.step, kind="step")

    def take_progress(self, what: str) -> None:
        """Note, once, what is done before the first step: an image is fetched."""
        if what not in self._fetched:
            self._fetched.add(what)
            self.note(what)

    def flush(self, step: int = 0) -> None:
        if self._rest:
            self.note(self._rest, step, kind="output")
            self._rest = ""

    def end(self, status: BuildStatus, reason: str | None = None, step: int | None = None) -> None:
        """It has ended so."""
        self.flush(self.step)
        if reason is not None:
            self._append(reason, step or 0, "note", "error")  # however long the log is
        self.reason, self.failed_step = reason, step
        self.status, self.ended_at = status, datetime.now(UTC)
        self._wake()

    async def follow(self, after: int = 0) -> AsyncIterator[BuildLogLine]:
        """The lines of its log beyond that number, until it has ended."""
        at = after
        while True:
            changed = self._changed
            for line in self.lines[at:]:
                at = line.number
                yield line
            if len(self.lines) > at:
                continue
            if self.status not in ("waiting", "building"):
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class TemplateBuilds:
    """The builds of all tenants of a server."""

    def __init__(self, engines: TenantEngines, quotas: QuotaLedger, directory: Path, instances: Idempotency) -> None:
        self._engines = engines
        self._quotas = quotas
        self._instances = instances
        self.uploads = UploadStore(directory / "builds")
        self._states = BuildStates(directory / "build-states")
        self._builds: defaultdict[str, OrderedDict[str, TemplateBuild]] = defaultdict(OrderedDict)
        self._tasks: dict[asyncio.Task[None], TemplateBuild] = {}

    # ------------------------------------------------------------------------------------------------------- found

    async def list(self, tenant: str) -> builtins.list[Build]:
        """The builds of a tenant that are remembered."""
        stored = await anyio.to_thread.run_sync(self._states.all, tenant)
        found = {each.build.id: self._seen(each) for each in stored}
        return [*({**found, **{each.id: each.info() for each in self._of(tenant)}}).values()]

    async def find(self, tenant: str, build_id: str) -> TemplateBuild:
        """
        Raises:
            BuildNotFound: the tenant has no such build, or it is forgotten.
        """
        found = self._builds[tenant].get(build_id) if tenant in self._builds else None
        if found is not None and found.has_log:
            return found
        record = await anyio.to_thread.run_sync(self._states.read, tenant, build_id)
        if record is None:
            raise BuildNotFound(build_id[:64])
        seen = self._seen(record)
        build = TemplateBuild(
            **{name: getattr(seen, name) for name in ("id", "template", "tags", "status", "created_at", "reason")},
            **{name: getattr(seen, name) for name in ("failed_step", "version", "ended_at", "steps", "step")},
            tenant=tenant,
            limits=Limits(),
        )
        build.lines = await anyio.to_thread.run_sync(self._states.lines, tenant, build_id)
        return build

    def _seen(self, record: BuildRecord) -> Build:
        """A build as it stands: that of a process that has died was interrupted."""
        runs = record.build.status == "building" and record.instance != self._instances.instance
        if not runs or self._instances.is_alive(record.instance):
            return record.build
        return record.build.model_copy(update={"status": "interrupted", "reason": _INTERRUPTED})

    async def get(self, tenant: str, template: str, build_id: str) -> TemplateBuild:
        """As `find`, of one template.

        Raises:
            TemplateNotFound: the tenant has no such build of this template.
        """
        try:
            found = await self.find(tenant, build_id)
        except BuildNotFound:
            found = None
        if found is None or found.template != template:
            raise TemplateNotFound(f"{template[:128]}/{build_id[:64]}", [])
        return found

    def is_requested(self, tenant: str, template: str) -> bool:
        """Whether the tenant has asked for a build of this template."""
        return any(each.template == template for each in self._of(tenant))

    def _of(self, tenant: str) -> Sequence[TemplateBuild]:
        return [*self._builds[tenant].values()] if tenant in self._builds else []

    # ----------------------------------------------------------------------------------------------------- running

    def request(
        self, tenant: str, template: str, tags: Sequence[str], limits: Limits, build_id: str | None = None
    ) -> TemplateBuild:
        """A build that waits for its plan.

        Raises:
            Conflict: too many run, and none can be forgotten.
        """
        builds = self._builds[tenant]
        while len(builds) >= MAX_REMEMBERED:
            oldest = next((each.id for each in builds.values() if each.status != "building"), None)
            if oldest is None:
                raise Conflict(f"{MAX_REMEMBERED} builds run; wait until one has ended")
            del builds[oldest]
        build = TemplateBuild(build_id or str(uuid.uuid4()), tenant, template, tuple(tags), limits)
        builds[build.id] = build
        return build

    def check_room(self, tenant: str) -> None:
        """
        Raises:
            Conflict: as many builds of the tenant run as may.
        """
        running = [each for each in self._of(tenant) if each.status == "building"]
        if len(running) >= MAX_RUNNING:
            raise Conflict(f"{len(running)} builds of this tenant run; wait until one has ended")

    def start(
        self, tenant: Tenant, engine: LocalEngine, build: TemplateBuild, plan: BuildPlan, options: BuildOptions
    ) -> None:
        """Let a build run. It counts as a sandbox of the tenant while it does.

        Raises:
            Conflict: it runs, or has run; or as many run as may.
        """
        if build.status != "waiting":
            raise Conflict(f"the build {build.id} was started before; ask for another")
        self.check_room(tenant.name)
        build.status, build.steps, scope = "building", len(plan.steps), anyio.CancelScope()
        build.scope = scope
        loop = asyncio.get_running_loop()
        limited = options._replace(
            limits=build.limits,
            admit=lambda name, limits: self._quotas.reserve(tenant, engine, {name: limits}),
            progress=lambda what, _done, _total: _soon(loop, build, what),  # of a thread
        )
        self._states.write(build.tenant, BuildRecord(build=build.info(), instance=self._instances.instance))
        task = loop.create_task(self._run(engine, build, plan, limited, scope), name="atoll build")
        self._engines.hold(tenant.name, build)
        self._tasks[task] = build
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _run(
        self,
        engine: LocalEngine,
        build: TemplateBuild,
        plan: BuildPlan,
        options: BuildOptions,
        scope: anyio.CancelScope,
    ) -> None:
        try:
            with scope, anyio.fail_after(BUILD_TIMEOUT_S):
                build.version = await build_template(
                    engine,
                    plan,
                    self.uploads.of(build.tenant),
                    name=build.template,
                    tags=build.tags,
                    build_id=build.id,
                    options=options,
                    on_event=build.take,
                )
            if build.version is not None:
                build.flush(build.step)
                build.note("the template is ready")
                build.end("ready")
            elif build.cancelled:
                build.end("cancelled", "the build was cancelled")
            else:
                build.end("interrupted", _INTERRUPTED)
        except AtollError as error:
            build.end("failed", told_elsewhere(error), getattr(error, "step", None))
        except TimeoutError:
            build.end("failed", f"the build did not end within {BUILD_TIMEOUT_S:g} s")
        except asyncio.CancelledError:
            build.end("interrupted", _INTERRUPTED)
            raise
        except Exception:  # noqa: BLE001 - no caller waits for this task
            _log.exception("a build of the template %s failed", build.template)
            build.end("failed", "the build failed for a reason that is in the server's log")
        finally:
            self._keep(build)
            self._drop_old_logs(build.tenant)

    def _drop_old_logs(self, tenant: str) -> None:
        """They are on the disk."""
        left = MAX_LOGS_CHARS
        for build in reversed(self._of(tenant)):
            if build.ended_at is not None:
                left -= build.log_chars
                if left < 0:
                    build.drop_log()

    def _keep(self, build: TemplateBuild) -> None:
        record = BuildRecord(build=build.info(), instance=self._instances.instance)
        try:
            self._states.write(build.tenant, record, build.lines)
        except OSError as error:
            _log.warning("the state of the build %s could not be written: %s", build.id, error)

    async def cancel(self, tenant: str, build_id: str) -> TemplateBuild:
        """End a build, and return when it has. One that has ended stays as it is.

        Raises:
            BuildNotFound: the tenant has no such build.
            Conflict: another process of the server runs it.
        """
        build = await self.find(tenant, build_id)
        task = next((task for task, each in self._tasks.items() if each is build), None)
        if task is not None:
            build.cancelled = True
            await self._cancel([task])
        elif build.status == "waiting":
            build.end("cancelled", "the build was cancelled")
        elif build.status == "building":
            raise Conflict("another process of the server runs this build; it ends it when it stops")
        return build

    async def end_tenant(self, tenant: str) -> None:
        """Cancel the builds of a tenant and forget them, and remove its archives."""
        await self._cancel([task for task, build in self._tasks.items() if build.tenant == tenant])
        self._builds.pop(tenant, None)
        self.uploads.remove_all(tenant)
        self._states.remove_all(tenant)

    async def aclose(self) -> None:
        """Cancel all builds. They leave nothing behind but the results of their complete steps."""
        await self._cancel([*self._tasks])

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            if (scope := self._tasks[task].scope) is not None:
                scope.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _soon(loop: asyncio.AbstractEventLoop, build: TemplateBuild, what: str) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(build.take_progress, what)


class BuildStates:
    """What is known of builds after the process that ran them: their states and logs on disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, tenant: str, record: BuildRecord, lines: Sequence[BuildLogLine] = ()) -> None:
        """Keep a build, and forget the oldest beyond `MAX_REMEMBERED`.

        Raises:
            OSError: it cannot be written.
        """
        directory = self._directory / tenant
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if lines:
            text = "".join(f"{json.dumps(each.model_dump(mode='json'))}\n" for each in lines)
            (directory / f"{record.build.id}.log").write_text(text, "utf-8", "backslashreplace")
        write_record(directory / f"{record.build.id}.json", record)
        oldest_first = sorted(directory.glob("*.json"), key=_time_of)
        for path in oldest_first[: max(0, len(oldest_first) - MAX_REMEMBERED)]:
            path.unlink(missing_ok=True)
            path.with_suffix(".log").unlink(missing_ok=True)

    def all(self, tenant: str) -> list[BuildRecord]:
        """All that can be read."""
        paths = [*(self._directory / tenant).glob("*.json")]
        return [record for path in paths if (record := self.read(tenant, path.stem)) is not None]

    def read(self, tenant: str, build_id: str) -> BuildRecord | None:
        """None: there is none, or it is of another version of Atoll."""
        if not _ID.fullmatch(build_id):
            return None
        with suppress(SandboxError):
            return read_record(self._directory / tenant / f"{build_id}.json", BuildRecord, f"build {build_id}")
        return None

    def lines(self, tenant: str, build_id: str) -> list[BuildLogLine]:
        """The log of a build that has ended. Empty: it was interrupted before it was written."""
        try:
            text = (self._directory / tenant / f"{build_id}.log").read_text("utf-8")
        except OSError:
            return []
        try:
            return [BuildLogLine.model_validate(json.loads(line)) for line in text.splitlines()]
        except ValueError:
            return []

    def remove_all(self, tenant: str) -> None:
        """Forget the builds of a tenant."""
        shutil.rmtree(self._directory / tenant, ignore_errors=True)


def _time_of(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:  # another process has just removed it
        return 0.0
