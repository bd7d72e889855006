"""`manifest.json` of a bundle: which tools it has, and what has to be installed for them.

Owns what a manifest may say, and the words for what is wrong with one. Not here: the archive around it (`archive.py`),
and what a model is told about a tool that the manifest does not describe (`schemas.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from atoll.tools.tool import StrictModel

BundleReason = Literal[
    "bundle_fetch_failed",
    "bundle_integrity_failed",
    "bundle_manifest_invalid",
    "bundle_build_failed",
    "bundle_entrypoint_invalid",
]
"""Why a bundle cannot be used."""


class ManifestTool(StrictModel):
    """A tool of a bundle."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    """What a model calls it; the same string as in `tools_config`."""
    entrypoint: str
    """`module:function`, such as `tools.read_file:run`."""
    description: str | None = None
    """What a model is told about it. Unset: the first paragraph of the function's docstring."""
    input_schema: dict[str, Any] | None = None
    """The JSON schema of its arguments. Unset: what the source of the function says."""


class BundleManifest(StrictModel):
    """What a bundle declares."""

    schema_version: Literal[1]
    tools: tuple[ManifestTool, ...]
    requirements: tuple[str, ...] = ()
    """Packages of Python, each pinned, as pip writes them."""
    node_modules: tuple[str, ...] = ()
    """Packages of npm, each pinned."""
    build_command: str | None = None
    """A shell command that is run once, after the packages are installed. Unset: none."""

    @classmethod
    def parse(cls, text: bytes) -> BundleManifest:
        """The manifest in `text`.

        Raises:
            BundleFailed: `bundle_manifest_invalid`; the message says what is wrong and what is allowed.
        """
        raise NotImplementedError
