"""`build`: a template of a Dockerfile and a directory.

Not here: how a Dockerfile is read and carried out (`atoll.builds`), and what templates there are (`templates.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from atoll.contract.errors import InvalidRequest
from atoll.contract.names import TEMPLATE_PREFIX, split_template
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import LIMITS
from atoll.surfaces.cli.sandbox_options import SandboxOptions, limits, runtime_name

if TYPE_CHECKING:
    from atoll.builds.builder import BuildEvent
    from atoll.client.engine import RemoteEngine
    from atoll.contract.model import BuildLogLine
    from atoll.runtime.engine import LocalEngine

commands = CommandModule()
DOCKERFILE = "Dockerfile"
STDIN = Path("-")


class _BuildCommand(AtollCommand):
    resources = ("runtime", *LIMITS, "allow")


@commands.command(cls=_BuildCommand)
def build(
    context: CommandContext,
    source: Annotated[
        Path | None,
        Argument(metavar="DIR_OR_FILE", help="A directory with a Dockerfile, or a Dockerfile in one.  [default: .]"),
    ] = None,
    name: Annotated[
        str | None, Option("--name", "-t", metavar="NAME[:TAG]", help="What the template is called.")
    ] = None,
    file: Annotated[
        Path | None,
        Option(
            "--file", "-f", metavar="FILE", help="The Dockerfile; - reads standard input.  [default: DIR/Dockerfile]"
        ),
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        Option(
            "--build-arg",
            metavar="K=V",
            help="The value of a build argument (ARG); K alone takes it from our environment. Repeatable.",
        ),
    ] = None,
    ready: Annotated[
        str | None,
        Option(
            "--ready",
            metavar="LINE",
            help="A shell line that succeeds once the start command (CMD) is ready; a create waits for it.",
        ),
    ] = None,
    no_cache: Annotated[bool, Option("--no-cache", help="Run every step, also those whose results are kept.")] = False,
    step_timeout: Annotated[
        float | None,
        Option(
            "--step-timeout", metavar="TIME", parser=values.duration, help="How long a step may take.  [default: 30m]"
        ),
    ] = None,
) -> Work:
    """Build a template: run a Dockerfile in a sandbox.

    The result of its steps is kept under a name, and sandboxes begin as it with `--image template:NAME`. A step that is
    known, with the same files, is not run again. No connection leaves a step unless --allow allows it. Limits are those
    of the steps, and of sandboxes that name none.

    \b
    atoll build . --name web --allow registries
    atoll create box --image template:web
    """
    if name is None:
        raise InvalidRequest("--name is missing: what the template is to be called")
    template, tag = split_template(name.removeprefix(TEMPLATE_PREFIX))
    source = source or Path()
    dockerfile = file or (source / DOCKERFILE if source.is_dir() else source)
    directory = source if source.is_dir() else source.parent
    if dockerfile != STDIN and not dockerfile.is_file():
        raise InvalidRequest(f"there is no {dockerfile}; name a directory with a {DOCKERFILE}, or --file FILE")
    arguments = values.environment(build_arg or [])
    return _build(
        context,
        context.sandbox_options(),
        directory,
        dockerfile,
        (template, tag),
        arguments=arguments,
        ready=ready,
        uses_cache=not no_cache,
        step_timeout_s=step_timeout,
    )


async def _build(
    context: CommandContext,
    options: SandboxOptions,
    directory: Path,
    dockerfile: Path,
    template: tuple[str, str],
    *,
    arguments: dict[str, str],
    ready: str | None,
    uses_cache: bool,
    step_timeout_s: float | None,
) -> int:
    from atoll.builds.builder import STEP_TIMEOUT_S, BuildOptions, build_template
    from atoll.builds.context import BuildContext
    from atoll.builds.dockerfile import MAX_DOCKERFILE_BYTES, SHELL, parse_dockerfile, unused_arguments
    from atoll.runtime.state.templates import reference_of

    files = BuildContext(directory)
    try:
        text = (
            sys.stdin.buffer.read(MAX_DOCKERFILE_BYTES + 1) if dockerfile == STDIN else dockerfile.read_bytes()
        ).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{dockerfile} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    plan = parse_dockerfile(text, arguments=arguments, pack=files.pack)
    for name in unused_arguments(text, arguments):
        render.note(f"warning: no ARG of the Dockerfile is named {render.printable(name)}: --build-arg has no effect")
    if ready is not None:
        plan = plan.model_copy(update={"ready_command": (*SHELL, ready)})
    called, tag = template
    progress = _Progress(silent=context.as_json)
    async with context.open_engine() as engine:
        with render.ProgressBars() as bars:
            build = BuildOptions(
                runtime=runtime_name(options.runtime),
                limits=limits(options),
                network=options.network,
                uses_cache=uses_cache,
                step_timeout_s=step_timeout_s or STEP_TIMEOUT_S,
                progress=bars,
            )
            if context.server is not None:
                from atoll.builds.remote import build_on_server

                remote = cast("RemoteEngine", engine)
                version = await build_on_server(
                    remote, plan, files, name=called, tags=[tag], options=build, on_line=progress.take_line
                )
            else:
                local = cast("LocalEngine", engine)
                version = await build_template(
                    local, plan, files, name=called, tags=[tag], options=build, on_event=progress
                )
    progress.end()
    reference = reference_of(called, tag)
    if context.as_json:
        shown = {"template": reference, "cached_steps": progress.cached, **version.model_dump(mode="json")}
        render.emit_json(shown)
        return 0
    render.say(reference)
    render.note(f"next: `atoll create NAME --image {reference}`")
    return 0


class _Progress:
    """What people see of a build, on standard error: each step once, whether its result was kept, and its output."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._rest = ""
        self.cached: list[int] = []
        """The steps whose results were kept from before."""

    def __call__(self, event: BuildEvent) -> None:
        if event.kind == "output":
            *lines, self._rest = (self._rest + event.text).split("\n")
            for line in lines:
                self._show(f"  {line}")
            return
        self.end()
        if event.kind == "cached":
            self._show_cached(event.step)
        else:
            self._show(f"[{event.step}/{event.steps}] {event.text}")

    def take_line(self, line: BuildLogLine) -> None:
        """As a call, for a line of a server's log. Why it failed is said by the error."""
        if line.kind == "cached":
            self._show_cached(line.step)
        elif line.level != "error":
            self._show(f"  {line.text}" if line.kind == "output" else line.text)

    def end(self) -> None:
        """Show what a program has printed without an end of its line."""
        if self._rest:
            self._show(f"  {self._rest}")
            self._rest = ""

    def _show_cached(self, step: int) -> None:
        self.cached.append(step)
        self._show("  the result is kept from before")

    def _show(self, line: str) -> None:
        if not self._silent:
            render.note(render.printable(line))
