"""Image references: `host`, a path of this machine, a template, or a name in a registry.

Owns how they are written. Not here: whether there is such an image (`store.py`). Used by the image store, exports, warm
pools and tools.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, get_args

from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import Frozen
from atoll.contract.names import TEMPLATE_PREFIX, split_template

PathKind = Literal["dir", "tar", "oci", "oci-archive", "docker-archive"]
ImageKind = Literal["host", "registry", "template"] | PathKind

HOST = "host"
RULE = (
    "'host', 'dir:/a/root/file/system', 'tar:/a/root/file/system.tar', an OCI layout 'oci:/path[:tag]', a template "
    "'template:NAME[:TAG]', or the name of an image in a registry, such as 'python:3.12' or "
    "'ghcr.io/owner/name@sha256:…'"
)

_DOMAIN = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?")
_WORD = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_WORD}(?:/{_WORD})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LENGTH_LIMIT = 512


_PATH_KINDS: tuple[PathKind, ...] = get_args(PathKind)


class ImageReference(Frozen):
    """A reference in its full form: all spellings of one reference are equal."""

    kind: ImageKind
    name: str
    """The full form: `docker.io/library/python:3.12`, `dir:/srv/rootfs`."""
    path: Path | None = None
    """Its path on this machine. Unset for `host` and for an image in a registry."""
    repository: str = ""
    """`docker.io/library/python`. Empty for an image that is not in a registry."""
    selector: str = ""
    """`:tag` or `@sha256:…`. Empty for an image that is not in a registry and has no tag."""

    @property
    def is_local(self) -> bool:
        """Whether it names a path of this machine, which not every caller is allowed to."""
        return self.path is not None

    @property
    def short(self) -> str:
        """The usual short spelling."""
        return self.name.removeprefix("docker.io/").removeprefix("library/")

    @classmethod
    def parse(cls, text: str) -> ImageReference:
        """Parse a reference as Docker does: `python` is `docker.io/library/python:latest`.

        Raises:
            InvalidRequest: it is not a reference; the message lists what is allowed.
        """
        if text == HOST:
            return cls(kind="host", name=HOST)
        if text.startswith(TEMPLATE_PREFIX):
            return cls(kind="template", name="{}{}:{}".format(TEMPLATE_PREFIX, *split_template(text)))
        for kind in _PATH_KINDS:
            if text.startswith(f"{kind}:"):
                return cls._parse_path(kind, text.removeprefix(f"{kind}:"))
        name, at, digest = text.removeprefix("docker://").partition("@")
        base, colon, tag = name.rpartition(":")
        if not colon or "/" in tag:
            base, tag = name, "latest"
        domain, slash, path = base.partition("/")
        if not slash or not (re.search(r"[.:A-Z]", domain) or domain == "localhost"):
            domain, path = "docker.io", base
        if domain == "index.docker.io":
            domain = "docker.io"
        if domain == "docker.io" and "/" not in path:
            path = f"library/{path}"
        spelled = _DOMAIN.fullmatch(domain) and _PATH.fullmatch(path) and _TAG.fullmatch(tag)
        if not spelled or (at and not _DIGEST.fullmatch(digest)) or len(text) > _LENGTH_LIMIT:
            shown = text[:_LENGTH_LIMIT]
            raise InvalidRequest(f"{shown!r} is not an image reference; allowed are {RULE}", image=shown)
        selector = f"@{digest}" if at else f":{tag}"  # with both, the digest decides, as with docker
        repository = f"{domain}/{path}"
        return cls(kind="registry", name=repository + selector, repository=repository, selector=selector)

    @classmethod
    def _parse_path(cls, kind: PathKind, rest: str) -> ImageReference:
        tag = ""
        if kind == "oci" and not os.path.exists(rest):
            head, colon, tail = rest.rpartition(":")
            if colon and _TAG.fullmatch(tail):
                rest, tag = head, f":{tail}"
        if not rest.startswith("/") or "\0" in rest:
            raise InvalidRequest(f"'{kind}:' must be followed by an absolute path", path=rest)
        path = os.path.normpath(rest)
        return cls(kind=kind, name=f"{kind}:{path}{tag}", path=Path(path), selector=tag)
