"""`build`: a template of a Dockerfile and a directory.

Not here: how a Dockerfile is read and carried out (`atoll.builds`), and what templates there are (`templates.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from atoll.contract.errors import InvalidRequest
from atoll.contract.names import TEMPLATE_PREFIX, split_template
from atoll.surfaces.cli import render, values
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import LIMITS
from atoll.surfaces.cli.sandbox_options import SandboxOptions, limits, runtime_name

if TYPE_CHECKING:
    from atoll.builds.builder import BuildEvent

commands = CommandModule()
DOCKERFILE = "Dockerfile"


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
        Path | None, Option("--file", "-f", metavar="FILE", help="The Dockerfile.  [default: DIR/Dockerfile]")
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
    if not dockerfile.is_file():
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
    from atoll.builds.dockerfile import SHELL, parse_dockerfile

    files = BuildContext(directory)
    try:
        text = dockerfile.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{dockerfile} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    plan = parse_dockerfile(text, arguments=arguments, pack=files.pack)
    if ready is not None:
        plan = plan.model_copy(update={"ready_command": (*SHELL, ready)})
    name, tag = template
    async with context.open_local_engine() as engine:
        with render.ProgressBars() as bars:
            version = await build_template(
                engine,
                plan,
                files,
                name=name,
                tags=[tag],
                options=BuildOptions(
                    runtime=runtime_name(options.runtime),
                    limits=limits(options),
                    network=options.network,
                    uses_cache=uses_cache,
                    step_timeout_s=step_timeout_s or STEP_TIMEOUT_S,
                    progress=bars,
                ),
                on_event=_Progress(silent=context.as_json),
            )
    reference = f"{TEMPLATE_PREFIX}{name}" if tag == "default" else f"{TEMPLATE_PREFIX}{name}:{tag}"
    if context.as_json:
        render.emit_json({"template": reference, **version.model_dump(mode="json")})
        return 0
    render.say(reference)
    render.note(f"next: `atoll create NAME --image {reference}`")
    return 0


class _Progress:
    """What people see of a build, on standard error: each step once, whether its result was kept, and its output."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._rest = ""

    def __call__(self, event: BuildEvent) -> None:
        if self._silent:
            return
        if event.kind == "output":
            *lines, self._rest = (self._rest + event.text).split("\n")
            for line in lines:
                render.note(f"  {render.printable(line)}")
            return
        if self._rest:
            render.note(f"  {render.printable(self._rest)}")
            self._rest = ""
        if event.kind == "cached":
            render.note("  the result is kept from before")
        else:
            render.note(f"[{event.step}/{event.steps}] {render.printable(event.text)}")
