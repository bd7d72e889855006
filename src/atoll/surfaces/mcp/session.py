"""One client session: the tools and files of its own sandboxes.

Owns how calls report progress and are cancelled, and how a file becomes a resource. Not here: how messages are carried
(`stdio.py`, `http.py`), tools (`tools/`), and what a server says of its vocabularies (each says it itself, see
`tools/vocabularies.py`). Used by `atoll mcp` and `http.py`.

Each client session has a sandbox pool of its own, with a random session id. Every name from a client is looked up in
that pool, so no client can name a sandbox of another.
"""

from __future__ import annotations

import base64
import mimetypes
import posixpath
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

import atoll
from atoll.contract.errors import AtollError, CallerError, FileError, InvalidRequest, PathNotFound, SandboxNotFound
from atoll.contract.model import FileEntry
from atoll.runtime.interface import Engine
from atoll.runtime.project.project import Project
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.tools import export
from atoll.tools.briefing import briefing
from atoll.tools.tool import ToolResult, ToolSet, readable
from atoll.tools.view import HOME, PoolContext, as_text, media_type, start_directory
from atoll.tools.vocabularies import DEFAULT, choose, session_tools

DISCONNECTED = "atoll.disconnected"
"""The key in the scope of an HTTP request for the event that the client has disconnected."""
MAX_RESOURCE_BYTES = 4 * 1024 * 1024
MAX_CONCURRENT_CALLS = 32
"""Calls of one client session that run at once. Further calls wait."""
MAX_RESOURCE_READ_S = 30.0
MAX_LISTED_FILES = 200
"""Files of each sandbox that are listed as resources."""
PROGRESS_INTERVAL_S = 1.0

_RESOURCE_NOT_FOUND = -32002
"""The code in revisions of the protocol with a handshake; later ones use INVALID_PARAMS."""
_MAX_LINE_CHARS = 200
_SCHEME = "sandbox://"
_TEXTUAL = re.compile(r"text/.*|application/(json|javascript|xml|toml|yaml|x-sh|sql)|.*\+(json|xml)")
_RequestContext = ServerRequestContext[Any, Any]


# -------------------------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class ServerConfig:
    """What every client session of a server gets."""

    tools: Sequence[str] = (DEFAULT,)
    """Names of vocabularies, see `tools/vocabularies.py`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `SandboxPool`: the image, the limits and the network policy of all sandboxes."""
    project: Project | None = None
    """A directory of this machine of which the sandbox `default` of each session has a copy. None: of nothing."""
    save_dir: Path | None = None
    """A directory of this machine where clients may save files, with the tool `save_file` of `workspace`. None: the
    tool is not offered."""


@asynccontextmanager
async def open_session(engine: Engine, config: ServerConfig, name: str | None = None) -> AsyncIterator[Server[Any]]:
    """A session for one client. Its sandboxes are destroyed when the context ends, however it ends.

    With a `name`, it is the session with this id: its sandboxes are kept, and sleep until they are used again.

    Raises:
        InvalidRequest: the name or an option is not allowed, or the vocabularies cannot be combined.
        Unenforceable, RuntimeUnavailable, VolumeNotFound: an option is wrong on this machine.
    """
    chosen = choose(config.tools)
    kept = name is not None
    id = f"mcp-{secrets.token_hex(8)}" if name is None else name
    async with engine.pool(id, temporary=not kept, sleeps=kept, project=config.project, **config.options) as pool:
        await pool.check()
        tools = session_tools(pool, chosen, save_dir=config.save_dir)
        instructions = briefing(await pool.describe(), chosen, kept=kept, saves="save_file" in tools)
        instructions += f" Files can be read as resources too: {_SCHEME}NAME/absolute/path."
        yield SessionHandlers(pool, tools, instructions).server


# ------------------------------------------------------------------------------------------------------------- session


class SessionHandlers:
    """The tools and resources of one client session, as handlers of the SDK's `server`."""

    def __init__(self, pool: SandboxPool, tools: ToolSet, instructions: str) -> None:
        self._pool = pool
        self._context = PoolContext(pool)
        self._tools = tools
        self._tool_list = types.ListToolsResult.model_validate({"tools": export.definitions(self._tools, "mcp")})
        self._slots = anyio.Semaphore(MAX_CONCURRENT_CALLS)
        self.server: Server[Any] = Server(
            "atoll",
            version=atoll.__version__,
            title="Atoll",
            instructions=instructions,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )

    async def _list_tools(
        self, _ctx: _RequestContext, _args: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return self._tool_list

    # -------------------------------------------------------------------------------------------------------- calls

    async def _call_tool(self, ctx: _RequestContext, args: types.CallToolRequestParams) -> types.CallToolResult:
        progress = _CallProgress(ctx.session) if ctx.meta and "progress_token" in ctx.meta else None
        disconnected = ctx.request.scope.get(DISCONNECTED) if ctx.request is not None else None
        result: ToolResult | None = None
        async with anyio.create_task_group() as background:
            if disconnected is not None:
                background.start_soon(_cancel_on, background.cancel_scope, disconnected)
            if progress is not None:
                background.start_soon(progress.notify)
            async with self._slots:
                on_output = None if progress is None else progress.on_output
                result = await self._tools.handle_tool_call(args.name, args.arguments, on_output=on_output)
            background.cancel_scope.cancel()
        if result is None:
            raise MCPError(types.INTERNAL_ERROR, "the client has disconnected")
        return types.CallToolResult.model_validate(export.result(result, "mcp"))

    # ---------------------------------------------------------------------------------------------------- resources

    async def _list_templates(
        self, _ctx: _RequestContext, _args: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        about = types.ResourceTemplate(
            uri_template=f"{_SCHEME}{{sandbox}}/{{+path}}",
            name="file",
            title="A file of a sandbox",
            description="sandbox is its name, path the absolute path in it without the first slash. "
            f"{MAX_RESOURCE_BYTES >> 20} MiB at most.",
        )
        return types.ListResourceTemplatesResult(resource_templates=[about])

    async def _list_resources(
        self, ctx: _RequestContext, _args: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """The files where the tools start in running sandboxes. Sleeping ones are not woken; a sandbox that fails is
        left out."""
        found: list[types.Resource] = []
        with self._translating_errors(ctx):
            running = [each.name for each in await self._pool.list() if each.status == "running"]
        for name in running:
            entries: list[FileEntry] = []
            start = HOME
            with suppress(AtollError), anyio.move_on_after(MAX_RESOURCE_READ_S):
                sandbox = await self._pool.find(name)
                start = start_directory(sandbox)
                entries = await sandbox.files.glob("*", cwd=start, limit=MAX_LISTED_FILES)
            found += [
                types.Resource(
                    uri=_uri(name, f"{start}/{entry.name}"),
                    name=_printable(readable(f"{name}:{entry.name}")),
                    size=entry.size,
                )
                for entry in entries
                if entry.kind == "file"
            ]
        return types.ListResourcesResult(resources=found)

    async def _read_resource(
        self, ctx: _RequestContext, args: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(args.uri)
        async with self._slots:
            with self._translating_errors(ctx):
                name, path = _parse(uri)
                with anyio.fail_after(MAX_RESOURCE_READ_S):
                    sandbox = await self._pool.find(name)
                    data = await sandbox.files.read_bytes(path, limit=MAX_RESOURCE_BYTES + 1)
                if len(data) > MAX_RESOURCE_BYTES:
                    raise InvalidRequest(
                        f"{path}: more than {MAX_RESOURCE_BYTES >> 20} MiB, the limit for a resource; read it in parts "
                        "with a tool"
                    )
        text = as_text(data)
        if text is not None:
            guessed = mimetypes.guess_type(path)[0] or ""
            mime = guessed if _TEXTUAL.fullmatch(guessed) else "text/plain"
            return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=mime, text=text)])
        blob = base64.b64encode(data).decode()
        mime = media_type(data, path)
        return types.ReadResourceResult(contents=[types.BlobResourceContents(uri=uri, mime_type=mime, blob=blob)])

    @contextmanager
    def _translating_errors(self, ctx: _RequestContext) -> Iterator[None]:
        """Translate our errors to the protocol's, with messages for this session."""
        try:
            yield
        except AtollError as error:
            code = types.INVALID_PARAMS if isinstance(error, CallerError | FileError) else types.INTERNAL_ERROR
            handshake = ctx.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS
            if handshake and isinstance(error, SandboxNotFound | PathNotFound):
                code = _RESOURCE_NOT_FOUND
            raise MCPError(code, readable(self._context.explain(error)), {"code": error.code}) from error
        except TimeoutError as error:
            raise MCPError(types.INTERNAL_ERROR, f"reading timed out after {MAX_RESOURCE_READ_S:g} s") from error


def _uri(sandbox: str, path: str) -> str:
    return f"{_SCHEME}{sandbox}{quote(path.encode('utf-8', 'surrogateescape'))}"


def _printable(text: str) -> str:
    """`text` without control characters: output of a sandbox must not steer a terminal or reverse a line."""
    return "".join(filter(str.isprintable, text))


def _parse(uri: str) -> tuple[str, str]:
    """The sandbox and the path of a resource. The path is resolved inside the sandbox, so it needs no check here.

    Raises:
        InvalidRequest: it is not the URI of a file of a sandbox.
    """
    name, slash, path = uri.removeprefix(_SCHEME).partition("/")
    path = unquote(path, errors="surrogateescape")
    if not uri.startswith(_SCHEME) or not name or not slash or not path or "\0" in path:
        raise InvalidRequest(
            f"{uri[:_MAX_LINE_CHARS]!r} is not the URI of a file of a sandbox; write {_SCHEME}NAME/absolute/path, such "
            f"as {_SCHEME}default{HOME}/notes.txt"
        )
    return name, posixpath.join("/", path)


# ------------------------------------------------------------------------------------------------------------ progress


async def _cancel_on(scope: anyio.CancelScope, event: anyio.Event) -> None:
    await event.wait()
    scope.cancel()


class _CallProgress:
    """Progress notifications of one call: the time that it has taken, and the last line that its command printed."""

    def __init__(self, client: ServerSession) -> None:
        self._client = client
        self._began = anyio.current_time()
        self._end = b""

    def on_output(self, data: bytes) -> None:
        self._end = (self._end + data[-4 * _MAX_LINE_CHARS :])[-4 * _MAX_LINE_CHARS :]

    async def notify(self) -> None:
        while True:
            await anyio.sleep(PROGRESS_INTERVAL_S)
            elapsed = round(anyio.current_time() - self._began, 1)
            await self._client.report_progress(elapsed, message=f"{elapsed:.0f} s{self._last_line()}")

    def _last_line(self) -> str:
        lines = self._end.decode("utf-8", "replace").splitlines()
        shown = [_printable(line).strip() for line in lines]
        last = next((line for line in reversed(shown) if line), "")
        return f": {last[-_MAX_LINE_CHARS:]}" if last else ""
