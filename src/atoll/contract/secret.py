"""Secrets as a caller hands them in: values that never show, and the places that they are for.

Knows what may be a secret, a host and a header. Refuses to know where values are kept (`runtime/secrets/vault.py`) and how they
get to a host (`runtime/secrets/injection.py`). No message here holds a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, SecretStr, ValidationError

from atoll.contract.errors import InvalidRequest
from atoll.contract.model import Frozen, check_env

PLAIN_HTTP = "http://"
"""What stands before a host that a secret may be sent to without TLS."""
_SHORTEST, _LONGEST = 8, 8192
"""Of a value. What is shorter would be found in answers that have nothing to do with it."""
_MOST = 64
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_HEADER = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_NOT_SECRET = frozenset(
    "connection content-encoding content-length content-type date expect host keep-alive proxy-authorization "
    "proxy-connection te trailer transfer-encoding upgrade via".split()
)
"""Headers that say how a request is to be read, and for whom it is."""


def _check_value(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not _SHORTEST <= len(text) <= _LONGEST:
        raise ValueError(f"the value of a secret has {_SHORTEST} to {_LONGEST} characters, this one {len(text)}")
    if not _VALUE.fullmatch(text):
        raise ValueError(
            "the value of a secret is printable ASCII without space at its ends; "
            "one that was read from a file may have a newline at its end"
        )
    return value


def _check_host(host: str) -> str:
    name = host.lower().removeprefix(PLAIN_HTTP)
    if len(name) > 253 or not _HOST.fullmatch(name) or name.rpartition(".")[2].isdigit():
        raise ValueError(
            f"{host[:300]!r} is not a host for a secret; write one name such as 'api.example.com', without a port, a "
            f"path or '*', or '{PLAIN_HTTP}NAME' for one that has no TLS"
        )
    return host.lower()


def _check_header(header: str) -> str:
    if not _HEADER.fullmatch(header.lower()) or header.lower() in _NOT_SECRET:
        raise ValueError(f"{header[:100]!r} is not a header for a secret; write one such as 'authorization'")
    return header.lower()


class Secret(Frozen):
    """A value that stays outside: the sandbox has a placeholder, which becomes the value on its way to `hosts` alone.

    Raises:
        InvalidRequest: the value, a host or the header cannot be one. The message never holds the value.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    value: Annotated[SecretStr, AfterValidator(_check_value)]
    """Shown as asterisks, whoever prints or dumps it."""
    hosts: Annotated[tuple[Annotated[str, AfterValidator(_check_host)], ...], Field(min_length=1, max_length=_MOST)]
    """Where it is sent: names, each for itself, on every port, over TLS. `http://NAME` is for one without TLS."""
    header: Annotated[str, AfterValidator(_check_header)] = "authorization"
    """The header that the placeholder is replaced in. It is not, anywhere else."""

    def __init__(self, value: str | SecretStr, *, hosts: Iterable[str], header: str = "authorization") -> None:
        given = {"value": value, "hosts": (hosts,) if isinstance(hosts, str) else tuple(hosts), "header": header}
        problem = None
        try:
            super().__init__(**given)
        except ValidationError as error:
            problem = _told(error)
        if problem is not None:  # raised here, so that nothing refers to what was given
            raise InvalidRequest(problem)


def check_secret_env(given: Mapping[str, str | SecretStr]) -> dict[str, str]:
    """The variables in `given`, if a process can be given them.

    Raises:
        InvalidRequest: a name is not one that shells accept, or a value is no text.
    """
    variables = {}
    for name, value in given.items():
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if not isinstance(text, str):
            raise InvalidRequest(f"the value of the variable {name!r} is not text")
        variables[name] = text
    return check_env(variables)


def _told(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    return str(cause) if cause else f"the secret's {first['loc'][0]}: {first['msg']}"
