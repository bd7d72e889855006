"""One name, one thing: types are defined in one module, and lists of names agree with the names that they list."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import atoll
from atoll.contract import errors

PACKAGE = Path(atoll.__file__).parent
_TYPE_NAME = re.compile(r"_*[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
"""CamelCase: an assignment to such a name at the top of a module is an alias for a type. Constants are upper case."""


def type_names(module: Path) -> Iterator[str]:
    """The classes and the aliases for types that a module defines, without a leading underscore.

    Type variables do not count: they are local to the signatures that use them.
    """
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not is_type_variable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and _TYPE_NAME.fullmatch(target.id):
                    yield target.id.lstrip("_")


def is_type_variable(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in {"TypeVar", "ParamSpec", "TypeVarTuple"}


def test_no_type_name_is_defined_in_two_modules() -> None:
    homes = defaultdict(set)
    for module in sorted(PACKAGE.rglob("*.py")):
        for name in type_names(module):
            homes[name].add(str(module.relative_to(PACKAGE)))
    twice = [f"{name}: {', '.join(sorted(modules))}" for name, modules in sorted(homes.items()) if len(modules) > 1]
    assert not twice, "defined in more than one module:\n" + "\n".join(twice)


def test_what_is_loaded_at_run_time_is_what_type_checkers_see() -> None:
    """`atoll/__init__.py` writes its names twice: as imports for type checkers, and as `_HOMES` for the interpreter."""
    (block,) = [
        node
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom), ast.unparse(statement)
        assert statement.module is not None
        for name in statement.names:
            assert name.asname == name.name, f"{name.name} is not exported: write `{name.name} as {name.name}`"
            seen[name.name] = statement.module
    loaded = {name: module for module, names in atoll._HOMES.items() for name in names.split()}
    assert loaded == seen


def test_the_drawn_tree_of_errors_is_the_tree_of_classes() -> None:
    """The docstring of `contract/errors.py` draws every error below its base, with the builtin that it also is."""
    drawn: list[tuple[str, str | None, str | None]] = []
    above: list[str] = []
    for branch, name, builtin in re.findall(
        r"^    ([ │├└─]*)(\w+)(?: +\((\w+)\))?", errors.__doc__ or "", re.MULTILINE
    ):
        depth = len(branch) // 4
        above[depth:] = [name]
        drawn.append((name, above[depth - 1] if depth else None, builtin or None))
    defined = []
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.AtollError):
            first, *builtins = kind.__bases__
            base = first.__name__ if first is not Exception else None
            defined.append((name, base, builtins[0].__name__ if builtins else None))
    assert sorted(drawn, key=str) == sorted(defined, key=str)
