"""`bundle init`, `check` and `push`: tools of one's own as an archive that agents of a server call.

Not here: what a bundle is, and how it is packed and read (`bundles/`), and where a server keeps them
(`server/bundles.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, cast

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import FAILED, render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work
from atoll.surfaces.cli.grammar import Argument, Option
from atoll.surfaces.cli.options import LIMITS

if TYPE_CHECKING:
    from atoll.bundles.workspace import BundleFile, WorkspaceInstance
    from atoll.client.engine import RemoteEngine
    from atoll.tools.tool import ToolResult

commands = CommandModule("bundle", "Write, check and upload bundles of tools for agents.")
SourceArgument = Annotated[
    Path, Argument(metavar="DIR_OR_TGZ", help="A directory with manifest.json and tools/, or an archive of one.")
]
_MANIFEST = {
    "schema_version": 1,
    "tools": [{"name": "read_page", "entrypoint": "tools.read_page:run"}],
    "requirements": [],
    "node_modules": [],
}
_TOOL = '''"""A tool: a function that gets what the model gives, and returns what the model sees."""

from pathlib import Path

WORKSPACE = Path("/workspace")


def run(args: dict[str, object]) -> dict[str, object]:
    """Read a page of the site.

    Args:
        path (str): Which one, such as index.html.
    """
    path = args.get("path")
    if not isinstance(path, str):
        return {"ok": False, "content": "path must be a string"}
    page = (WORKSPACE / path).resolve()
    if WORKSPACE not in page.parents:
        return {"ok": False, "content": f"{path} is not in the workspace"}
    if not page.is_file():
        there = ", ".join(sorted(each.name for each in WORKSPACE.iterdir()))
        return {"ok": False, "content": f"there is no {path}; there are {there}"}
    return {"ok": True, "content": page.read_text(encoding="utf-8")}
'''
_EXAMPLE = {
    "manifest.json": json.dumps(_MANIFEST, indent=2) + "\n",
    "tools/__init__.py": "",
    "tools/read_page.py": _TOOL,
    "template/index.html": "<h1>A page</h1>\n",
}


@commands.command()
async def init(
    context: CommandContext, directory: Annotated[Path, Argument(metavar="DIR", help="Where to. It is made.")]
) -> int:
    """Write a small bundle that works, to begin with."""
    if taken := [name for name in _EXAMPLE if (directory / name).exists()]:
        raise InvalidRequest(f"{directory / taken[0]} exists already; name another directory")
    for name, text in _EXAMPLE.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    render.note(f'next: `atoll bundle check {directory} --tool read_page --args \'{{"path": "index.html"}}\'`')
    return context.answer({"directory": str(directory), "files": [*_EXAMPLE]}, str(directory))


class CheckCommand(AtollCommand):
    resources = ("image", "runtime", *LIMITS, "env", "allow", "secret_env")


@commands.command(cls=CheckCommand)
def check(
    context: CommandContext,
    source: SourceArgument,
    tool: Annotated[str | None, Option("--tool", metavar="NAME", help="Call this tool.")] = None,
    args: Annotated[str | None, Option("--args", metavar="JSON", help="Its arguments.  [default: none]")] = None,
) -> Work:
    """Check that a bundle works, in a sandbox here.

    It is packed, read as a server does, built in a sandbox, and its tools are imported. With --tool, one of them is
    called, and what a model would see of its result is printed. The exit status is 1 if any of it fails. Nothing is
    left.
    """
    context.require_local()
    if args is not None and tool is None:
        raise InvalidRequest("--args are the arguments of a tool; name it with --tool")
    try:
        arguments = json.loads(args or "{}")
    except ValueError as error:
        raise InvalidRequest(f"--args is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidRequest('--args must be a JSON object, such as {"path": "index.html"}')
    return _check(context, source, tool, arguments)


async def _check(context: CommandContext, source: Path, tool: str | None, arguments: dict[str, Any]) -> int:
    from atoll.bundles.build import remove_built
    from atoll.bundles.workspace import BundleFile, Workspace, WorkspaceSpec
    from atoll.server.redaction import SecretRedaction
    from atoll.surfaces.cli.sandbox_options import engine_arguments

    given = engine_arguments(context.sandbox_options())
    chosen = {name: given[name] for name in ("image", "runtime", "network", "limits", "secret_env")}
    with _archive(source) as path:
        from atoll.bundles.archive import read_bundle

        read = await read_bundle(path)
        bundle = BundleFile(path=path, sha256=read.sha256, manifest=read.manifest, tools=read.tools)
        spec = WorkspaceSpec(
            sandbox=f"bundle-check-{os.urandom(4).hex()}", bundle=bundle, environment=given["env"], **chosen
        )
        async with context.open_engine() as engine:
            known = {each.id for each in await engine.checkpoints()}
            workspace = Workspace(engine, spec, _ignore)
            if tool is not None:
                workspace.tools([tool])  # refused before anything is made
            try:
                result = None
                instance = await workspace.boot()
                if tool is not None:
                    result = await workspace.tools([tool]).handle_tool_call(tool, arguments)
            finally:
                await workspace.destroy()
                if {each.id for each in await engine.checkpoints()} - known:
                    await remove_built(engine, read.sha256)
        redacting = SecretRedaction(spec.secret_env)  # as on a server
        instance = await redacting.instance(workspace.instance or instance)
        result = None if result is None else await redacting.result(result)
        _show(context, bundle, read.size_bytes, instance, result)
    return FAILED if result is not None and result.is_error else 0


async def _ignore(_instance: WorkspaceInstance) -> None: ...


def _show(
    context: CommandContext, bundle: BundleFile, size_bytes: int, instance: WorkspaceInstance, result: ToolResult | None
) -> None:
    if context.as_json:
        shown = {
            "sha256": bundle.sha256,
            "size_bytes": size_bytes,
            "tools": [tool.model_dump(mode="json") for tool in bundle.tools],
            "log": instance.log,
            "result": None if result is None else result.model_dump(mode="json"),
        }
        render.emit_json(shown)
        return
    count = "1 tool" if len(bundle.tools) == 1 else f"{len(bundle.tools)} tools"
    render.note(f"{count}, {render.human_bytes(size_bytes)}, sha256 {bundle.sha256}")
    for tool in bundle.tools:
        takes = ", ".join(tool.input_schema.get("properties", {})) or "anything"
        render.note(f"  {tool.name}: {tool.description}  (takes {takes})")
    if result is None:
        render.say("ok")
        return
    for line in instance.log.splitlines():
        render.note(f"  | {line}")
    render.say(result.text)


@commands.command()
async def push(context: CommandContext, source: SourceArgument) -> int:
    """Upload a bundle to a server.

    It is the server of ATOLL_URL, or without one that of this machine's state directory. Prints what
    `provisioning_bundle` of a config needs. The same bytes again are the same bundle.
    """
    with _archive(source) as path:
        stored = await _upload(context, path)
    named = {"url": f"nap-bundle://{stored['bundle_id']}", "sha256": stored["sha256"]}
    return context.answer({**stored, **named}, f'"provisioning_bundle": {json.dumps(named)}')


async def _upload(context: CommandContext, path: Path) -> dict[str, Any]:
    if context.server is not None:
        async with context.open_engine() as engine:
            return await cast("RemoteEngine", engine).upload_bundle(path)
    from atoll.client.transfer import read_chunks

    _, tenant = context.resolved_place()
    async with context.open_server() as server:
        stored, _ = await server.bundles.add(tenant, read_chunks(path, lambda _done: None))
        await server.record_local("bundles_create", f"bundles/{stored.bundle_id}", tenant)
    return {"bundle_id": stored.bundle_id, "sha256": stored.sha256, "size_bytes": stored.size_bytes}


@contextmanager
def _archive(source: Path) -> Iterator[Path]:
    """The archive at `source`, packed if that is a directory."""
    if not source.is_dir():
        if not source.exists():
            raise InvalidRequest(f"there is no {source}; name a directory with manifest.json, or an archive of one")
        yield source
        return
    import tempfile

    from atoll.bundles.archive import pack

    with tempfile.NamedTemporaryFile(prefix="atoll-bundle-", suffix=".tgz") as file:
        pack(source, cast("BinaryIO", file))
        file.flush()
        yield Path(file.name)
