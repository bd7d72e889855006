"""Tools and their results as each protocol writes them down.

Knows the shapes of Anthropic's messages, OpenAI's chat completions and responses, and MCP. Refuses to know any
protocol's client: all of these are plain data. The schemas are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import pydantic_core

from atoll.tools.tool import ImagePart, Part, TextPart, Tool, ToolResult

Protocol = Literal["anthropic", "openai-chat", "openai-responses", "mcp"]


def definitions(tools: Iterable[Tool], protocol: Protocol) -> list[dict[str, Any]]:
    """What a model is offered: the `tools` of a request or, with MCP, of the answer to `tools/list`."""
    write = _DEFINITIONS[protocol]
    return [write(tool) for tool in tools]


def result(result: ToolResult, protocol: Protocol, call_id: str = "") -> dict[str, Any]:
    """What a model gets back: a block, message or item that answers `call_id` or, with MCP, the result itself."""
    return _RESULTS[protocol](result, call_id)


# ---------------------------------------------------------------------------------------------------------- definitions


def _anthropic(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema()}


def _openai_function(tool: Tool) -> dict[str, Any]:
    # Strict schemas have no optional fields: all defaults would be lost.
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
    output = tool.output_schema()
    return definition if output is None else {**definition, "outputSchema": output}


_DEFINITIONS: Mapping[Protocol, Callable[[Tool], dict[str, Any]]] = {
    "anthropic": _anthropic,
    "openai-chat": _openai_chat,
    "openai-responses": _openai_responses,
    "mcp": _mcp,
}


# -------------------------------------------------------------------------------------------------------------- results


def _parts(result: ToolResult) -> tuple[Part, ...]:
    return (TextPart(text=result.content),) if isinstance(result.content, str) else result.content


def _anthropic_part(part: Part) -> dict[str, Any]:
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
    # There is no flag for errors and no place for images: both are said in words.
    images = [part for part in _parts(result) if isinstance(part, ImagePart)]
    text = "\n".join([result.text, *(f"[an image, {image.mime_type}]" for image in images)]).strip(
        "\n" if images else ""
    )
    return f"Error: {text.removeprefix('Error: ')}" if result.is_error else text


def _openai_chat_result(result: ToolResult, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": _openai_text(result)}


def _openai_responses_result(result: ToolResult, call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": _openai_text(result)}


def _mcp_part(part: Part) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        return {"type": "image", "data": part.data, "mimeType": part.mime_type}
    return {"type": "text", "text": part.text}


def _mcp_result(result: ToolResult, _call_id: str) -> dict[str, Any]:
    content = [_mcp_part(part) for part in _parts(result)]
    content += [{"type": "resource_link", "uri": link.url, "name": link.name} for link in result.links]
    written: dict[str, Any] = {"content": content, "isError": result.is_error}
    # What is structured has to be as the tool's output schema says, which an error is not.
    if result.structured is not None and not result.is_error:
        written["structuredContent"] = pydantic_core.to_jsonable_python(result.structured)
    return written


_RESULTS: Mapping[Protocol, Callable[[ToolResult, str], dict[str, Any]]] = {
    "anthropic": _anthropic_result,
    "openai-chat": _openai_chat_result,
    "openai-responses": _openai_responses_result,
    "mcp": _mcp_result,
}
