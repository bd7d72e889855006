"""What a model and a kernel are told of tools: typed stubs.

Owns the documentation for the prompt, the names of models across tools, the STUBs and MODELs of the kernel's channel,
and what `search_tools` finds. All of it is a function of the tools in the order of their registration, to the byte: a
prompt with it can be cached. Not here: where signatures come from (`shapes.py`, `functions.py`, `mcp_tools.py`). Used
by `registry.py`.
"""

from __future__ import annotations

import builtins
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.code.shapes import (
    ANY,
    NONE,
    ModelShape,
    Shape,
    ToolParameter,
    ToolShape,
    bare,
    camel,
    is_name,
    model_keys,
    one_line,
    written,
)

SEARCH_TOOL = "search_tools"
RESERVED = frozenset(dir(builtins)) | {
    SEARCH_TOOL, "help", "display", "exit", "quit", "input", "asyncio", "ToolError", "dataclass", "datetime", "date",
    "Decimal", "Any", "Literal", "TypedDict", "NotRequired",
}  # fmt: skip
"""Names of Python and of the kernel that neither a tool nor a model may hide."""
DEFAULT_LIMIT_CHARS = 16_000
"""About 4,000 tokens. Longer documentation is progressive."""

_RULES = (
    "Every call must be awaited: `result = await {example}`. Independent calls run in parallel with "
    "`await asyncio.gather(...)`. Only what the code prints is seen; results of calls stay in the code until it prints "
    "them. A call that fails raises ToolError: its text says why, its `type` is the name of the error."
)


@dataclass(frozen=True)
class ToolText:
    """A tool, as far as it is told."""

    name: str
    shape: ToolShape
    description: str = ""
    output_description: str = ""
    needs_approval: bool = False

    @property
    def summary(self) -> str:
        """The first sentence or line of the description."""
        first = one_line(self.description.strip().partition("\n\n")[0], 2000)
        sentence = re.match(r".{12,}?[.!?](?=\s+[^a-z])", first)
        return one_line(sentence[0] if sentence else first, 160)


class StubWriter:
    """Writes the stubs of some tools. `one_dict`: as the hosted product has them, with one dict in and a string out."""

    def __init__(self, tools: Sequence[ToolText], *, one_dict: bool = False) -> None:
        self._tools = tools
        self._one_dict = one_dict
        self._names = _ModelNames(tools)

    def stubs(self) -> list[dict[str, Any]]:
        """The STUBs of the kernel's channel."""
        return [
            {
                "name": tool.name,
                "params": [[each.name, each.required] for each in tool.shape.parameters],
                "var": None if tool.shape.rest is None else tool.shape.rest.name,
                "returns": "any" if self._one_dict else self._wire(tool, tool.shape.returns),
                "doc": self.describe(tool),
                "mode": "anthropic" if self._one_dict else "native",
            }
            for tool in self._tools
        ]

    def models(self) -> dict[str, dict[str, Any]]:
        """The MODELs of the kernel's channel, by name. `optional` are the fields that an argument may leave out."""
        found: dict[str, dict[str, Any]] = {}
        if self._one_dict:
            return found
        for tool in self._tools:
            for key, model in tool.shape.models.items():
                if not model.is_dict:
                    found[self._names.of(tool, key)] = {
                        "fields": [[each.name, self._wire(tool, each.shape)] for each in model.fields],
                        "optional": [each.name for each in model.fields if not each.required],
                    }
        return found

    def documentation(self, limit_chars: int) -> str:
        """For a prompt. Above the limit: one line for each tool, or only names, and how to find the rest."""
        if not self._tools:
            return "There are no tools to call.\n"
        whole = f"{self._head()}\n\n```python\n{self._all_stubs()}\n```\n"
        if len(whole) <= limit_chars:
            return whole
        lines = [
            f"{self._outline(tool)}: {tool.summary}" if tool.summary else self._outline(tool) for tool in self._tools
        ]
        told = f"{self._head()} {self._progressive()}\n\n" + "\n".join(lines) + "\n"
        if len(told) <= limit_chars:
            return told
        return self._only_names(limit_chars)

    def describe(self, tool: ToolText) -> str:
        """All of one tool, as `help(tool)` shows it: the models that it uses, its signature, its description."""
        return "\n\n".join([*(self._model(tool, key) for key in tool.shape.models), self._function(tool)])

    def signature(self, tool: ToolText) -> str:
        """`async def name(…) -> …`"""
        if self._one_dict:
            return f"async def {tool.name}(input: dict) -> str"
        written = []
        placings = [each.placing for each in tool.shape.parameters]
        for index, each in enumerate(tool.shape.parameters):
            if each.placing == "keyword" and "keyword" not in placings[:index]:
                written.append("*")
            written.append(self._parameter(tool, each))
            if each.placing == "positional" and "positional" not in placings[index + 1 :]:
                written.append("/")
        if tool.shape.rest is not None:
            written.append(f"**{tool.shape.rest.name}: {self._text(tool, tool.shape.rest.shape)}")
        return f"async def {tool.name}({', '.join(written)}) -> {self._text(tool, tool.shape.returns)}"

    # ------------------------------------------------------------------------------------------------------ the prompt

    def _head(self) -> str:
        return "The code can call these tools, which are async functions. " + _RULES.format(example=self._example())

    def _example(self) -> str:
        tool = self._tools[0]
        if self._one_dict:
            return f"{tool.name}({{...}})"
        return f"{tool.name}(...)" if tool.shape.parameters or tool.shape.rest else f"{tool.name}()"

    def _progressive(self) -> str:
        return (
            f'There are {len(self._tools)} tools. `print(await {SEARCH_TOOL}("what it should do"))` finds those that '
            "fit, with their signatures, and `help(tool)` prints all about one: look before the first call of a tool."
        )

    def _only_names(self, limit_chars: int) -> str:
        head = f"{self._head()} {self._progressive()}\n\n"
        names = [tool.name for tool in self._tools]
        shown = len(names)
        while True:
            left = f", and {len(names) - shown} more" if shown < len(names) else ""
            told = f"{head}{', '.join(names[:shown])}{left}\n"
            if len(told) <= limit_chars or shown == 0:
                return told
            shown -= max(1, shown // 20)

    def _all_stubs(self) -> str:
        seen: set[str] = set()
        parts = []
        for tool in self._tools:
            for key in tool.shape.models:
                name = self._names.of(tool, key)
                if name not in seen:
                    seen.add(name)
                    parts.append(self._model(tool, key))
            parts.append(self._function(tool))
        return "\n\n".join(parts)

    def _outline(self, tool: ToolText) -> str:
        names = [each.name if each.required else f"{each.name}=…" for each in tool.shape.parameters]
        names += ["**"] if tool.shape.rest is not None else []
        return f"{tool.name}({', '.join(names)})"

    # ----------------------------------------------------------------------------------------------------------- parts

    def _parameter(self, tool: ToolText, each: ToolParameter) -> str:
        typed = f"{each.name}: {self._text(tool, each.shape)}"
        return typed if each.required else f"{typed} = {_default(each)}"

    def _function(self, tool: ToolText) -> str:
        parts = [_block(tool.description)] if tool.description.strip() else []
        rows = []
        for each in tool.shape.parameters:
            if self._one_dict:
                presence = "required" if each.required else f"default {_default(each)}"
                kind = f"{each.name} ({self._text(tool, each.shape)}, {presence})"
                rows.append(f"    {kind}: {each.description}" if each.description else f"    {kind}")
            elif each.description:
                rows.append(f"    {each.name}: {each.description}")
        if self._one_dict and tool.shape.rest is not None:
            rows.append(f"    any other key ({self._text(tool, tool.shape.rest.shape)})")
        if rows:
            parts.append("\n".join(["The keys of input:" if self._one_dict else "Args:", *rows]))
        returned = one_line(tool.output_description, 2000)
        if self._one_dict and tool.shape.returns not in {ANY, Shape("plain", value="str")}:
            returned = f"{self._text(tool, tool.shape.returns)}, as JSON. {returned}".strip()
        if returned:
            parts.append(f"Returns:\n    {returned}")
        if tool.needs_approval:
            parts.append("A call waits until a person has allowed it.")
        body = _docstring("\n\n".join(parts))
        return f"{self.signature(tool)}:\n{body}"

    def _model(self, tool: ToolText, key: str) -> str:
        model = tool.shape.models[key]
        name = self._names.of(tool, key)
        is_dict = model.is_dict or self._one_dict
        lines = [f"class {name}(TypedDict):"] if is_dict else ["@dataclass", f"class {name}:"]
        lines += [_docstring(model.description)] if model.description else []
        for each in model.fields:
            text = self._text(tool, each.shape)
            if is_dict:
                line = f"    {each.name}: {text if each.required else f'NotRequired[{text}]'}"
            else:
                line = f"    {self._parameter(tool, each)}"
            lines.append(f"{line}  # {each.description}" if each.description else line)
        return "\n".join(lines)

    def _text(self, tool: ToolText, shape: Shape) -> str:
        """A type as Python."""
        inner = [self._text(tool, each) for each in shape.inner]
        if shape.kind == "any":
            return "Any"
        if shape.kind == "plain":
            return str(shape.value)
        if shape.kind == "literal":
            return f"Literal[{', '.join(written(each, 1000) or '...' for each in shape.value)}]"
        if shape.kind == "union":
            return " | ".join(inner)
        if shape.kind == "dict":
            return f"dict[str, {inner[0]}]"
        if shape.kind == "model":
            return self._names.of(tool, shape.value)
        if self._one_dict and shape.kind in {"scalar", "set", "tuple"}:  # as it is in JSON
            return "str" if shape.kind == "scalar" else f"list[{' | '.join(dict.fromkeys(inner))}]"
        if shape.kind == "scalar":
            return "Decimal" if shape.value == "decimal" else str(shape.value)
        return f"{shape.kind}[{', '.join(inner)}]"

    def _wire(self, tool: ToolText, shape: Shape) -> Any:
        """A type as the kernel's TYPE. What stays as JSON has it is `"any"`."""
        inner = [self._wire(tool, each) for each in shape.inner if each != NONE]
        if shape.kind == "model":
            plain = tool.shape.models[shape.value].is_dict
            return "any" if plain else ["model", self._names.of(tool, shape.value)]
        if shape.kind == "scalar":
            return [shape.value]
        if shape.kind == "tuple":
            return ["tuple", inner]
        if shape.kind == "set":
            return ["set", inner[0]]
        if all(each == "any" for each in inner):
            return "any"
        if shape.kind == "union":
            return ["optional", inner[0]] if len(inner) == 1 else ["union", inner]
        return [shape.kind, inner[0]]


def _default(parameter: ToolParameter) -> str:
    """A default as Python writes it. `...`: there is one, and it cannot be shown."""
    text, kind = parameter.default, parameter.shape.kind
    if text is None or (kind == "model" and text != "None"):
        return "..."
    if kind == "set" and text.startswith("["):
        return f"{{{text[1:-1]}}}" if text != "[]" else "set()"
    return f"({text[1:-1]},)" if kind == "tuple" and text.startswith("[") else text


class _ModelNames:
    """One name for each model: the same for equal models of several tools, different for different ones."""

    def __init__(self, tools: Sequence[ToolText]) -> None:
        taken = set(RESERVED) | {tool.name for tool in tools}
        by_meaning: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}
        for tool in tools:
            for key, model in tool.shape.models.items():
                meaning = repr([(each, bare(tool.shape.models[each])) for each in _reachable(key, tool.shape.models)])
                name = by_meaning.get(meaning)
                if name is None:
                    number, name = 1, model.name
                    while name in taken or not is_name(name):
                        number += 1
                        name = f"{camel(model.name)}{number}"
                    taken.add(name)
                    by_meaning[meaning] = name
                self._names[tool.name, key] = name

    def of(self, tool: ToolText, key: str) -> str:
        return self._names[tool.name, key]


def _reachable(key: str, models: Mapping[str, ModelShape]) -> list[str]:
    found = [key]
    for each in found:  # grows meanwhile
        for field in models[each].fields:
            found += [inner for inner in dict.fromkeys(model_keys(field.shape)) if inner not in found]
    return found


def _block(text: str) -> str:
    """A description of several lines: printable, without spaces at the ends of lines or an indent in common."""
    lines = [
        "".join(each if each.isprintable() else " " for each in line).rstrip()
        for line in text.expandtabs(4).split("\n")
    ]
    return "\n".join(lines).strip()


def _docstring(text: str) -> str:
    if not text:
        return "    ..."
    safe = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    if safe.endswith('"'):
        safe += " "
    lines = safe.split("\n")
    quoted = [f'    """{lines[0]}', *(f"    {line}" if line else "" for line in lines[1:])]
    if len(lines) > 1:
        return "\n".join([*quoted, '    """'])
    return quoted[0] + '"""'


# -------------------------------------------------------------------------------------------------------------- search


class ToolIndex:
    """Finds tools by words: in their names, descriptions and parameters (BM25). Equal ranks keep their order."""

    _K, _B = 1.2, 0.5
    _NAME_WEIGHT = 4
    """A word of the name counts like this many in the description."""

    def __init__(self, tools: Sequence[ToolText]) -> None:
        self._tools = tools
        self._words = [Counter(self._words_of(tool)) for tool in tools]
        self._lengths = [words.total() for words in self._words]
        self._mean = sum(self._lengths) / max(1, len(tools)) or 1.0
        self._in_tools = Counter(word for words in self._words for word in words)

    def search(self, query: str, limit: int) -> list[ToolText]:
        """The tools that have a word of the query, best first. An empty query: the first tools."""
        wanted = dict.fromkeys(_words(query[:1000]))
        if not wanted:
            return list(self._tools[:limit])
        ranks = [(self._rank(wanted, index), -index) for index in range(len(self._tools))]
        found = sorted((each for each in ranks if each[0] > 0), reverse=True)
        return [self._tools[-index] for _, index in found[:limit]]

    def _rank(self, wanted: Mapping[str, None], index: int) -> float:
        rank = 0.0
        for word in wanted:
            count = self._words[index][word]
            if count:
                rarity = math.log(1 + (len(self._tools) - self._in_tools[word] + 0.5) / (self._in_tools[word] + 0.5))
                length = 1 - self._B + self._B * self._lengths[index] / self._mean
                rank += rarity * count * (self._K + 1) / (count + self._K * length)
        return round(rank, 9)

    def _words_of(self, tool: ToolText) -> Iterator[str]:
        for _ in range(self._NAME_WEIGHT):
            yield from _words(tool.name)
        yield from _words(tool.description)
        yield from _words(tool.output_description)
        for each in tool.shape.parameters:
            yield from _words(each.name)
            yield from _words(each.description)
        for model in tool.shape.models.values():
            yield from _words(model.name)
            for each in model.fields:
                yield from _words(each.name)


def _words(text: str) -> Iterator[str]:
    for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+", text):
        word = word.lower()
        yield word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
