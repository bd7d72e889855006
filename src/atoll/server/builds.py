"""Builds of templates for tenants: asked for, run in the background, and watched by their clients.

Owns which builds a tenant has now, their state and their logs, how many run at once, and the archives that clients have
uploaded for them. A build belongs to this process: one that is interrupted has failed, and what its steps have made is
kept for the next. Not here: how a build runs (`atoll.builds`), what the tenant may use (`policy.py`), and routes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from atoll.builds.builder import BuildEvent, BuildOptions, build_template
from atoll.builds.uploads import UploadStore
from atoll.contract.errors import AtollError, Conflict, TemplateNotFound
from atoll.contract.model import Limits
from atoll.server.quotas import QuotaLedger

if TYPE_CHECKING:
    from atoll.builds.plan import BuildPlan
    from atoll.runtime.engine import LocalEngine
    from atoll.server.engines import TenantEngines
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
"""Of the logs of all builds of one tenant that have ended. Those of the oldest are dropped first."""
_LINE_CHARS = 200
BuildStatus = Literal["waiting", "building", "ready", "error"]
_log = logging.getLogger(__name__)


class BuildLogLine(NamedTuple):
    """A line of a build's log."""

    at: datetime
    level: Literal["info", "error"]
    text: str
    step: int


@dataclass
class TemplateBuild:
    """A build of a tenant."""

    id: str
    tenant: str
    template: str
    tags: tuple[str, ...]
    limits: Limits
    status: BuildStatus = "waiting"
    lines: list[BuildLogLine] = field(default_factory=list)
    reason: str | None = None
    """Why it failed."""
    failed_step: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _rest: str = ""
    _chars_left: int = MAX_LOG_CHARS

    @property
    def log_chars(self) -> int:
        """What its log counts for: each line has its time, too."""
        return sum(len(line.text) + _LINE_CHARS for line in self.lines)

    def drop_log(self) -> None:
        """Keep what its state says, and no line."""
        self.lines.clear()

    def note(self, text: str, step: int = 0, *, level: Literal["info", "error"] = "info") -> None:
        if self._chars_left < 0:
            return
        self._chars_left -= min(len(text), MAX_LINE_CHARS)
        if len(self.lines) == MAX_LOG_LINES or self._chars_left < 0:
            text, self._chars_left = "the log is longer than is kept: the rest is left out", -1
        self.lines.append(BuildLogLine(datetime.now(UTC), level, text[:MAX_LINE_CHARS], step))

    def take(self, event: BuildEvent) -> None:
        """Note what happens in it."""
        if event.kind == "output":
            *lines, self._rest = (self._rest + event.text).split("\n")
            for line in lines:
                self.note(line, event.step)
            if len(self._rest) > MAX_LINE_CHARS:
                self.flush(event.step)
            return
        self.flush(event.step)
        if event.kind == "cached":
            self.note(f"[{event.step}/{event.steps}] the result is kept from before", event.step)
        else:
            self.note(f"[{event.step}/{event.steps}] {event.text}", event.step)

    def flush(self, step: int = 0) -> None:
        if self._rest:
            self.note(self._rest, step)
            self._rest = ""


class TemplateBuilds:
    """The builds of all tenants of a server."""

    def __init__(self, engines: TenantEngines, quotas: QuotaLedger, directory: Path) -> None:
        self._engines = engines
        self._quotas = quotas
        self.uploads = UploadStore(directory)
        self._builds: defaultdict[str, OrderedDict[str, TemplateBuild]] = defaultdict(OrderedDict)
        self._tasks: dict[asyncio.Task[None], TemplateBuild] = {}

    def request(self, tenant: str, template: str, tags: Sequence[str], limits: Limits) -> TemplateBuild:
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
        build = TemplateBuild(str(uuid.uuid4()), tenant, template, tuple(tags), limits)
        builds[build.id] = build
        return build

    def get(self, tenant: str, template: str, build_id: str) -> TemplateBuild:
        """
        Raises:
            TemplateNotFound: the tenant has no such build of this template.
        """
        found = self._builds[tenant].get(build_id) if tenant in self._builds else None
        if found is None or found.template != template:
            raise TemplateNotFound(f"{template[:128]}/{build_id[:64]}", [])
        return found

    def is_requested(self, tenant: str, template: str) -> bool:
        """Whether the tenant has asked for a build of this template."""
        return tenant in self._builds and any(each.template == template for each in self._builds[tenant].values())

    def start(
        self, tenant: Tenant, engine: LocalEngine, build: TemplateBuild, plan: BuildPlan, options: BuildOptions
    ) -> None:
        """Let a build run. It counts as a sandbox of the tenant while it does.

        Raises:
            Conflict: it runs, or has run; or as many run as may.
        """
        if build.status != "waiting":
            raise Conflict(f"the build {build.id} was started before; ask for another")
        running = [each for each in self._builds[tenant.name].values() if each.status == "building"]
        if len(running) >= MAX_RUNNING:
            raise Conflict(f"{len(running)} builds of this tenant run; wait until one has ended")
        build.status = "building"
        limited = options._replace(
            limits=build.limits,
            admit=lambda name, limits: self._quotas.reserve(tenant, engine, {name: limits}),
        )
        task = asyncio.get_running_loop().create_task(self._run(engine, build, plan, limited), name="atoll build")
        self._engines.hold(tenant.name, build)
        self._tasks[task] = build
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _run(self, engine: LocalEngine, build: TemplateBuild, plan: BuildPlan, options: BuildOptions) -> None:
        try:
            async with asyncio.timeout(BUILD_TIMEOUT_S):
                await build_template(
                    engine,
                    plan,
                    self.uploads.of(build.tenant),
                    name=build.template,
                    tags=build.tags,
                    build_id=build.id,
                    options=options,
                    on_event=build.take,
                )
            build.flush()
            build.note("the template is ready")
            build.status = "ready"
        except AtollError as error:
            self._fail(build, error.message, getattr(error, "step", None))
        except TimeoutError:
            self._fail(build, f"the build did not end within {BUILD_TIMEOUT_S:g} s", None)
        except asyncio.CancelledError:
            self._fail(build, "the build was interrupted: the server stopped, or its tenant was deleted", None)
            raise
        except Exception:  # noqa: BLE001 - no caller waits for this task
            _log.exception("a build of the template %s failed", build.template)
            self._fail(build, "the build failed for a reason that is in the server's log", None)
        finally:
            build.ended.set()
            self._drop_old_logs(build.tenant)

    def _drop_old_logs(self, tenant: str) -> None:
        left = MAX_LOGS_CHARS
        for build in reversed(self._builds[tenant].values() if tenant in self._builds else ()):
            if build.ended.is_set():
                left -= build.log_chars
                if left < 0:
                    build.drop_log()

    def _fail(self, build: TemplateBuild, reason: str, step: int | None) -> None:
        build.flush()
        build.note(reason, step or 0, level="error")
        build.reason, build.failed_step, build.status = reason, step, "error"

    async def end_tenant(self, tenant: str) -> None:
        """Cancel the builds of a tenant and forget them, and remove its archives."""
        await self._cancel([task for task, build in self._tasks.items() if build.tenant == tenant])
        self._builds.pop(tenant, None)
        self.uploads.remove_all(tenant)

    async def aclose(self) -> None:
        """Cancel all builds. They leave nothing behind but the results of their complete steps."""
        await self._cancel([*self._tasks])

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
