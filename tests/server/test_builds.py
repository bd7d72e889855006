"""The log of a tenant's build: what is kept of it, whatever its steps print."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from atoll.builds.builder import BuildEvent
from atoll.contract.model import Limits
from atoll.server.builds import (
    MAX_LINE_CHARS,
    MAX_LOG_CHARS,
    MAX_LOG_LINES,
    MAX_LOGS_CHARS,
    TemplateBuild,
    TemplateBuilds,
)


def built() -> TemplateBuild:
    return TemplateBuild("id", "tenant", "template", ("default",), Limits())


def test_lines_are_whole_however_they_come() -> None:
    build = built()
    for piece in ("a\nb", "c\n", "d"):
        build.take(BuildEvent("output", 1, 1, piece))
    build.flush(1)
    assert [line.text for line in build.lines] == ["a", "bc", "d"]


async def test_old_logs_are_on_the_disk_alone_and_the_newest_and_those_of_other_tenants_in_memory(
    tmp_path: Path,
) -> None:
    instances = cast("Any", SimpleNamespace(instance="this"))
    builds = TemplateBuilds(cast("Any", None), cast("Any", None), tmp_path, instances)
    made = [builds.request(tenant, "one", ["default"], Limits()) for tenant in ["a"] * 12 + ["b"]]
    for build in made:
        for _ in range(MAX_LOG_CHARS // MAX_LINE_CHARS):
            build.note("x" * MAX_LINE_CHARS)
        build.end("failed", "as it was meant to")
        builds._keep(build)
        builds._drop_old_logs(build.tenant)
    kept = [bool(build.lines) for build in made]
    assert kept == [False] * 5 + [True] * 8
    assert sum(build.log_chars for build in made if build.tenant == "a") <= MAX_LOGS_CHARS
    assert len((await builds.find("a", made[0].id)).lines) == MAX_LOG_CHARS // MAX_LINE_CHARS + 1


def test_a_log_is_bounded_in_lines_and_in_characters_and_says_so() -> None:
    many, long = built(), built()
    many.take(BuildEvent("output", 1, 1, "\n" * (2 * MAX_LOG_LINES)))
    assert len(many.lines) == MAX_LOG_LINES + 1
    for _ in range(MAX_LOG_CHARS // MAX_LINE_CHARS + 10):
        long.take(BuildEvent("output", 1, 1, "x" * (3 * MAX_LINE_CHARS) + "\n"))
    assert sum(len(line.text) for line in long.lines) <= MAX_LOG_CHARS + MAX_LINE_CHARS
    assert many.lines[-1].text == long.lines[-1].text == "the log is longer than is kept: the rest is left out"


def test_why_a_build_failed_is_said_however_long_its_log_is() -> None:
    build = built()
    build.take(BuildEvent("output", 1, 1, "\n" * (2 * MAX_LOG_LINES)))
    build.end("failed", "the reason", 1)
    assert [line.text for line in build.lines[-2:]] == [
        "the log is longer than is kept: the rest is left out",
        "the reason",
    ]
    assert [line.number for line in build.lines] == list(range(1, MAX_LOG_LINES + 3))
    assert build.info().status == "failed"
