"""`manifest.json` of a bundle: which tools it has, and what has to be installed for them.

Owns what a manifest may say, and the words for what is wrong with one. Not here: the archive around it (`archive.py`),
and what a model is told about a tool that the manifest does not describe (`schemas.py`). Used by these, and by
`workspace.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

import pydantic_core
from pydantic import AfterValidator, Field, ValidationError, model_validator

from atoll.contract.errors import BundleFailed
from atoll.tools.tool import NAME_RULE, StrictModel, quoted

BundleReason = Literal[
    "bundle_fetch_failed",
    "bundle_integrity_failed",
    "bundle_manifest_invalid",
    "bundle_build_failed",
    "bundle_entrypoint_invalid",
]
"""Why a bundle cannot be used."""
MAX_MANIFEST_BYTES = 256 * 1024
MAX_TOOLS = 128
MAX_PACKAGES = 256
"""Of each kind."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_ENTRYPOINT = re.compile(rf"tools(?:\.{_WORD})+:{_WORD}", re.ASCII)
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9._, -]*\])?"
    r" *== *[0-9][A-Za-z0-9.!+_-]*(?: *;[ A-Za-z0-9._<>=!'\"()-]+)?",
    re.ASCII,
)
_NODE_MODULE = re.compile(
    r"(?:@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@[0-9]+\.[0-9]+\.[0-9]+(?:[-+][A-Za-z0-9.+-]+)?", re.ASCII
)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tool cannot be called {quoted(name)}; allowed are {NAME_RULE}")
    return name


def _check_entrypoint(entrypoint: str) -> str:
    if not _ENTRYPOINT.fullmatch(entrypoint):
        raise ValueError(
            f"{quoted(entrypoint)} is no entrypoint; write module:function with a module in the directory tools, such "
            "as 'tools.read_file:run'"
        )
    return entrypoint


def _check_requirement(requirement: str) -> str:
    if not _REQUIREMENT.fullmatch(requirement):
        raise ValueError(
            f"{quoted(requirement)} is no requirement with a pinned version; write one such as 'httpx==0.28.1', "
            "without options, URLs or paths"
        )
    return requirement


def _check_node_module(module: str) -> str:
    if not _NODE_MODULE.fullmatch(module):
        raise ValueError(
            f"{quoted(module)} is no package of npm with a pinned version; write one such as 'left-pad@1.3.0'"
        )
    return module


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise ValueError("the JSON schema of arguments must describe an object, with 'properties' as an object")
    return {**schema, "type": "object"}


class ManifestTool(StrictModel):
    """A tool of a bundle."""

    name: Annotated[str, AfterValidator(_check_name)]
    """What a model calls it; the same string as in `tools_config`."""
    entrypoint: Annotated[str, AfterValidator(_check_entrypoint)]
    """`module:function`, such as `tools.read_file:run`."""
    description: Annotated[str, Field(min_length=1, max_length=8192)] | None = None
    """What a model is told about it. Unset: the first paragraph of the function's docstring."""
    input_schema: Annotated[dict[str, Any], AfterValidator(_check_schema)] | None = None
    """The JSON schema of its arguments. Unset: what the source of the function says."""

    @property
    def module(self) -> str:
        return self.entrypoint.partition(":")[0]

    @property
    def function(self) -> str:
        return self.entrypoint.partition(":")[2]


class BundleManifest(StrictModel):
    """What a bundle declares."""

    schema_version: Literal[1]
    tools: Annotated[tuple[ManifestTool, ...], Field(min_length=1, max_length=MAX_TOOLS)]
    requirements: Annotated[
        tuple[Annotated[str, AfterValidator(_check_requirement)], ...], Field(max_length=MAX_PACKAGES)
    ] = ()
    """Packages of Python, each pinned, as pip writes them."""
    node_modules: Annotated[
        tuple[Annotated[str, AfterValidator(_check_node_module)], ...], Field(max_length=MAX_PACKAGES)
    ] = ()
    """Packages of npm, each pinned. They are installed for all programs of the workspace, as with `npm install -g`."""
    build_command: Annotated[str, Field(min_length=1, max_length=8192, pattern=r"^[^\x00]*$")] | None = None
    """A line for the shell that is run once, after the packages are installed, beside `tools`. Unset: none."""

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [tool.name for tool in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two tools are named {twice[0]!r}; a model could not tell which is which")
        return self

    @classmethod
    def parse(cls, text: bytes) -> BundleManifest:
        """The manifest in `text`.

        Raises:
            BundleFailed: `bundle_manifest_invalid`; the message says what is wrong and what is allowed.
        """
        try:
            given = pydantic_core.from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise invalid(f"manifest.json is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise invalid('manifest.json must be an object, such as {"schema_version": 1, "tools": [...]}')
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            errors = error.errors()
            within = {each["loc"][:1] for each in errors if len(each["loc"]) > 1}
            # A list whose items are all wrong is said to be too short as well.
            told = [each for each in errors if each["type"] != "too_short" or each["loc"] not in within]
            raise invalid("manifest.json: " + "; ".join(map(_words, told[:8]))) from None


def invalid(message: str) -> BundleFailed:
    """The error of an archive or a manifest that is none of a bundle."""
    return BundleFailed("bundle_manifest_invalid", message)


def _words(error: pydantic_core.ErrorDetails) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "extra_forbidden":
        return f"there is no field {quoted(where)}"
    if error["type"] in {"too_short", "too_long"}:
        about = error["ctx"]
        bound = (
            f"no fewer than {about['min_length']}" if "min_length" in about else f"no more than {about['max_length']}"
        )
        return f"{where} has {about['actual_length']} items; it may have {bound}"
    if error["type"] == "string_pattern_mismatch":
        return f"{where} has a NUL byte in it, which no command can have"
    if where == "schema_version":
        return f"schema_version is {quoted(error['input'])}; this server reads version 1"
    reason = error["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{where}: {reason}" if where else reason
