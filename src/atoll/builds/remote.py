"""A build on a server, for a client that has the plan and the files.

Owns that files which the server has are not sent again, and that a build whose caller is cancelled is cancelled too.
Not here: requests (`atoll.client.builds`), and a build on this machine (`builder.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from atoll.builds.builder import ArchiveSource, BuildOptions
from atoll.builds.plan import BuildPlan, CopyStep
from atoll.client.builds import CANCEL_S
from atoll.contract.errors import AtollError, BuildFailed
from atoll.contract.model import Build, BuildLogLine, TemplateVersion

if TYPE_CHECKING:
    from atoll.client.engine import RemoteEngine


async def build_on_server(
    engine: RemoteEngine,
    plan: BuildPlan,
    archives: ArchiveSource,
    *,
    name: str,
    tags: Sequence[str],
    options: BuildOptions | None = None,
    on_line: Callable[[BuildLogLine], None] = lambda _line: None,
) -> TemplateVersion:
    """As `build_template`, by the server of `engine`. `options.admit` is the server's to choose.

    Raises:
        BuildFailed: a step failed, the plan cannot be carried out, or the build was cancelled or interrupted.
        AtollError: the server refuses it.
    """
    options = options or BuildOptions()
    for archive in dict.fromkeys(step.archive for step in plan.steps if isinstance(step, CopyStep)):
        if not await engine.builds.has_files(archive):
            report = options.progress

            def tell(done: int, report: object = report) -> None:
                if callable(report):
                    report("sending files", done, None)

            await engine.builds.upload_files(archive, archives.read(archive), tell)
    if plan.image is None:
        plan = plan.model_copy(update={"image": engine.default_image})
    request = {
        "name": name,
        "tags": list(tags),
        "plan": plan.model_dump(mode="json"),
        "runtime": options.runtime,
        "limits": options.limits.model_dump(mode="json", exclude_none=True),
        "network": None if options.network is None else options.network.model_dump(mode="json"),
        "sudo": options.sudo,
        "cache": options.uses_cache,
        "step_timeout_s": options.step_timeout_s,
    }
    build = await engine.builds.create(request)
    try:
        async for each in engine.builds.follow(build.id):
            if isinstance(each, Build):
                build = each
            else:
                on_line(each)
    except anyio.get_cancelled_exc_class():
        # A server that cannot be reached is left to it: the build ends by itself.
        with anyio.move_on_after(CANCEL_S, shield=True), suppress(AtollError):
            await engine.builds.cancel(build.id)
        raise
    if build.version is None:
        raise BuildFailed(build.reason or f"the build is {build.status}", step=build.failed_step)
    return build.version
