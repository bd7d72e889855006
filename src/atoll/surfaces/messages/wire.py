"""What clients send: the request of `POST /v1/messages`, checked.

Owns the shapes that are accepted, the rules between their parts (callers, choices, containers), and `ApiError`, the one
kind of error that clients see. Not here: what a conversation means to the model (`conversation.py`) and what is
answered (`turn.py`). Used by all modules of this package.

What only a hosted product has (files, skills, web search, MCP connectors) is refused by name, not ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import pydantic_core
from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationError

CODE_TOOL = "code_execution"
CODE_VERSIONS = (
    "code_execution_20250522",
    "code_execution_20250825",
    "code_execution_20260120",
    "code_execution_20260521",
)
"""Versions of the tool. The first has no programmatic calls."""
CODE_CALLERS = CODE_VERSIONS[1:]
DIRECT = "direct"
MAX_TOOLS = 2000
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}  # fmt: skip


class ApiError(Exception):
    """A request fails with this status. The message is for the client, of any tenant."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    def body(self, request_id: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.type, "message": self.message}, "request_id": request_id}


# -------------------------------------------------------------------------------------------------------------- blocks


class WireModel(BaseModel):
    """A part of a request. Fields that are not ours, such as `cache_control`, are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class WireText(WireModel):
    type: Literal["text"] = "text"
    text: str


class WireData(WireModel):
    type: Literal["base64"]
    media_type: str
    data: str


class WireAddress(WireModel):
    type: Literal["url"]
    url: str


class WirePlain(WireModel):
    type: Literal["text"]
    data: str


class WireImage(WireModel):
    type: Literal["image"]
    source: Annotated[WireData | WireAddress, Discriminator("type")]


class WireDocument(WireModel):
    type: Literal["document"]
    source: Annotated[WireData | WireAddress | WirePlain, Discriminator("type")]


ShownBlock = Annotated[WireText | WireImage | WireDocument, Discriminator("type")]


class WireResult(WireModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ShownBlock] | None = None
    is_error: bool | None = None


class WireCaller(WireModel):
    type: str = DIRECT
    tool_id: str | None = None


class WireCall(WireModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: WireCaller | None = None

    @property
    def code_id(self) -> str | None:
        """The id of the code that made it. None: the model did."""
        return None if self.caller is None or self.caller.type == DIRECT else self.caller.tool_id or ""


class WireCode(WireModel):
    type: Literal["server_tool_use"]
    id: str
    name: Literal["code_execution"]
    input: dict[str, Any]


class WireOutput(WireModel):
    type: Literal["code_execution_result"]
    stdout: str
    stderr: str
    return_code: int


class WireCodeError(WireModel):
    type: Literal["code_execution_tool_result_error"]
    error_code: str


class WireCodeResult(WireModel):
    type: Literal["code_execution_tool_result"]
    tool_use_id: str
    content: Annotated[WireOutput | WireCodeError, Discriminator("type")]


class WireThinking(WireModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class WireHidden(WireModel):
    type: Literal["redacted_thinking"]


UserBlock = Annotated[WireText | WireImage | WireDocument | WireResult, Discriminator("type")]
AssistantBlock = Annotated[
    WireText | WireThinking | WireHidden | WireCall | WireCode | WireCodeResult, Discriminator("type")
]


class UserMessage(WireModel):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(WireModel):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(WireModel):
    role: Literal["system"]
    content: str | list[WireText]


WireMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Discriminator("role")]


# ------------------------------------------------------------------------------------------------------------- request


class WireChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class WireContainer(WireModel):
    id: str | None = None
    skills: list[Any] | None = None


class WireThinkingMode(WireModel):
    type: str


class WireTool(WireModel):
    name: str
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None
    strict: bool = False


class WireRequest(WireModel):
    """The body. A field that is not here would change the answer, and is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int = Field(ge=1)
    messages: list[WireMessage] = Field(min_length=1)
    system: str | list[WireText] = ""
    stream: bool = False
    tools: list[WireTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: WireChoice | None = None
    container: str | WireContainer | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[str] | None = None
    thinking: WireThinkingMode | None = None
    # What does not change an answer of a model that is not theirs.
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


@dataclass(frozen=True)
class ClientTool:
    """A tool that the client runs."""

    name: str
    description: str
    input_schema: Mapping[str, Any]
    by_model: bool
    by_code: bool
    strict: bool


@dataclass(frozen=True)
class MessagesRequest:
    """A request that is right in itself."""

    body: WireRequest
    tools: tuple[ClientTool, ...]
    code_version: str | None
    """The version of the code execution tool. None: the model writes no code."""
    container_id: str | None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a body.

        Raises:
            ApiError: it is not one.
        """
        try:
            found = pydantic_core.from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ApiError(400, "the body is no JSON object")
        try:
            body = WireRequest.model_validate(found)
        except ValidationError as error:
            # Of the kinds that a value may have, the one that fits best says most.
            wrong = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
            raise ApiError(400, f"{_place(wrong['loc'])}: {wrong['msg']}") from None
        tools, version = _tools(body.tools)
        _check_choice(body.tool_choice, tools, version)
        container = WireContainer(id=body.container) if isinstance(body.container, str) else body.container
        if container is not None and container.skills:
            raise ApiError(400, "container.skills: there are no skills here")
        return cls(body, tools, version, None if container is None else container.id)

    @property
    def caller_type(self) -> str:
        """What calls by code name as their caller. There is no type for the newest version of the tool."""
        return CODE_CALLERS[0] if self.code_version == CODE_CALLERS[0] else CODE_CALLERS[1]

    @property
    def system(self) -> str:
        given = self.body.system
        return given if isinstance(given, str) else "\n\n".join(block.text for block in given if block.text.strip())


def _place(where: Sequence[str | int]) -> str:
    """The place of an error without what pydantic inserts: kinds of unions, and their tags."""
    names = [part for part in where if isinstance(part, int) or re.fullmatch(r"[a-z_]+", part)]
    kept: list[str] = []
    for index, part in enumerate(names):
        tag = (
            index > 0 and isinstance(part, str) and (isinstance(names[index - 1], int) or names[index - 1] == "source")
        )
        if part not in {"str", "list"} and not tag:
            kept.append(str(part))
    return ".".join(kept) or "the body"


def _tools(given: Sequence[WireTool]) -> tuple[tuple[ClientTool, ...], str | None]:
    tools: list[ClientTool] = []
    version: str | None = None
    names: set[str] = set()
    for index, tool in enumerate(given):
        where = f"tools.{index}"
        if tool.name in names:
            raise ApiError(400, f"{where}.name: two tools are named {tool.name!r}; names must be unique")
        names.add(tool.name)
        callers = _callers(tool, where)
        if tool.type in CODE_VERSIONS:
            if tool.name != CODE_TOOL:
                raise ApiError(400, f"{where}.name: the tool {tool.type} must be named {CODE_TOOL!r}")
            version = tool.type
        else:
            tools.append(_client_tool(tool, callers, where))
    unreachable = next((each.name for each in tools if each.by_code), None)
    if unreachable is not None and version in (None, CODE_VERSIONS[0]):
        wanted = ", ".join(CODE_CALLERS)
        raise ApiError(400, f"{unreachable}: allowed_callers names code, which needs one of the tools {wanted}")
    return tuple(tools), version


def _callers(tool: WireTool, where: str) -> list[str]:
    callers = [DIRECT] if tool.allowed_callers is None else tool.allowed_callers
    allowed = (DIRECT, *CODE_CALLERS)
    wrong = [each for each in callers if each not in allowed]
    if wrong or not callers:
        named = f"has {wrong[0][:80]!r}" if wrong else "is empty"
        raise ApiError(400, f"{where}.allowed_callers {named}; allowed are {', '.join(allowed)}")
    return callers


def _client_tool(tool: WireTool, callers: Sequence[str], where: str) -> ClientTool:
    if tool.type not in (None, "custom"):
        raise ApiError(
            400,
            f"{where}.type: {tool.type[:80]!r} is not offered here; allowed are custom, {', '.join(CODE_VERSIONS)}",
        )
    if not _TOOL_NAME.fullmatch(tool.name):
        raise ApiError(400, f"{where}.name: {tool.name[:80]!r} is not 1 to 128 ASCII letters, digits, '_' and '-'")
    schema = tool.input_schema
    if schema is None or schema.get("type") != "object":
        raise ApiError(400, f"{where}.input_schema: a JSON schema of the type object is required")
    if not isinstance(schema.get("properties") or {}, dict):
        raise ApiError(400, f"{where}.input_schema.properties: must be an object")
    by_code = any(each != DIRECT for each in callers)
    if by_code and tool.strict:
        raise ApiError(400, f"{where}.strict: a tool that code may call cannot be strict")
    return ClientTool(tool.name, tool.description, schema, DIRECT in callers, by_code, tool.strict)


def _check_choice(choice: WireChoice | None, tools: Sequence[ClientTool], version: str | None) -> None:
    if choice is None:
        return
    if choice.disable_parallel_tool_use and any(tool.by_code for tool in tools):
        raise ApiError(
            400, "tool_choice.disable_parallel_tool_use: cannot be set with tools that code may call"
        )  # fmt: skip
    if choice.type != "tool":
        return
    if choice.name is None:
        raise ApiError(400, "tool_choice.name: is required with the type tool")
    by_name = {tool.name: tool for tool in tools}
    if choice.name == CODE_TOOL and version is not None:
        return
    if choice.name not in by_name:
        raise ApiError(400, f"tool_choice.name: no tool is named {choice.name[:80]!r}")
    if not by_name[choice.name].by_model:
        raise ApiError(
            400,
            f"tool_choice.name: {choice.name!r} has no {DIRECT!r} among its allowed_callers, so it cannot be chosen",
        )
