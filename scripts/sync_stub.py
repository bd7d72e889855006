"""Writes `src/atoll/sync.pyi`, the types of the blocking face, from the sources of the asynchronous classes.

    python scripts/sync_stub.py            write it
    python scripts/sync_stub.py --check    fail if it is not current

Each public method of a class becomes one that blocks: what is awaited is returned, an asynchronous iterator or context
manager becomes a blocking one, and a class of the list becomes its blocking counterpart. `make format` runs it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.client import engine as client
from atoll.runtime import engine as asynchronous
from atoll.sync import CLASSES

STUB = Path(__file__).resolve().parent.parent / "src" / "atoll" / "sync.pyi"
RENAMED = {
    "AsyncIterator": "Iterator",
    "AsyncIterable": "Iterable",
    "AbstractAsyncContextManager": "AbstractContextManager",
    "ByteStream": "PortConnection",
}
"""What stands for what, in annotations."""
MAGIC = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "__anext__": "__next__"}
HEAD = '''# Written by scripts/sync_stub.py from the asynchronous classes; `make format` writes it again.
"""The types of the blocking face."""
'''


class Names(ast.NodeTransformer):
    """Translates an annotation, and notes from where each of its names has to be imported."""

    def __init__(self) -> None:
        self.imports: dict[str, str] = {}
        self._homes: dict[str, str] = {}

    def in_module(self, module: str) -> None:
        tree = ast.parse(Path(inspect.getfile(importlib.import_module(module))).read_text())
        self._homes = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self._homes[alias.asname or alias.name] = f"from {node.module} import {alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self._homes[alias.asname or alias.name] = f"import {alias.name}"
        for node in tree.body:
            for name in _defined(node):
                self._homes[name] = f"from {module} import {name}"

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        match node:
            case ast.Subscript(value=ast.Name(id="AwaitableContext"), slice=made):
                return self.visit(made)
            case ast.Subscript(value=ast.Name(id="AsyncGenerator"), slice=ast.Tuple(elts=[given, *_])):
                return self.visit(ast.Subscript(ast.Name("Iterator"), given))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        name = RENAMED.get(node.id, node.id)
        if name in CLASSES or hasattr(builtins, name):
            return ast.Name(name)
        if name in ("Iterator", "Iterable"):
            self.imports[name] = f"from collections.abc import {name}"
        elif name == "AbstractContextManager":
            self.imports[name] = f"from contextlib import {name}"
        else:
            self.imports[name] = self._homes[name]
        return ast.Name(name)

    def text(self, annotation: ast.expr) -> str:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        return ast.unparse(self.visit(annotation))


def _defined(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.If(body=body):
            for inner in body:
                yield from _defined(inner)


def main() -> int:
    written = _stub()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(written)
        return 0
    if STUB.exists() and STUB.read_text() == written:
        return 0
    sys.stderr.write("src/atoll/sync.pyi is not current: run 'make format'\n")
    return 1


def _stub() -> str:
    names = Names()
    classes = [_class(name, module, names) for name, module in CLASSES.items()]
    opening = ""
    for function in (asynchronous.open, client.connect):
        names.in_module(function.__module__)
        opening += "".join(f"{line}\n" for line in _method(_parse(function), names).values())
    imports = "\n".join(sorted(set(names.imports.values())))
    text = "\n".join([HEAD, imports, "", "CLASSES: dict[str, str]\n", opening, "", "class Blocking: ...\n", *classes])
    ruff = [sys.executable, "-m", "ruff"]
    for step in (["check", "--fix", "--quiet", "--select", "I,F401"], ["format", "--quiet"]):
        command = [*ruff, *step, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _parse(defined: object) -> Any:
    """The syntax tree of a class or a function."""
    return ast.parse(inspect.getsource(defined)).body[0]  # type: ignore[arg-type]


def _class(name: str, module: str, names: Names) -> str:
    kind = getattr(importlib.import_module(module), name)
    lines: dict[str, str] = {}
    for each in reversed([base for base in kind.__mro__ if base.__module__.startswith("atoll.")]):
        names.in_module(each.__module__)
        for statement in _parse(each).body:
            lines |= _members(statement, names)
    body = "\n".join(f"    {line}" for line in lines.values())
    return f"class {name}(Blocking):\n{body}\n"


def _members(node: ast.stmt, names: Names) -> dict[str, str]:
    """The stub lines of one statement of a class, by the name of what they define."""
    match node:
        case ast.FunctionDef(name="__init__"):
            return _attributes(node, names)
        case ast.FunctionDef() | ast.AsyncFunctionDef() if not node.name.startswith("_") or node.name in MAGIC:
            return _method(node, names)
        case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
            return {name: f"{name}: {names.text(node.annotation)}"}
    return {}


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> dict[str, str]:
    decorators = {ast.unparse(each).rpartition(".")[2].replace("cached_", "") for each in node.decorator_list}
    name = MAGIC.get(node.name, "close" if node.name == "aclose" else node.name)
    arguments = _arguments(node.args, names)
    returned = names.text(node.returns) if node.returns else "None"
    if "asynccontextmanager" in decorators:
        names.text(ast.Name("AbstractContextManager"))
        returned = f"AbstractContextManager[{returned.removeprefix('Iterator[').removesuffix(']')}]"
    kept = [f"@{each}\n    " for each in ("property", "staticmethod", "classmethod", "overload") if each in decorators]
    return {name: f"{''.join(kept)}def {name}({arguments}) -> {returned}: ..."}


def _arguments(arguments: ast.arguments, names: Names) -> str:
    for each in (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        *filter(None, (arguments.vararg, arguments.kwarg)),
    ):
        if each.annotation is not None:
            each.annotation = ast.parse(names.text(each.annotation), mode="eval").body
    # A default that is a name would have to be imported. What it is, the asynchronous API says.
    for defaults in (arguments.defaults, arguments.kw_defaults):
        for index, default in enumerate(defaults):
            if default is not None and not isinstance(default, ast.Constant):
                defaults[index] = ast.Constant(...)
    return ast.unparse(arguments)


def _attributes(node: ast.FunctionDef, names: Names) -> dict[str, str]:
    """The public attributes that a constructor sets: annotated, given as an argument, or made by calling a class."""
    given = {each.arg: each.annotation for each in (*node.args.args, *node.args.kwonlyargs)}
    found: dict[str, ast.expr | None] = {}
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Attribute(attr=attr), annotation=annotation):
                found[attr] = annotation
            case ast.Assign(targets=[ast.Attribute(attr=attr)], value=ast.Name(id=argument)):
                found[attr] = given.get(argument)
            case ast.Assign(
                targets=[ast.Attribute(attr=attr)],
                value=ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)),
            ) if called in CLASSES:
                found[attr] = ast.Name(called)
    return {
        attr: f"{attr}: {names.text(annotation)}"
        for attr, annotation in found.items()
        if annotation is not None and not attr.startswith("_")
    }


if __name__ == "__main__":
    sys.exit(main())
