"""What a build is asked for: a base, steps in their order, and what sandboxes of the template run.

Owns the steps, their limits, and how variables in them are expanded. Texts are not expanded until the build runs, since
a base's environment is known then. Not here: where a plan comes from (`dockerfile.py`, surfaces), and how it is carried
out (`builder.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from atoll.contract.documented import Documented
from atoll.contract.errors import BuildFailed
from atoll.contract.model import MAX_COMMAND_CHARS

MAX_STEPS = 256
MAX_SOURCES = 4096
"""Of one copy."""
MAX_TEXT_CHARS = 64 * 1024
"""Of one command, path or value."""
MAX_EXPANDED_CHARS = 256 * 1024
MAX_VARIABLES_CHARS = 1024 * 1024
"""Of the names and values of all variables of a build. A program can be given no more."""
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS, pattern=r"^[^\x00]*$")]
VariableName = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Words = Annotated[tuple[Text, ...], Field(min_length=1, max_length=1024)]
KeptWords = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_COMMAND_CHARS, pattern=r"^[^\x00]*$")], ...], Field(max_length=1024)
]
_REFERENCE = re.compile(
    r"\\(?P<escaped>.)|\$(?P<plain>[A-Za-z_][A-Za-z0-9_]*)"
    r"|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*+)(?P<rest>:?[-+?])?(?P<word>[^{}]*+)\}",
    re.DOTALL,
)
"""Possessive: a brace that is never closed would be looked for again from each character of the name."""


class PlanModel(Documented):
    """The base of what a plan is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """With `kind` required: it tells steps apart."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        shown = handler.resolve_ref_schema(schema)
        if "kind" in shown.get("properties", {}):
            shown["required"] = ["kind", *shown.get("required", [])]
        return schema


class RunStep(PlanModel):
    """Run a program. What it leaves running ends with the step."""

    kind: Literal["run"] = "run"
    command: Words
    shown: Text = ""
    """As its author wrote it. Empty: the command."""
    user: Text | None = None
    """Unset: that of the steps before."""
    force: bool = False
    """It is run even if its result is kept."""


class CopyStep(PlanModel):
    """Copy files of an archive."""

    kind: Literal["copy"] = "copy"
    archive: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """What the archive is called: where the builder is given its bytes (`ArchiveSource`)."""
    sources: Annotated[tuple[Text, ...], Field(min_length=1, max_length=MAX_SOURCES)]
    """Names in the archive, relative to its root."""
    are_patterns: bool = False
    """The sources are patterns of names: `*`, `?` and `[…]` within a name, `**` any number of directories."""
    destination: Text
    owner: Text | None = None
    """`USER` or `USER:GROUP`. Unset: root; with `owned_by_user`, the user of the steps before."""
    owned_by_user: bool = False
    mode: Annotated[str, Field(pattern=r"^[0-7]{3,4}$")] | None = None
    shown: Text = ""
    force: bool = False


class WorkdirStep(PlanModel):
    kind: Literal["workdir"] = "workdir"
    path: Text


class UserStep(PlanModel):
    kind: Literal["user"] = "user"
    user: Text


class EnvStep(PlanModel):
    """Set variables, for the steps after it and for sandboxes of the template."""

    kind: Literal["env"] = "env"
    variables: Annotated[dict[VariableName, Text], Field(min_length=1, max_length=256)]


class ArgStep(PlanModel):
    """Declare a build argument: a variable of the steps after it alone."""

    kind: Literal["arg"] = "arg"
    name: VariableName
    default: Text | None = None


BuildStep = Annotated[RunStep | CopyStep | WorkdirStep | UserStep | EnvStep | ArgStep, Field(discriminator="kind")]


class BuildPlan(PlanModel):
    """A build. The first user and directory are those of the steps before the first that names others."""

    image: Text | None = None
    """The base. With `template:` it is another template. Unset: the engine's default image."""
    steps: Annotated[tuple[BuildStep, ...], Field(max_length=MAX_STEPS)] = ()
    arguments: dict[VariableName, Text] = Field(default_factory=dict, max_length=256)
    """Values of build arguments."""
    first_user: Text = "root"
    first_cwd: Text = "/"
    user: Text | None = None
    """Of sandboxes, if no step names one. Unset: the base's."""
    start_command: KeptWords = ()
    ready_command: KeptWords = ()


def check_variables(*variables: Mapping[str, str]) -> None:
    """
    Raises:
        BuildFailed: together they are too long.
    """
    size = sum(len(name) + len(value) for each in variables for name, value in each.items())
    if size > MAX_VARIABLES_CHARS:
        raise BuildFailed(f"the variables of the build have {size} characters; they may have {MAX_VARIABLES_CHARS}")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with `$NAME`, `${NAME}`, `${NAME:-word}` and `${NAME:+word}` replaced, and with backslashes taken away.
    What is not set is empty.

    Raises:
        BuildFailed: there is another form of `${…}`, or the result is too long.
    """
    size = 0

    def value(found: re.Match[str]) -> str:
        nonlocal size
        if found["escaped"] is not None:
            return found["escaped"] if found["escaped"] in "$\\\"'" else found[0]
        name, rest, word = found["plain"] or found["name"], found["rest"], found["word"] or ""
        if rest is None and word:
            raise _not_expandable(found[0])
        known = variables.get(name)
        is_set = known is not None and (known != "" or not (rest or "").startswith(":"))
        match (rest or "")[-1:]:
            case "-":
                known = known if is_set else expand(word, variables)
            case "+":
                known = expand(word, variables) if is_set else ""
            case "?":
                if not is_set:
                    raise BuildFailed(f"the variable {name} is not set: {word[:200] or found[0][:200]}", unset=name)
        size += len(known or "")
        if size > MAX_EXPANDED_CHARS:
            raise BuildFailed(f"{text[:100]!r} is longer than {MAX_EXPANDED_CHARS} characters when it is expanded")
        return known or ""

    if "${" in text and (odd := re.search(r"(?<!\\)\$\{(?![A-Za-z_])", text)):
        raise _not_expandable(text[odd.start() : odd.start() + 40])
    return _REFERENCE.sub(value, text)


def _not_expandable(text: str) -> BuildFailed:
    return BuildFailed(
        f"{text[:200]!r} cannot be expanded; allowed are $NAME, ${{NAME}}, ${{NAME:-word}} and ${{NAME:+word}}"
    )
