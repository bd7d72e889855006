"""Builds: steps in a sandbox, results that are kept, and templates that sandboxes begin as."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import atoll
from atoll.builds.builder import BuildEvent, BuildOptions, NoArchives, build_template
from atoll.builds.context import BuildContext
from atoll.builds.dockerfile import parse_dockerfile
from atoll.builds.layers import LayerCache
from atoll.contract.errors import BuildFailed, InvalidRequest, LaunchFailed, TemplateNotFound
from atoll.contract.model import RuntimeName, TemplateVersion
from atoll.runtime.engine import LocalEngine
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import eventually

DOCKERFILE = """
FROM host
ARG WHO=world
ENV GREETING="hello $WHO" PATH=/opt/bin:$PATH
WORKDIR /srv/app
RUN echo "$GREETING" > greeting; id -un > who
COPY --chown=user *.txt ./
COPY --chmod=700 tools /opt/bin/
RUN sleep 1000 & echo left a process
USER user
WORKDIR /home/user/new
CMD ["sh", "-c", "echo begun >> /tmp/starts; touch /tmp/is-ready; sleep 1000"]
"""


async def build(
    engine: LocalEngine, text: str, name: str = "demo", root: Path | None = None, **options: object
) -> tuple[TemplateVersion, list[BuildEvent]]:
    files = BuildContext(root) if root else None
    plan = parse_dockerfile(text, pack=files.pack if files else None)
    events: list[BuildEvent] = []
    version = await build_template(
        engine,
        plan,
        files or NoArchives(),
        name=name,
        tags=["default"],
        options=BuildOptions(**options),  # type: ignore[arg-type]
        on_event=events.append,
    )
    return version, events


def cached(events: list[BuildEvent]) -> list[int]:
    return [event.step for event in events if event.kind == "cached"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "tool").write_text("#!/bin/sh\necho the tool\n")
    (tmp_path / "a.txt").write_text("a\n")
    return tmp_path


@pytest.mark.parametrize("runtime_name", ["crun", "runsc"], indirect=True)
async def test_a_dockerfile_becomes_a_template_whose_unchanged_steps_are_not_run_again(
    engine: LocalEngine, root: Path, runtime_name: RuntimeName
) -> None:
    first, events = await build(engine, DOCKERFILE, root=root, runtime=runtime_name)
    assert cached(events) == []
    assert await engine.list() == []
    async with engine.create(image="template:demo", env={"MORE": "1"}) as sandbox:
        assert (sandbox.info.user, sandbox.info.cwd) == ("user", "/home/user/new")
        assert (sandbox.info.runtime, sandbox.info.network) == (runtime_name, None)
        said = await sandbox.exec(
            "echo $GREETING $MORE; pwd; cat /srv/app/greeting /srv/app/who; "
            "stat -c '%U %a' /srv/app/a.txt /opt/bin/tool"
        )
        shown = ["hello world 1", "/home/user/new", "hello world", "root", "user 644", "root 700"]
        assert said.stdout.splitlines() == shown
        assert (await sandbox.exec("pgrep -cx sleep")).stdout == "1\n", "that of the start command, none of a step"
        await engine.sleep(sandbox.name)

        async def runs_again() -> bool:
            count = len((await sandbox.exec("cat /tmp/starts")).stdout.split())
            # With runsc the processes were saved, and go on.
            return count == (1 if runtime_name == "runsc" else 2)

        await eventually(runs_again, "the start command runs after it has slept")
    again, events = await build(engine, DOCKERFILE, root=root, runtime=runtime_name)
    assert again.checkpoint == first.checkpoint
    assert cached(events) == [4, 5, 6, 7]
    (root / "tools" / "tool").write_text("#!/bin/sh\necho another\n")
    changed, events = await build(engine, DOCKERFILE, root=root, runtime=runtime_name)
    assert changed.checkpoint != first.checkpoint
    assert cached(events) == [4, 5]
    _, events = await build(engine, DOCKERFILE, root=root, runtime=runtime_name, uses_cache=False)
    assert cached(events) == []


@pytest.mark.parametrize("runtime_name", ["crun"], indirect=True)
async def test_a_step_that_fails_or_is_cancelled_leaves_nothing(engine: LocalEngine, runtime_name: RuntimeName) -> None:
    with pytest.raises(
        BuildFailed, match=r"(?s)^step 2 of 3: RUN echo why; exit 3 failed with exit code 3:\nwhy$"
    ) as failed:
        await build(engine, "FROM host\nRUN true\nRUN echo why; exit 3\nRUN true", runtime=runtime_name)
    assert failed.value.step == 2
    with pytest.raises(BuildFailed, match=r"step 1 of 1: RUN sleep 1000 did not end within 0\.5 s"):
        await build(engine, "FROM host\nRUN sleep 1000", runtime=runtime_name, step_timeout_s=0.5)
    with pytest.raises(BuildFailed, match=r"step 1 of 2: USER nobody-here|step 2 of 2: RUN true"):
        await build(engine, "FROM host\nUSER nobody-here\nRUN true", runtime=runtime_name)
    begun = anyio.Event()

    def see(event: BuildEvent) -> None:
        if event.kind == "output":
            begun.set()

    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            plan = parse_dockerfile("FROM host\nRUN true\nRUN echo begun; sleep 1000")
            options = BuildOptions(runtime=runtime_name)
            await build_template(engine, plan, NoArchives(), name="x", tags=["a"], options=options, on_event=see)

        tasks.start_soon(run)
        await begun.wait()
        tasks.cancel_scope.cancel()
    assert await engine.list() == []
    assert await engine.templates.list() == []
    assert [each.label is not None for each in await engine.checkpoints()] == [True], "the step that was complete"
    with pytest.raises(TemplateNotFound):
        await engine.create(image="template:demo")


@pytest.mark.parametrize("runtime_name", ["crun"], indirect=True)
async def test_two_builds_of_the_same_steps_run_each_once(engine: LocalEngine, runtime_name: RuntimeName) -> None:
    seen: list[list[int]] = []

    async def run(name: str) -> None:
        seen.append(cached((await build(engine, "FROM host\nRUN sleep 0.2\nRUN true", name, runtime=runtime_name))[1]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "one")
        tasks.start_soon(run, "two")
    assert sorted(step for steps in seen for step in steps) == [1, 2]
    assert len(await engine.checkpoints()) == 2


@pytest.mark.parametrize("runtime_name", ["crun"], indirect=True)
async def test_a_step_has_the_network_of_its_build_and_the_template_has_none(
    engine: LocalEngine, runtime_name: RuntimeName
) -> None:
    text = "FROM host\nRUN echo begun; while [ ! -e /go ]; do sleep 0.05; done"
    for policy in (None, atoll.NetworkPolicy(allow=("example.com",))):
        begun = anyio.Event()

        def see(event: BuildEvent, begun: anyio.Event = begun) -> None:
            if event.kind == "output":
                begun.set()

        async with anyio.create_task_group() as tasks:

            async def run(policy: atoll.NetworkPolicy | None = policy) -> None:
                options = BuildOptions(runtime=runtime_name, network=policy, uses_cache=False)
                plan = parse_dockerfile(text)
                await build_template(
                    engine, plan, NoArchives(), name="demo", tags=["default"], options=options, on_event=see
                )

            tasks.start_soon(run)
            await begun.wait()
            (info,) = await engine.list()
            assert info.network == policy
            await (await engine.get(info.name)).files.write_text("/go", "", user="root")
    version = await engine.templates.version("demo")
    assert engine.inherited_spec(version.checkpoint).network is None
    async with engine.create(image="template:demo") as sandbox:
        assert sandbox.info.network is None


@pytest.mark.parametrize("runtime_name", ["crun"], indirect=True)
async def test_results_are_removed_unless_a_template_needs_them(engine: LocalEngine, runtime_name: RuntimeName) -> None:
    version, _ = await build(engine, "FROM host\nRUN echo 1 > /one\nRUN echo 2 > /two", runtime=runtime_name)
    layers = LayerCache(engine)
    assert len(await layers.trim(0)) == 1
    async with engine.create(image="template:demo") as sandbox:
        assert (await sandbox.exec("cat /one /two")).stdout == "1\n2\n"
    on_top, _ = await build(
        engine, "FROM template:demo\nRUN cat /one\nUSER user\nWORKDIR /srv", "more", runtime=runtime_name
    )
    async with engine.pool("session", temporary=True, image="template:more") as pool:
        described = await pool.describe()
        assert (described.user, described.cwd, described.os is not None) == ("user", "/srv", True)
    assert on_top.image == "host"
    with pytest.raises(InvalidRequest, match="was built for crun"):
        await engine.create(image="template:demo", runtime="runsc")
    with pytest.raises(InvalidRequest, match="is a template"):
        await engine.warm(1, image="template:demo")
    await engine.delete_checkpoint(version.checkpoint)
    with pytest.raises(InvalidRequest, match="build it again"):
        await engine.create(image="template:demo")


@pytest.mark.parametrize("runtime_name", ["crun"], indirect=True)
async def test_a_create_waits_for_the_ready_command_and_fails_if_it_never_succeeds(
    engine: LocalEngine, runtime_name: RuntimeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = parse_dockerfile("FROM host\nCMD sleep 0.5; touch /tmp/there; sleep 1000")
    for name, ready in (("works", "test -e /tmp/there"), ("never", "echo not yet; false")):
        asked = plan.model_copy(update={"ready_command": ("sh", "-c", ready)})
        options = BuildOptions(runtime=runtime_name)
        await build_template(engine, asked, NoArchives(), name=name, tags=["default"], options=options)
    async with engine.create(image="template:works") as sandbox:
        assert await sandbox.files.exists("/tmp/there")
    monkeypatch.setattr(Sandbox._begin, "__kwdefaults__", {"timeout_s": 0.5})
    with pytest.raises(LaunchFailed, match=r"did not succeed within 0\.5 s; it last ended with 1: not yet"):
        await engine.create(image="template:never")
    assert await engine.list() == []
