"""A build: the steps of a plan, carried out in a sandbox, each result kept as a checkpoint.

Owns the order of things: what a base gives, the state that steps change (variables, user, directory), when a sandbox is
made, and that a build which fails, is cancelled or is killed leaves nothing behind but the results of steps that were
complete. A sandbox of a build has the network policy that its caller gives it and no other; its results have none. Not
here: which results are kept (`layers.py`), and what the files of a copy are (`context.py`, `uploads.py`).
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from atoll.builds.layers import LayerCache, key_of
from atoll.builds.plan import (
    ArgStep,
    BuildPlan,
    BuildStep,
    CopyStep,
    EnvStep,
    RunStep,
    UserStep,
    WorkdirStep,
    check_variables,
    expand,
)
from atoll.contract.errors import (
    BuildFailed,
    DiskFull,
    ExecTimeout,
    FileError,
    InvalidRequest,
    PermissionDenied,
    SandboxNotFound,
    UserNotFound,
)
from atoll.contract.inside import DEFAULT_PATH
from atoll.contract.model import Limits, RuntimeName, TemplateVersion
from atoll.contract.names import TEMPLATE_PREFIX
from atoll.contract.network import NetworkPolicy
from atoll.runtime.engine import LocalEngine
from atoll.runtime.images.fetch import ProgressCallback
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.state.store import now

STEP_TIMEOUT_S = 1800.0
_MAX_SHOWN_CHARS = 4000
"""Of the output of a failed step, in the message."""
_MAX_LABEL_CHARS = 200
_OUTPUT_BYTES = 64 * 1024
_UNREACHABLE = re.compile(
    r"(?i)could not resolve|name resolution|name or service not known|getaddrinfo|EAI_AGAIN|network is unreachable"
    r"|unable to resolve|no such host|\b403\b"
)
"""What programs print that would have connected to somewhere."""
_COPY = """
stage=$1 dest=$2 owner=$3 mode=$4; shift 4
cd "$stage" || exit 1
if [ -n "$owner" ]; then chown -hR "$owner" . || exit 1; fi
if [ -n "$mode" ]; then chmod -R "$mode" . || exit 1; fi
into=
case $dest in */) into=1 ;; esac
if [ $# -gt 1 ] || [ -d "$dest" ]; then into=1; fi
made() { [ -d "$1" ] || { mkdir -p "$1" && { [ -z "$owner" ] || chown "$owner" "$1"; }; }; }
for each; do
    if [ -d "./$each" ] && [ ! -L "./$each" ]; then
        made "$dest" || exit 1
        for one in "./$each"/* "./$each"/.[!.]* "./$each"/..?*; do
            if [ -e "$one" ] || [ -L "$one" ]; then cp -a "$one" "$dest/" || exit 1; fi
        done
    elif [ -e "./$each" ] || [ -L "./$each" ]; then
        if [ -n "$into" ]; then made "$dest" && cp -a "./$each" "$dest/" || exit 1
        else made "${dest%/*}/" && cp -a "./$each" "$dest" || exit 1; fi
    else
        echo "$each is not in the files that were given for this step"; exit 1
    fi
done
"""
"""Files that were unpacked beside their destination are copied to it: of a directory, what is in it. A destination that
exists keeps its owner and its mode."""

_CarryOut = Callable[[Sandbox], Awaitable[None]]
BuildAdmission = Callable[[str, Limits], AbstractAsyncContextManager[object]]
"""A context in which a sandbox of this name may run, with these limits in force."""


class ArchiveSource(Protocol):
    """Where the files of copies come from."""

    def digest(self, archive: str) -> str:
        """What identifies the content of an archive."""

    def read(self, archive: str) -> AsyncIterator[bytes]:
        """The bytes of an archive: a tar, which need not be trusted."""


class NoArchives:
    """For builds that copy nothing."""

    def digest(self, archive: str) -> str:
        raise BuildFailed(f"there are no files {archive[:12]} for this copy")

    def read(self, archive: str) -> AsyncIterator[bytes]:
        raise BuildFailed(f"there are no files {archive[:12]} for this copy")


class BuildEvent(NamedTuple):
    """What a build tells while it runs."""

    kind: Literal["begun", "cached", "output"]
    step: int
    """From 1. 0: it is about no step."""
    steps: int
    text: str


class BuildOptions(NamedTuple):
    """How a build is carried out."""

    runtime: RuntimeName | None = None
    limits: Limits = Limits()
    network: NetworkPolicy | None = None
    """Unset: no connection leaves the sandbox of a step."""
    sudo: bool = False
    """Whether `sudo` works in steps of `user`, or of the base image's own user. It is no part of the result: it
    is asked for with each sandbox."""
    uses_cache: bool = True
    """False: every step is run."""
    step_timeout_s: float = STEP_TIMEOUT_S
    admit: BuildAdmission | None = None
    progress: ProgressCallback | None = None
    """Called while the base image is fetched."""


@dataclass
class _State:
    """What steps change, and what has been made so far."""

    image: str
    known: dict[str, str]
    """Variables of the base."""
    parent: str
    """What identifies the result of the steps so far."""
    layer: str | None
    """The checkpoint of that. None: the image itself."""
    user: str
    cwd: str
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    chosen_user: str | None = None
    chosen_cwd: str | None = None
    start_command: tuple[str, ...] = ()
    ready_command: tuple[str, ...] = ()
    entered: str | None = None
    """The directory of the last step that ran, which therefore exists."""
    forced: bool = False

    @property
    def variables(self) -> dict[str, str]:
        return {**self.known, **self.arguments, **self.env}


async def build_template(
    engine: LocalEngine,
    plan: BuildPlan,
    archives: ArchiveSource,
    *,
    name: str,
    tags: Sequence[str],
    build_id: str | None = None,
    options: BuildOptions | None = None,
    on_event: Callable[[BuildEvent], None] = lambda _event: None,
) -> TemplateVersion:
    """Build a plan, and let the template `name` mean the result under `tags`.

    Raises:
        BuildFailed: a step failed, or the plan cannot be carried out; the message names the step, and has the end of
            what it printed.
        AtollError: the base cannot be had, or the sandbox could not be made.
    """
    build = _Build(engine, plan, archives, options or BuildOptions(), on_event)
    version = await build.run(build_id or os.urandom(8).hex())
    await engine.templates.put(name, tags, version)
    await build.layers.trim()
    return version


class _Build:
    def __init__(
        self,
        engine: LocalEngine,
        plan: BuildPlan,
        archives: ArchiveSource,
        options: BuildOptions,
        on_event: Callable[[BuildEvent], None],
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._archives = archives
        self._options = options
        self._on_event = on_event
        self._runtime: RuntimeName = options.runtime or engine.default_runtime
        self._prefix = f"build-{os.urandom(6).hex()}"
        self._name = f"{self._prefix}.step"
        self._sandbox: Sandbox | None = None
        """The sandbox that has the result of the last step, which is shut down."""
        self._step = 0
        self.layers = LayerCache(engine)

    async def run(self, build_id: str) -> TemplateVersion:
        plan = self._plan
        state = await self._begin()
        limits = self._engine.effective_limits(self._options.limits, self._runtime)
        admit = self._options.admit
        async with (
            nullcontext() if admit is None else admit(self._name, limits),
            self._engine.scratch(self._prefix),
        ):
            for number, step in enumerate(plan.steps, 1):
                self._step = number
                try:
                    await self._take(state, step)
                except BuildFailed as error:
                    raise self._failed(error.message, error.hint) from None
                except (FileError, UserNotFound, InvalidRequest) as error:
                    raise self._failed(f"{_shown(step)}: {error.message}") from None
            self._step = 0
            if state.chosen_cwd not in (None, state.entered):

                async def enter(sandbox: Sandbox) -> None:
                    await self._enter(sandbox, state.cwd, state.user)

                await self._layer(state, ["workdir", state.cwd, state.user], enter, force=False)
            if state.layer is None:
                await self._make(state, [], None)
        self.layers.finish()
        return TemplateVersion(
            build_id=build_id,
            checkpoint=state.layer or "",
            image=state.image,
            runtime=self._runtime,
            created_at=now(),
            env=state.env,
            user=state.chosen_user or plan.user,
            cwd=state.chosen_cwd,
            start_command=plan.start_command or state.start_command,
            ready_command=plan.ready_command or (() if plan.start_command else state.ready_command),
        )

    async def _begin(self) -> _State:
        plan, wanted = self._plan, self._plan.image or self._engine.default_image
        if wanted.startswith(TEMPLATE_PREFIX):
            version = await self._engine.templates.version(wanted)
            if self._options.runtime not in (None, version.runtime):
                raise BuildFailed(f"{wanted} was built for {version.runtime}, not for {self._options.runtime}")
            self._runtime = version.runtime
            base = await self._engine.images.resolve(version.image, progress=self._options.progress)
            return _State(
                image=version.image,
                known={"PATH": DEFAULT_PATH, **base.env},
                parent=version.checkpoint,
                layer=version.checkpoint,
                user=version.user or plan.first_user,
                cwd=version.cwd or plan.first_cwd,
                env=dict(version.env),
                chosen_user=version.user,
                chosen_cwd=version.cwd,
                start_command=version.start_command,
                ready_command=version.ready_command,
            )
        self._engine.effective_limits(self._options.limits, self._runtime)  # refuses one that cannot be used
        if not self._engine.runtimes()[self._runtime].several_users:
            raise BuildFailed(f"{self._runtime} has one user; a build needs root, too: use crun, runc or runsc")
        base = await self._engine.images.resolve(wanted, progress=self._options.progress)
        return _State(
            image=wanted,
            known={"PATH": DEFAULT_PATH, **base.env},
            parent=f"{base.digest} {self._runtime}",
            layer=None,
            user=base.user or plan.first_user,
            cwd=base.working_directory or plan.first_cwd,
        )

    # ---------------------------------------------------------------------------------------------------------- steps

    async def _take(self, state: _State, step: BuildStep) -> None:
        self._tell("begun", _shown(step))
        match step:
            case EnvStep():
                before, after = state.variables, dict[str, str]()
                for name, text in step.variables.items():
                    after[name] = expand(text, before)
                    check_variables(after)
                state.env |= after
                check_variables(state.env, state.arguments)
            case ArgStep():
                given = self._plan.arguments.get(step.name)
                value = given if given is not None else step.default and expand(step.default, state.variables)
                if value is not None:
                    state.arguments[step.name] = value
                    check_variables(state.env, state.arguments)
            case UserStep():
                state.user = state.chosen_user = expand(step.user, state.variables)
                if not state.user:
                    raise BuildFailed(f"the user {step.user!r} is empty")
            case WorkdirStep():
                path = expand(step.path, state.variables)
                state.cwd = state.chosen_cwd = posixpath.normpath(posixpath.join(state.cwd, path))
            case RunStep():
                await self._run(state, step)
            case CopyStep():
                await self._copy(state, step)

    async def _run(self, state: _State, step: RunStep) -> None:
        env = {**state.arguments, **state.env}
        user = step.user or state.user
        said = ["run", step.command, env, state.cwd, user]
        state.entered = state.cwd

        async def carry_out(sandbox: Sandbox) -> None:
            await self._enter(sandbox, state.cwd, user)
            await self._exec(sandbox, step.command, _shown(step), env=env, cwd=state.cwd, user=user)

        await self._layer(state, said, carry_out, force=step.force)

    async def _copy(self, state: _State, step: CopyStep) -> None:
        destination = expand(step.destination, state.variables)
        resolved = posixpath.normpath(posixpath.join(state.cwd, destination))
        if destination.endswith(("/", "/.")) or destination in (".", ""):
            resolved = resolved.rstrip("/") + "/"
        owner = expand(step.owner, state.variables) if step.owner else (state.user if step.owned_by_user else "")
        content = self._archives.digest(step.archive)
        said = ["copy", content, step.sources, step.are_patterns, resolved, owner, step.mode]

        async def carry_out(sandbox: Sandbox) -> None:
            stage = f"/.atoll-copy-{os.urandom(6).hex()}"
            try:
                await sandbox.files.tar_in(stage, self._archives.read(step.archive), user="root")
            except PermissionDenied as error:
                raise BuildFailed(f"the files of the copy were refused: {error.message}") from None
            except DiskFull:
                raise BuildFailed("the files of the copy do not fit on the sandbox's disk") from None
            sources = await _found(sandbox, stage, step) if step.are_patterns else step.sources
            script = ("/bin/sh", "-c", _COPY, "sh", stage, resolved, _group_too(owner), step.mode or "", *sources)
            await self._exec(sandbox, script, _shown(step), env={}, cwd="/", user="root")
            await sandbox.files.remove(stage, recursive=True, user="root")

        await self._layer(state, said, carry_out, force=step.force)

    async def _exec(
        self, sandbox: Sandbox, command: Sequence[str], what: str, *, env: Mapping[str, str], cwd: str, user: str
    ) -> None:
        try:
            done = await sandbox.exec_bytes(
                command,
                env=env,
                cwd=cwd,
                user=user,
                merge_stderr=True,
                timeout_s=self._options.step_timeout_s,
                output_limit_bytes=_OUTPUT_BYTES,
                on_stdout=lambda data: self._tell("output", data.decode("utf-8", "replace")),
            )
        except ExecTimeout:
            raise BuildFailed(f"{what} did not end within {self._options.step_timeout_s:g} s") from None
        if done.exit_code == 0:
            return
        why = "used up its memory" if done.out_of_memory else f"failed with exit code {done.exit_code}"
        output = done.stdout.decode("utf-8", "replace").strip()[-_MAX_SHOWN_CHARS:]
        said = f"{what} {why}:\n{output}" if output else f"{what} {why}, and printed nothing"
        if self._options.network is None and _UNREACHABLE.search(output):
            said += "\n(no connection leaves a step unless the build allows it: `atoll build --allow registries`)"
        raise BuildFailed(said)

    async def _enter(self, sandbox: Sandbox, cwd: str, user: str) -> None:
        """The directory of a step is made if it is missing. It belongs to the step's user."""
        try:
            await sandbox.files.mkdir(cwd, user=user)
        except PermissionDenied:
            await sandbox.files.mkdir(cwd, user="root")
            await sandbox.files.chown(cwd, user, user="root")

    # --------------------------------------------------------------------------------------------------------- layers

    async def _layer(self, state: _State, said: Sequence[object], carry_out: _CarryOut, *, force: bool) -> None:
        """The result of a step: one that is kept, or a new one."""
        state.forced = state.forced or force or not self._options.uses_cache
        key = key_of(state.parent, [*said])
        if not state.forced and await self._reuse(state, key):
            return
        async with self.layers.making(key):
            if not state.forced and await self._reuse(state, key):
                return  # another build has made it meanwhile
            await self._make(state, said, carry_out)

    async def _reuse(self, state: _State, key: str) -> bool:
        found = await self.layers.find(key)
        if found is None:
            return False
        await self._drop()
        if self._step:
            self._tell("cached", "")
        state.layer = state.parent = found
        self.layers.used(found)
        return True

    async def _make(self, state: _State, said: Sequence[object], carry_out: _CarryOut | None) -> None:
        sandbox = await self._ready_sandbox(state)
        if carry_out is not None:
            await carry_out(sandbox)
        key = key_of(state.parent, [*said])
        made = await self._engine.checkpoint_files(sandbox.name, self.layers.label(key))
        state.layer = state.parent = made.id
        self.layers.used(made.id)

    async def _ready_sandbox(self, state: _State) -> Sandbox:
        """A sandbox that runs, with the result of the last step."""
        if self._sandbox is not None:
            await self._engine.wake(self._sandbox.name)
            return self._sandbox
        is_first = state.layer is None
        made = await self._engine.create(
            self._name,
            image=state.image if is_first else None,
            runtime=self._runtime if is_first else None,
            limits=self._options.limits,
            network=self._options.network,
            sudo=self._options.sudo,
            from_checkpoint=state.layer,
        )
        self._sandbox = made
        # Of a checkpoint a sandbox has the policy that its first owner has now, if that still lives.
        await self._engine.set_network(made.name, self._options.network)
        return made

    async def _drop(self) -> None:
        """A result that is kept takes the place of the sandbox."""
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            try:
                await self._engine.destroy(sandbox.name)
            except SandboxNotFound:
                return

    # ---------------------------------------------------------------------------------------------------------- words

    def _tell(self, kind: Literal["begun", "cached", "output"], text: str) -> None:
        self._on_event(BuildEvent(kind, self._step, len(self._plan.steps), text))

    def _failed(self, message: str, hint: str | None = None) -> BuildFailed:
        return BuildFailed(f"step {self._step} of {len(self._plan.steps)}: {message}", step=self._step, hint=hint)


async def _found(sandbox: Sandbox, stage: str, step: CopyStep) -> Sequence[str]:
    """The names that patterns mean among the unpacked files."""
    found: list[str] = []
    for pattern in step.sources:
        plain = posixpath.normpath(pattern)
        if plain.startswith(("/", "../")) or plain == "..":
            raise BuildFailed(f"{pattern!r} leads outside of the files that were given")
        if await sandbox.files.exists(posixpath.join(stage, plain), user="root"):
            found.append(plain)
            continue
        matched = await sandbox.files.glob(plain, cwd=stage, hidden=True, user="root")
        if not matched:
            raise BuildFailed(f"{pattern!r} matches none of the files that were given")
        found += [each.name for each in matched]
    return found


def _group_too(owner: str) -> str:
    """With the user's own group, if none is named: `chown USER:` means that, of a name."""
    if not owner or ":" in owner:
        return owner
    return f"{owner}:{owner}" if owner.isdecimal() else f"{owner}:"


def _shown(step: BuildStep) -> str:
    match step:
        case RunStep():
            text = step.shown or f"RUN {shlex.join(step.command)}"
        case CopyStep():
            text = step.shown or f"COPY {' '.join(step.sources)} {step.destination}"
        case WorkdirStep():
            text = f"WORKDIR {step.path}"
        case UserStep():
            text = f"USER {step.user}"
        case EnvStep():
            text = f"ENV {' '.join(step.variables)}"
        case _:
            text = f"ARG {step.name}"
    line = text.split("\n", 1)[0]
    return line if len(line) <= _MAX_LABEL_CHARS else f"{line[:_MAX_LABEL_CHARS]}…"
