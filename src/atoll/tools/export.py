"""Tools and results in the formats of Anthropic, OpenAI and MCP.

Owns the shapes of Anthropic messages, OpenAI chat completions, OpenAI responses, and MCP. All are plain data with the
same schemas. Not here: any client or server of these protocols. Used by the MCP server, and by programs that call a
provider's API themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import pydantic_core

from atoll.contract.errors import InvalidRequest
from atoll.tools.tool import ContentPart, ImagePart, TextPart, Tool, ToolResult

ToolProtocol = Literal["anthropic", "openai-chat", "openai-responses", "mcp"]
_Writer = TypeVar("_Writer", bound=Callable[..., dict[str, Any]])


def definitions(tools: Iterable[Tool], protocol: ToolProtocol) -> list[dict[str, Any]]:
    """Tool definitions: the `tools` of a request or, with MCP, of the result of `tools/list`.

    Raises:
        InvalidRequest: there is no such protocol.
    """
    write = _of(_DEFINITIONS, protocol)
    return [write(tool) for tool in tools]


def result(result: ToolResult, protocol: ToolProtocol, call_id: str = "") -> dict[str, Any]:
    """A tool result: a block, message or item that answers `call_id` or, with MCP, the result itself.

    A message of OpenAI chat completions that answers a call has no place for images: `image_message` has them.

    Raises:
        InvalidRequest: there is no such protocol.
    """
    return _of(_RESULTS, protocol)(result, call_id)


def image_message(results: Iterable[ToolResult]) -> dict[str, Any] | None:
    """The images of these results as a user's message of OpenAI chat completions, to be added after the messages that
    answer the calls. None: there are none."""
    images = [part for each in results for part in _parts(each) if isinstance(part, ImagePart)]
    if not images:
        return None
    shown = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": "The images that the tools have returned:"}, *shown]}


def _of(table: Mapping[ToolProtocol, _Writer], protocol: str) -> _Writer:
    for name, write in table.items():
        if name == protocol:
            return write
    raise InvalidRequest(f"there is no tool protocol {protocol!r}; allowed are {', '.join(map(repr, table))}")


# ---------------------------------------------------------------------------------------------------------- definitions


def _anthropic(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema()}


def _openai_function(tool: Tool) -> dict[str, Any]:
    # Strict schemas cannot have optional fields, so all defaults would be lost.
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema(),
        "strict": False,
    }


def _openai_chat(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": _openai_function(tool)}


def _openai_responses(tool: Tool) -> dict[str, Any]:
    return {"type": "function", **_openai_function(tool)}


def _mcp(tool: Tool) -> dict[str, Any]:
    definition = {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": tool.input_schema(),
        "annotations": {
            "readOnlyHint": tool.hints.read_only,
            "destructiveHint": tool.hints.destructive,
            "idempotentHint": tool.hints.idempotent,
            "openWorldHint": tool.hints.open_world,
        },
    }
    if tool.title:
        definition["title"] = tool.title
    output = tool.output_schema()
    return definition if output is None else {**definition, "outputSchema": output}


_DEFINITIONS: Mapping[ToolProtocol, Callable[[Tool], dict[str, Any]]] = {
    "anthropic": _anthropic,
    "openai-chat": _openai_chat,
    "openai-responses": _openai_responses,
    "mcp": _mcp,
}


# -------------------------------------------------------------------------------------------------------------- results


def _parts(result: ToolResult) -> tuple[ContentPart, ...]:
    return (TextPart(text=result.content),) if isinstance(result.content, str) else result.content


def _anthropic_part(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "source": {"type": "base64", "media_type": part.mime_type, "data": part.data}}
    return {"type": "text", "text": part.text}


def _anthropic_result(result: ToolResult, call_id: str) -> dict[str, Any]:
    content = result.content
    return {
        "type": "tool_result",
        "tool_use_id": call_id,
        "content": content if isinstance(content, str) else [_anthropic_part(part) for part in content],
        "is_error": result.is_error,
    }


def _openai_text(result: ToolResult) -> str:
    # The format has no flag for errors.
    return f"Error: {result.text.removeprefix('Error: ')}" if result.is_error else result.text


def _data_url(image: ImagePart) -> str:
    return f"data:{image.mime_type};base64,{image.data}"


def _openai_chat_result(result: ToolResult, call_id: str) -> dict[str, Any]:
    images = [f"[an image, {part.mime_type}]" for part in _parts(result) if isinstance(part, ImagePart)]
    text = "\n".join(filter(None, [_openai_text(result), *images])) if images else _openai_text(result)
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _openai_responses_result(result: ToolResult, call_id: str) -> dict[str, Any]:
    output: Any = _openai_text(result)
    if any(isinstance(part, ImagePart) for part in _parts(result)):
        output = [_openai_part(part) for part in _parts(result)]
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def _openai_part(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "input_image", "image_url": _data_url(part)}
    return {"type": "input_text", "text": part.text}


def _mcp_part(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "data": part.data, "mimeType": part.mime_type}
    return {"type": "text", "text": part.text}


def _mcp_result(result: ToolResult, _call_id: str) -> dict[str, Any]:
    content = [_mcp_part(part) for part in _parts(result)]
    content += [{"type": "resource_link", "uri": link.url, "name": link.name} for link in result.links]
    written: dict[str, Any] = {"content": content, "isError": result.is_error}
    # Structured content must match the tool's output schema, and an error does not.
    if result.structured is not None and not result.is_error:
        written["structuredContent"] = pydantic_core.to_jsonable_python(result.structured)
    return written


_RESULTS: Mapping[ToolProtocol, Callable[[ToolResult, str], dict[str, Any]]] = {
    "anthropic": _anthropic_result,
    "openai-chat": _openai_chat_result,
    "openai-responses": _openai_responses_result,
    "mcp": _mcp_result,
}
