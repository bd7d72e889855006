"""Scripted models: the answers come from a file, which also says what the model must be shown before each of them.

Owns the file format, how the conversation is compared with it, and how values of earlier results are inserted into
later steps. Not here: the agent loop (`loop.py`), which uses a scripted model like any other, streamed or not. Used by
`models.py` for `script:FILE`, and by tests.

The next step follows from the conversation alone. A script therefore has no state, and serves any number of
conversations at once: new ones, resumed ones and those of child agents.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelResponsePart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_core import ErrorDetails

from atoll.agents.media import described
from atoll.contract.errors import InvalidRequest, ScriptFailed
from atoll.tools.tool import StrictModel, nearest

_VALUE = re.compile(r"\$\{(\w+)\}")
_PIECE = re.compile(r"\S*\s*")
_MAX_QUOTED_CHARS = 600
"""How much of a text an error message quotes."""


class _ScriptModel(StrictModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ExpectedResult(_ScriptModel):
    """What the result of a call must be."""

    contains: tuple[str, ...] = ()
    """Parts of its text."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """Fields that its data must have, with these values."""
    error: bool | Literal["any"] = False
    """Whether the call must have failed. `any`: both are accepted."""
    keep: dict[str, str] = Field(default_factory=dict)
    """Fields of its data to keep, by a name: `${name}` in this step and in later ones is replaced by the value."""


class ExpectedConversation(_ScriptModel):
    """What the model must be shown before a step."""

    prompt: tuple[str, ...] = ()
    """Parts of the last prompt."""
    instructions: tuple[str, ...] = ()
    """Parts of the instructions."""
    tools: tuple[str, ...] = ()
    """Tools that must be offered. The tools that the step calls must be offered in any case."""
    results: tuple[ExpectedResult, ...] = Field(default=(), alias="result")
    """Results of the calls of the previous step, in their order. Calls that are not listed must have succeeded."""


class ScriptedCall(_ScriptModel):
    tool: str
    input: dict[str, Any] = Field(default_factory=dict)


class ScriptStep(_ScriptModel):
    """One answer of the model."""

    expect: ExpectedConversation = ExpectedConversation()
    text: str = ""
    calls: tuple[ScriptedCall, ...] = Field(default=(), alias="call")
    """Tool calls, made concurrently. None: the model has finished, until the next prompt."""


class ScriptedConversation(_ScriptModel):
    prompt: str
    """A part of the first prompt, which distinguishes this conversation from others."""
    steps: tuple[ScriptStep, ...] = Field(alias="step", min_length=1)


class Script(_ScriptModel):
    """All answers of a scripted model: its `[[step]]`s, and `[[conversation]]`s for other prompts."""

    steps: tuple[ScriptStep, ...] = Field(default=(), alias="step")
    conversations: tuple[ScriptedConversation, ...] = Field(default=(), alias="conversation")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a script: TOML, or JSON if the file's name ends in `.json`.

        Raises:
            InvalidRequest: the file cannot be read, or is not a valid script.
        """
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise InvalidRequest(f"the script {path} cannot be read: {why}") from None
        try:
            return cls.model_validate(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
        except ValidationError as error:
            raise InvalidRequest(f"the script {path} is invalid {_explained(error.errors()[0])}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the script {path} is not well-formed: {error}") from None

    def steps_for(self, prompt: str) -> Sequence[ScriptStep]:
        """The steps of the conversation that begins with this prompt."""
        for each in self.conversations:
            if each.prompt in prompt:
                return each.steps
        return self.steps


def scripted(script: Script, *, name: str = "script") -> FunctionModel:
    """A model that follows a script.

    A request raises `ScriptFailed` if the conversation is not what the script expects, or the script has no more steps.
    """

    async def whole(messages: list[ModelMessage], about: AgentInfo) -> ModelResponse:
        step = _next(script, name, messages, about)
        parts: list[ModelResponsePart] = [TextPart(content=step.text)] if step.text else []
        parts += [ToolCallPart(tool_name=call.tool, args=call.input) for call in step.calls]
        return ModelResponse(parts=parts)

    async def piecemeal(messages: list[ModelMessage], about: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        step = _next(script, name, messages, about)
        for piece in _PIECE.findall(step.text):
            if piece:
                yield piece
        for number, call in enumerate(step.calls):
            yield {number: DeltaToolCall(name=call.tool, json_args=json.dumps(call.input))}

    return FunctionModel(whole, stream_function=piecemeal, model_name=name)


def _next(script: Script, name: str, messages: Sequence[ModelMessage], about: AgentInfo) -> ScriptStep:
    shown = _SeenConversation.of(messages)
    steps = script.steps_for(shown.prompts[0] if shown.prompts else "")
    number = len(shown.turns) - 1
    if number >= len(steps):
        raise ScriptFailed(
            f"{name} has {len(steps)} steps for this conversation, and another one was requested after: "
            f"{_quoted(shown.last())}"
        )
    step = steps[number]
    wrong = list(_complaints(step, shown, about))
    if wrong:
        raise ScriptFailed(f"{name}, step {number + 1}: " + "; ".join(wrong))
    return _filled(step, shown.kept(steps[: number + 1]))


# ----------------------------------------------------------------------------------------------------- what was shown


@dataclass(frozen=True)
class _SeenConversation:
    """A conversation as the model sees it."""

    prompts: list[str]
    turns: list[list[ToolReturnPart]]
    """The results before each answer of the model, including the answer that is requested now."""

    @classmethod
    def of(cls, messages: Sequence[ModelMessage]) -> _SeenConversation:
        prompts: list[str] = []
        turns: list[list[ToolReturnPart]] = [[]]
        for message in messages:
            if isinstance(message, ModelRequest):
                for part in message.parts:
                    if isinstance(part, UserPromptPart):
                        prompts.append(part.content if isinstance(part.content, str) else str(part.content))
                    elif isinstance(part, ToolReturnPart):
                        turns[-1].append(part)
            else:
                turns.append([])
        return cls(prompts, turns)

    def last(self) -> str:
        results = self.turns[-1]
        return "\n".join(_text(each) for each in results) if results else (self.prompts or ["nothing"])[-1]

    def kept(self, steps: Sequence[ScriptStep]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for step, results in zip(steps, self.turns, strict=False):
            for expected, result in zip(step.expect.results, results, strict=False):
                data = _data(result)
                found |= {name: data[field] for name, field in expected.keep.items() if field in data}
        return found


def _text(result: ToolReturnPart) -> str:
    """As a model is shown it that takes nothing but text."""
    parts = result.content if isinstance(result.content, list | tuple) else [result.model_response_str()]
    return "\n".join(map(described, parts))


def _data(result: ToolReturnPart) -> Mapping[str, Any]:
    """The result as data or, of a tool that gives none, the JSON in its text."""
    if isinstance(result.metadata, dict):
        return result.metadata
    try:
        data = json.loads(_text(result))
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


_TABLES: Mapping[str, type[_ScriptModel]] = {
    "": Script,
    "step": ScriptStep,
    "expect": ExpectedConversation,
    "result": ExpectedResult,
    "call": ScriptedCall,
    "conversation": ScriptedConversation,
}
"""What a table of a script may contain, by the table's own key."""


def _explained(wrong: ErrorDetails) -> str:
    """Where a script is wrong, counted from 1 as the errors of a conversation are, and what is allowed there."""
    where = "".join(f" {part + 1}" if isinstance(part, int) else f", {part}" for part in wrong["loc"])
    reason = wrong["msg"]
    if wrong["type"] == "extra_forbidden":
        *tables, key = ["", *(part for part in wrong["loc"] if isinstance(part, str))]
        table = _TABLES[tables[-1].removesuffix("s")]  # a field's name is accepted in place of its key: `steps`
        allowed = [field.alias or name for name, field in table.model_fields.items()]
        reason = f"there is no such key; allowed are {', '.join(allowed)}{nearest(key, allowed)}"
    elif wrong["type"] == "missing":
        reason = "it is missing"
    return f"at {where.removeprefix(', ') or 'its top'}: {reason}"


def _complaints(step: ScriptStep, shown: _SeenConversation, about: AgentInfo) -> list[str]:
    prompt = shown.prompts[-1] if shown.prompts else ""
    wrong = _missing("the prompt", step.expect.prompt, prompt)
    wrong += _missing("the instructions", step.expect.instructions, about.instructions or "")
    offered = [tool.name for tool in about.function_tools]
    for tool in dict.fromkeys([*step.expect.tools, *(call.tool for call in step.calls)]):
        if tool not in offered:
            wrong.append(f"the tool {tool!r} is not offered (offered: {', '.join(offered) or 'none'})")
    results = shown.turns[-1]
    if len(step.expect.results) > len(results):
        wrong.append(f"{len(step.expect.results)} results were expected, but there are {len(results)}")
    expected = [*step.expect.results, *[ExpectedResult()] * (len(results) - len(step.expect.results))]
    for number, (each, result) in enumerate(zip(expected, results, strict=False), 1):
        wrong += _unlike(f"result {number}, of {result.tool_name}", each, result)
    return wrong


def _unlike(which: str, expected: ExpectedResult, result: ToolReturnPart) -> list[str]:
    failed = result.outcome != "success"
    if expected.error not in ("any", failed):
        what = "is an error" if failed else "is not an error"
        return [f"{which}, {what}: {_quoted(_text(result))}"]
    wrong = _missing(f"{which},", expected.contains, _text(result))
    data = _data(result)
    for field, value in expected.fields.items():
        if field not in data or data[field] != value:
            has = f"has {_quoted(data[field])}" if field in data else f"is: {_quoted(_text(result))}"
            wrong.append(f"{which}, should have {field} {value!r}, but {has}")
    wrong += [f"{which}, has no field {field!r} to keep" for field in expected.keep.values() if field not in data]
    return wrong


def _missing(where: str, parts: Sequence[str], text: str) -> list[str]:
    return [f"{where} should contain {part!r}, but is: {_quoted(text)}" for part in parts if part not in text]


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}…"


# ------------------------------------------------------------------------------------------------------ what was kept


def _filled(step: ScriptStep, values: Mapping[str, Any]) -> ScriptStep:
    """The step, with each `${name}` replaced by the value kept under this name. Others are the shell's, and stay."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(each) for key, each in value.items()}
        if isinstance(value, list):
            return [fill(each) for each in value]
        if not isinstance(value, str):
            return value
        alone = _VALUE.fullmatch(value)
        if alone and alone[1] in values:
            return values[alone[1]]  # with its type: a number stays a number
        return _VALUE.sub(lambda found: str(values.get(found[1], found[0])), value)

    calls = tuple(call.model_copy(update={"input": fill(call.input)}) for call in step.calls)
    return step.model_copy(update={"text": str(fill(step.text)), "calls": calls})
