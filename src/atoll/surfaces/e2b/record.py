"""What E2B says of a sandbox and Atoll has no field for: its template, its metadata, its time-out.

Owns that record and where it is kept: in reserved labels of the sandbox (`atoll.dev/e2b-000` and on), packed, because a
label's value is a short word and metadata are any texts. So it is written with the sandbox, forks and sandboxes from a
snapshot have it too, and nothing has to be cleared away. Used by all modules of this surface.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.contract.errors import InvalidRequest
from atoll.contract.model import RESERVED_LABELS, SandboxInfo
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.e2b.tokens import public_id

MAX_RECORD_BYTES = 32 * 1024
_LABEL = f"{RESERVED_LABELS}e2b-"
_CHUNK = 56


class E2bRecord(BaseModel):
    """One sandbox, as an E2B client made it. One that was made in another way has the defaults."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    template: str = "base"
    metadata: dict[str, str] = Field(default_factory=dict)
    timeout_s: int = 300
    """How long it lives when it is resumed by a request."""
    auto_resume: bool = False
    """Whether a request resumes it when it is paused."""
    keeps_memory: bool = True
    """Whether its last pause was to keep its processes."""
    public_ports: bool = False
    """Whether its ports can be reached by all who know its id. Only of sandboxes that an E2B client made."""
    internet: bool | None = None
    """As it was asked for. Unset: it was not."""
    network: dict[str, Any] = Field(default_factory=dict)
    """As it was asked for, to be shown again."""

    @classmethod
    def of(cls, info: SandboxInfo) -> E2bRecord:
        chunks = [info.labels[label] for label in sorted(info.labels) if label.startswith(_LABEL)]
        try:
            packed = "".join(chunks).upper()
            data = base64.b32decode(packed + "=" * (-len(packed) % 8)) if packed else b""
            unpacking = zlib.decompressobj()
            return cls.model_validate_json(unpacking.decompress(data, MAX_RECORD_BYTES)) if data else cls()
        except (binascii.Error, zlib.error, ValidationError):
            return cls()

    def labels(self, before: Mapping[str, str] | None = None) -> dict[str, str | None]:
        """The labels that keep it, and None for those of `before` that it does not need.

        Raises:
            InvalidRequest: it is too large.
        """
        data = self.model_dump_json(exclude_defaults=True).encode()
        if len(data) > MAX_RECORD_BYTES:
            raise InvalidRequest(
                f"metadata and network rules have {len(data)} bytes together; at most {MAX_RECORD_BYTES} are kept"
            )
        packed = base64.b32encode(zlib.compress(data)).decode().rstrip("=").lower()
        chunks = [packed[begin : begin + _CHUNK] for begin in range(0, len(packed), _CHUNK)]
        unneeded: dict[str, str | None] = {label: None for label in before or () if label.startswith(_LABEL)}
        return unneeded | {f"{_LABEL}{i:03}": chunk for i, chunk in enumerate(chunks)}


def own_variables(sandbox: Sandbox) -> dict[str, str]:
    """What programs at E2B find in their environment."""
    return {
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": public_id(sandbox.id),
        "E2B_TEMPLATE_ID": E2bRecord.of(sandbox.info).template,
    }
