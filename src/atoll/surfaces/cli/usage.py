"""Help texts: how a command and its parameters are described to people.

Owns the layout. Not here: what is described (the declarations in `commands/`, `options.py` and `sandbox_options.py`),
parsing (`grammar.py`). Imported only when help is asked for.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence

from atoll.surfaces.cli.grammar import HELP, Argument, Option, Parameter

_MAX_COLUMNS, _MIN_COLUMNS = 98, 50
_NAME_COLUMNS = 30
"""A longer name has its description on the next line."""


CommandSections = Mapping[str, Sequence[tuple[str, str]]]
"""The commands of a group below their headings: names and descriptions."""


def command_help(
    path: str, description: str, parameters: Sequence[Parameter], commands: CommandSections | None = None
) -> str:
    """The help of a command, or of a group that has `commands`. What a group can do comes before its options."""
    arguments = [each for each in parameters if isinstance(each.declared, Argument)]
    options = [each for each in parameters if isinstance(each.declared, Option)]
    words = [_argument_word(each) for each in arguments] if commands is None else ["COMMAND", "[ARGS]..."]
    lines = [" ".join(["Usage:", path, "[OPTIONS]", *words]), "", *_paragraphs(description)]
    if commands is not None:
        width = max(len(name) for listed in commands.values() for name, _ in listed)
        for heading, listed in commands.items():
            rows = [(name.ljust(width), summary(text, _columns() - 6 - width)) for name, text in listed]
            lines += ["", f"{heading}:", *_table(rows)]
    if arguments:
        lines += ["", "Arguments:", *_table([(each.declared.metavar, _described(each)) for each in arguments])]
    rows = [(_option_name(each), _described(each)) for each in options]
    lines += ["", "Options:", *_table([*rows, (", ".join(HELP), "Show this message and exit.")])]
    return "\n".join(lines)


def summary(description: str, limit: int = 45) -> str:
    """The first sentence of a description, cut to `limit` characters."""
    words = description.partition("\n\n")[0].split()
    end = next((number for number, word in enumerate(words, start=1) if word.endswith(".")), len(words))
    sentence = " ".join(words[:end])
    if len(sentence) <= limit:
        return sentence
    while end and len(" ".join(words[:end])) + 3 > limit:
        end -= 1
    return " ".join(words[:end]) + "..."


def _columns() -> int:
    try:
        columns = int(os.environ.get("COLUMNS", "")) or 80
    except ValueError:
        try:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns
        except (OSError, ValueError):
            columns = 80
    return max(min(columns - 2, _MAX_COLUMNS), _MIN_COLUMNS)


def _argument_word(each: Parameter) -> str:
    name = each.declared.metavar
    return (name if each.required else f"[{name}]") + ("..." if each.is_list else "")


def _option_name(each: Parameter) -> str:
    names = " / ".join(", ".join(sorted(side, key=len)) for side in (each.names, each.negative_names) if side)
    return f"{names} {each.declared.metavar}".rstrip()


def _described(each: Parameter) -> str:
    if isinstance(each.declared, Argument):
        return each.help
    if each.required:
        return f"{each.help}  [required]"
    if each.default is None or each.default is False:
        return each.help
    default = each.names[0].lstrip("-") if each.is_flag else each.default
    return f"{each.help}  [default: {default}]"


def _paragraphs(description: str) -> list[str]:
    """A docstring, wrapped. A paragraph that begins with a line `\\b` stays as it is."""
    lines: list[str] = []
    first, _, others = description.partition("\n")
    for paragraph in f"{first}\n{textwrap.dedent(others)}".strip().split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        body = rest.split("\n") if first == "\b" else textwrap.wrap(" ".join(paragraph.split()), _columns() - 2)
        lines += ["", *(f"  {line}" for line in body)]
    return lines[1:]


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = min(max(len(name) for name, _ in rows), _NAME_COLUMNS)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(_columns() - width - 4, 10), replace_whitespace=False)
        first = wrapped.pop(0) if len(name) <= width and wrapped else ""
        lines.append(f"  {name.ljust(width)}  {first}".rstrip())
        lines += [" " * (width + 4) + line for line in wrapped]
    return lines
