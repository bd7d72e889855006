"""The tools of an MCP server, for a registry.

Owns the connection to a server (or the use of one that the caller has), the list of its tools, and how arguments and
results cross. Not here: names and who may call (`registry.py`), how a schema becomes a signature (`shapes.py`), and
Atoll's own server (`surfaces/mcp/`). Used by `registry.py`, when `add_mcp` is called: it needs the extra `atoll[mcp]`.

The client is on the host: what it authenticates with never enters a sandbox. Arguments come from code that is not
trusted, and are checked against the server's schema first. The server's texts and schemas are shown to the model: a
server is added because the operator trusts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from atoll.code.functions import MAX_ARGUMENTS_BYTES, encode
from atoll.code.shapes import SchemaReader, Shape, ToolShape, is_name
from atoll.contract.errors import CallerError, InvalidRequest, ToolCallError, install_extra
from atoll.runtime.lifetimes import BackgroundTasks
from atoll.tools.tool import quoted

try:
    import mcp
    from jsonschema import SchemaError  # type: ignore[import-untyped]
    from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
    from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]
    from mcp.types import EmbeddedResource, PaginatedRequestParams, ResourceLink, TextContent
    from referencing import Registry
    from referencing.exceptions import Unresolvable
except ModuleNotFoundError as error:
    raise CallerError(f"MCP needs {error.name}, which is not installed; {install_extra('mcp')}") from error

if TYPE_CHECKING:
    from mcp.types import CallToolResult, ContentBlock, Tool as ListedTool

CONNECT_TIMEOUT_S = 60.0
"""How long a server may take to start: `npx` may download it first."""
_MAX_PAGES = 100
_MAX_TOOLS = 2000
_CHECK_IN_THREAD_BYTES = 16 * 1024
"""Larger arguments are checked in a thread: jsonschema takes some 10 µs for each value in them."""


class McpServer:
    """A connection to a server. `aclose` ends what `connect` has started, and nothing else; any task may call it."""

    def __init__(self, session: mcp.ClientSession, tasks: BackgroundTasks | None) -> None:
        self._session = session
        self._tasks = tasks

    @classmethod
    async def connect(cls, server: Any) -> Self:
        """Use a connected session, or start what `server` describes.

        Raises:
            CallerError: the server cannot be reached.
            InvalidRequest: `server` is none.
        """
        if isinstance(server, mcp.ClientSession):
            return cls(server, None)
        if isinstance(server, mcp.Client) and _is_entered(server):
            return cls(server.session, None)
        client, name = _client(server)
        tasks = await BackgroundTasks.open()

        async def hold(*, task_status: TaskStatus[None]) -> None:
            async with client:
                task_status.started()
                await anyio.sleep_forever()

        try:
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                await tasks.start(hold)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await tasks.close()
            if not isinstance(error, Exception):
                raise
            raise CallerError(f"the MCP server {name} cannot be used: {_reason(error)}") from error
        return cls(client.session, tasks)

    async def tools(self) -> list[McpTool]:
        """All tools of the server.

        Raises:
            CallerError: it does not list them, or lists too many.
        """
        listed: list[ListedTool] = []
        cursor: str | None = None
        try:
            for _ in range(_MAX_PAGES):
                page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor))
                listed += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
        except mcp.MCPError as error:
            raise CallerError(f"the MCP server does not list its tools: {error}") from error
        if cursor or len(listed) > _MAX_TOOLS:
            raise CallerError(f"the MCP server lists more than {_MAX_TOOLS} tools")
        return [_mcp_tool(self._session, each) for each in {each.name: each for each in listed}.values()]

    async def aclose(self) -> None:
        if self._tasks is not None:
            await self._tasks.close()


@dataclass(frozen=True)
class McpTool:
    """A tool of a server."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any] | None
    session: mcp.ClientSession
    validator: Any
    """Checks arguments. None: the schema is none that can be used, and the server checks alone."""
    written: Mapping[str, str]
    """How code writes those parameters whose names are no identifiers → their names."""

    def shape(self, name: str) -> ToolShape:
        """The signature. `name` is what code calls the tool, for models that have no name."""
        reader = SchemaReader(name, foreign=True)
        as_written = {original: written for written, original in self.written.items()}
        parameters = reader.parameters({"properties": {}, **self.input_schema})
        parameters = tuple(replace(each, name=as_written.get(each.name, each.name)) for each in parameters)
        returns = Shape("plain", value="str")
        if self.output_schema is not None:
            returns = reader.shape(self.output_schema, "result")
        return ToolShape(parameters, None, returns, reader.models)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by the server's names.

        Raises:
            ToolCallError: they are invalid.
        """
        encode(arguments, f"the arguments of {self.name}", MAX_ARGUMENTS_BYTES, "InvalidArguments")
        given = {self.written.get(key, key): value for key, value in arguments.items()}
        if self.validator is not None:
            try:
                error = best_match(self.validator.iter_errors(given))
            except (Unresolvable, RecursionError):
                error = None  # the server's schema is wrong; the server decides
            if error is not None:
                where = ".".join(map(str, error.absolute_path))
                said = error.message if len(error.message) <= 300 else f"{quoted(error.instance)} is not valid"
                place = f"{where}: " if where else ""
                raise ToolCallError("InvalidArguments", f"the arguments of {self.name} are invalid: {place}{said}")
        return given

    async def run(self, arguments: Mapping[str, Any]) -> object:
        """Call the tool. The structured result if the tool declares one, else the text."""
        size = len(encode(arguments, f"the arguments of {self.name}", MAX_ARGUMENTS_BYTES, "InvalidArguments"))
        if size > _CHECK_IN_THREAD_BYTES:
            given = await anyio.to_thread.run_sync(self.check, arguments)
        else:
            given = self.check(arguments)
        try:
            result: CallToolResult = await self.session.call_tool(self.name, given)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError) as error:
            raise ToolCallError("ConnectionError", f"the MCP server of {self.name} has ended") from error
        except mcp.MCPError as error:
            raise ToolCallError("McpError", str(error)) from error
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise ToolCallError("ToolError", text or f"{self.name} failed")
        return result.structured_content if self.output_schema is not None else text


def _mcp_tool(session: mcp.ClientSession, listed: ListedTool) -> McpTool:
    schema = listed.input_schema
    properties = schema.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    return McpTool(
        name=listed.name,
        description=listed.description or listed.title or "",
        input_schema=schema if isinstance(properties, dict) else {**schema, "properties": {}},
        output_schema=listed.output_schema,
        session=session,
        validator=_validator(schema),
        written=_identifiers_of(names),
    )


def _identifiers_of(names: Sequence[str]) -> dict[str, str]:
    """What code writes for names of parameters that it cannot write: `user-id` is `user_id`."""
    taken = {name for name in names if is_name(name)}
    made = {}
    for name in sorted(name for name in names if not is_name(name)):
        wanted = "".join(each if each.isascii() and each.isalnum() else "_" for each in name).strip("_") or "value"
        written = wanted if is_name(wanted) else f"{wanted}_" if is_name(f"{wanted}_") else f"value_{wanted}"
        while written in taken:
            written += "_"
        taken.add(written)
        made[written] = name
    return made


def _validator(schema: Mapping[str, Any]) -> Any:
    """Checks arguments by a server's schema, without what takes more than linear time: regular expressions and the
    comparison of all items. The server checks those itself."""
    ignored = dict.fromkeys(("pattern", "patternProperties", "uniqueItems", "format"))
    kind = validator_for(dict(schema))
    try:
        kind.check_schema(dict(schema))
    except (SchemaError, RecursionError):
        return None
    if "patternProperties" in schema:
        return None  # `additionalProperties` would need them
    return extend(kind, ignored)(dict(schema), registry=Registry())  # references lead nowhere outside


def _text(part: ContentBlock) -> str:
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, ResourceLink):
        return f"{part.name}: {part.uri}"
    if isinstance(part, EmbeddedResource):
        text = getattr(part.resource, "text", None)
        return text if isinstance(text, str) else f"[left out: {part.resource.uri}, which is no text]"
    return f"[left out: {'an image' if part.type == 'image' else 'audio'}, {part.mime_type}]"


# ---------------------------------------------------------------------------------------------------------- connecting


def _is_entered(client: mcp.Client) -> bool:
    try:
        return client.session is not None
    except RuntimeError:
        return False


def _client(server: Any) -> tuple[mcp.Client, str]:
    """A client that is not connected, and how messages name its server: without what may be secret."""
    if isinstance(server, mcp.Client):
        return server, "of this client"
    if isinstance(server, str):
        url = urlsplit(server)
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise InvalidRequest(
                f"{quoted(server)} is no URL of an MCP server (http:// or https://); a command is a list of words"
            )
        return mcp.Client(server), f"at {url.scheme}://{url.hostname}{f':{url.port}' if url.port else ''}"
    if isinstance(server, mcp.StdioServerParameters):
        return mcp.Client(server), repr(server.command)
    if isinstance(server, Sequence):
        words = [str(word) for word in server]
        if not words:
            raise InvalidRequest("the command of the MCP server is empty; it is a list: ['npx', '-y', 'server']")
        return mcp.Client(mcp.StdioServerParameters(command=words[0], args=words[1:])), repr(words[0])
    return mcp.Client(server), f"({type(server).__name__})"


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return f"it did not answer within {CONNECT_TIMEOUT_S:g} s"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
