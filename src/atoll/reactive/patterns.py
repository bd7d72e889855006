"""Patterns: a function of cells to named outputs, with a name and a view.

Owns which inputs a pattern has, what its outputs are called, and how it is loaded from a file. Not here: how a view is
drawn (`rendering.py`), and the commands that run patterns (`surfaces/cli/commands/pattern.py`). Used by programs and by
those.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import Frozen
from atoll.reactive.builtins import CommandResult
from atoll.reactive.graph import Graph, current_graph
from atoll.reactive.nodes import Cell, Node, describe
from atoll.reactive.operations import Handler
from atoll.reactive.rendering import PatternView, convert
from atoll.reactive.sandboxes import SandboxHandle

NAME = "$NAME"
"""The key of a pattern's title: text, a node or a function."""
UI = "$UI"
"""The key of a pattern's view."""

_REQUIRED: Any = object()


class Pattern:
    """A function of cells to a mapping of outputs, made by `pattern`. Called, it starts in the current graph."""

    def __init__(self, function: Callable[..., Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
        self.name = function.__name__
        self.description = inspect.getdoc(function) or ""
        self._function = function
        parameters = list(inspect.signature(function).parameters)
        if unknown := sorted(set(defaults) - set(parameters)):
            raise InvalidRequest(f"{self.name} has no input {unknown[0]!r}; its inputs are {', '.join(parameters)}")
        self.inputs: Mapping[str, Any] = {name: defaults.get(name, _REQUIRED) for name in parameters}
        """Its inputs and their defaults."""

    def __repr__(self) -> str:
        return f"<pattern {self.name}({', '.join(self.inputs)})>"

    def __call__(self, **inputs: Any) -> RunningPattern:
        """Start it in the current graph. An input is a plain value, which becomes a cell, or a node.

        Raises:
            InvalidRequest: an input is missing or unknown, or there is no graph.
        """
        graph = current_graph()
        if unknown := sorted(set(inputs) - set(self.inputs)):
            raise InvalidRequest(f"{self.name} has no input {unknown[0]!r}; it has {', '.join(self.inputs) or 'none'}")
        given: dict[str, Node[Any]] = {}
        for name, default in self.inputs.items():
            value = inputs.get(name, default)
            if value is _REQUIRED:
                raise InvalidRequest(
                    f"{self.name} needs its input {name}; `atoll pattern` takes it as --set {name}=VALUE"
                )
            given[name] = value if isinstance(value, Node) else Cell(graph, value, name)
        return RunningPattern(self, graph, given, self._function(**given))

    @property
    def required(self) -> tuple[str, ...]:
        """Its inputs without a default."""
        return tuple(name for name, default in self.inputs.items() if default is _REQUIRED)

    def read_inputs(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Inputs that were written as text, each as a value of the type of its default.

        Raises:
            InvalidRequest: one cannot be converted, or is not an input of this pattern.
        """
        return {
            name: convert(text, self.inputs[name], name) if name in self.inputs else text
            for name, text in texts.items()
        }


@overload
def pattern(function: Callable[..., Mapping[str, Any]], /) -> Pattern: ...
@overload
def pattern(**defaults: Any) -> Callable[[Callable[..., Mapping[str, Any]]], Pattern]: ...
def pattern(function: Callable[..., Mapping[str, Any]] | None = None, /, **defaults: Any) -> Any:
    """Make a pattern of a function: `@pattern`, or `@pattern(language="python")` with defaults of its inputs.

    Its parameters are its inputs, which it gets as cells. It returns a mapping: `NAME` is its title, `UI` its view, and
    everything else an output, mostly nodes.
    """
    if function is not None:
        return Pattern(function, {})
    return lambda decorated: Pattern(decorated, defaults)


class RunningPattern:
    """A pattern in a graph: its inputs, its outputs and its view."""

    def __init__(
        self, pattern: Pattern, graph: Graph, inputs: Mapping[str, Node[Any]], outputs: Mapping[str, Any]
    ) -> None:
        self.pattern = pattern
        self.graph = graph
        self.inputs = inputs
        self.outputs: Mapping[str, Any] = {name: value for name, value in outputs.items() if name not in (NAME, UI)}
        for name, value in self.outputs.items():
            node = value.node if isinstance(value, SandboxHandle) else value
            if isinstance(node, Node) and node.name == f"{node.kind}-{node.id}":
                node.name = name
        self._title = PatternView(graph, outputs.get(NAME, pattern.name))
        self.view = PatternView(graph, outputs.get(UI))

    @property
    def name(self) -> str:
        """Its title as it is now; that of its function while the title waits."""
        tree = self._title.tree()
        return str(tree["text"]) if tree["type"] == "text" else self.pattern.name

    def set(self, name: str, text: str) -> None:
        """Set an input to what is written, converted to the type that it has.

        Raises:
            InvalidRequest: there is no such input, or it cannot be converted.
        """
        node = self.inputs.get(name)
        if not isinstance(node, Cell):
            raise InvalidRequest(f"{self.pattern.name} has no input {name!r} that can be set")
        node.set(convert(text, node.current.result, name))

    def results(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What its outputs are now, as JSON has it, and what those failed with that have failed.

        An output that is pending is what it was before, or null. Handlers are no results.
        """
        results: dict[str, Any] = {}
        errors: dict[str, str] = {}
        for name, value in self.outputs.items():
            if isinstance(value, Handler):
                continue
            node = value.node if isinstance(value, SandboxHandle) else value
            if isinstance(node, Node):
                results[name] = to_json(node.current.latest_complete if node.current.error is None else None)
                if node.current.error is not None:
                    errors[name] = describe(node.current.error)
            else:
                results[name] = to_json(value)
        return results, errors


def to_json(value: Any) -> Any:
    """A value as JSON has it; text where it has nothing like it."""
    if isinstance(value, CommandResult):
        fields = {"stdout": value.stdout, "stderr": value.stderr, "exit_code": value.exit_code}
        return {**fields, "files": dict(value.files)} if value.encoded_files else fields
    if isinstance(value, Frozen):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def load_pattern(source: str) -> Pattern:
    """The pattern of a Python file, or of several the one that is named after a colon: `FILE` or `FILE:NAME`.

    The file runs in this process, with all that this process may do.

    Raises:
        InvalidRequest: there is no such file, it has no such pattern, or several and none is named.
        Exception: whatever the file raises when it is run.
    """
    file, colon, name = source.partition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise InvalidRequest(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"atoll_pattern_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes that it defines look themselves up there
    spec.loader.exec_module(module)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Pattern)}
    if colon:
        if name not in found:
            raise InvalidRequest(f"{file} has no pattern {name!r}; it has {', '.join(found) or 'none'}")
        return found[name]
    if len(found) != 1:
        some = f"several: {', '.join(found)}; name one, as in {file}:{next(iter(found))}" if found else "none"
        raise InvalidRequest(f"a file has one pattern, made with @reactive.pattern; {file} has {some}")
    return next(iter(found.values()))
