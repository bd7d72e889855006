"""A sandbox's spec as a caller asks for it: validated, and its limits completed with defaults.

Not here: the model itself (`contract/model.py`), and the resolved spec (`layers.py`). Used by the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from atoll.contract.driver import Capabilities
from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import explain_invalid
from atoll.contract.model import Limits, SandboxSpec

if TYPE_CHECKING:
    from pydantic import ValidationError

_MEMORY_BYTES = 2 * 1024**3
_PIDS = 1024
_RULES = {
    "user": ("user", "a name or a number of 1 to 255 characters"),
    "cwd": ("working directory", "an absolute path of at most 4095 characters"),
    "runtime": ("runtime", "a name of lower-case letters, digits, '-' and '_'"),
    "pause_after_s": ("time until it is paused", "above 0 and at most 1,000,000 seconds"),
    "on_expiry": ("end of its lifetime (on_expiry)", "'destroy', 'sleep' or 'pause'"),
}
"""What some fields are called in words, and what is allowed."""


def validate_spec(**fields: object) -> SandboxSpec:
    """The spec with these fields.

    Raises:
        InvalidRequest: a field is not allowed; the message names the first such field.
    """
    try:
        spec = SandboxSpec.model_validate(fields)
    except ValueError as error:
        first = cast("ValidationError", error).errors()[0]
        cause = first.get("ctx", {}).get("error")
        where = ".".join(str(part) for part in first["loc"])
        message = explain_invalid(first)
        if where in _RULES and cause is None:
            noun, rule = _RULES[where]
            message = f"the {noun} is {first['input']!r}; it must be {rule}"
        raise InvalidRequest(message, field=where) from error
    if spec.ephemeral and spec.on_expiry != "destroy":
        raise InvalidRequest(
            f"an ephemeral sandbox cannot {spec.on_expiry} when its lifetime is over; leave on_expiry out"
        )
    return spec


def check_lifetime(spec: SandboxSpec) -> None:
    """
    Raises:
        InvalidRequest: it says what happens at the end of a lifetime that it does not have.
    """
    if spec.ttl_s is None and (spec.on_expiry != "destroy" or spec.ttl_renewed_by_use):
        raise InvalidRequest("on_expiry and ttl_renewed_by_use are about the end of a lifetime; give ttl_s, too")


def with_defaults(limits: Limits, able: Capabilities) -> Limits:
    """Limits with defaults for those that are unset and that a runtime can enforce."""
    defaults: dict[str, object] = {}
    if limits.memory_bytes is None and able.memory_limit:
        defaults["memory_bytes"] = _MEMORY_BYTES
    if limits.pids is None and able.pids_limit:
        defaults["pids"] = _PIDS
    return limits.model_copy(update=defaults)
