"""Secrets as a caller passes them: values that are never shown, and the hosts that they are for. And headers that are
set in requests on their way out.

Owns what is valid as a secret, a host and a header. Not here: how values are stored (`runtime/secrets/vault.py`) and
put into requests (`runtime/secrets/injection.py`). No message here contains a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from atoll.contract.errors import InvalidRequest
from atoll.contract.names import check_env

PLAIN_HTTP = "http://"
"""The prefix of a host to which a secret may be sent without TLS."""
_MIN_VALUE_CHARS, _MAX_VALUE_CHARS = 8, 8192
"""Of a value. A shorter one would be found in responses by chance."""
_MAX_HOSTS = 64
_MAX_HEADERS = 32
"""For one host."""
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_HEADER = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_NOT_SECRET = frozenset(
    "connection content-encoding content-length content-type date expect host keep-alive proxy-authorization "
    "proxy-connection te trailer transfer-encoding upgrade via".split()
)
"""Headers that decide how a request is parsed and where it goes."""


def _check_value(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not _MIN_VALUE_CHARS <= len(text) <= _MAX_VALUE_CHARS:
        raise ValueError(
            f"the value of the secret has {len(text)} characters; it must have {_MIN_VALUE_CHARS} to {_MAX_VALUE_CHARS}"
        )
    if not _VALUE.fullmatch(text):
        raise ValueError(
            "the value of a secret must be printable ASCII without a space at its ends; "
            "a value from a file may end with a newline, which has to be removed"
        )
    return value


def _check_host(host: str) -> str:
    name = host.lower().removeprefix(PLAIN_HTTP)
    if len(name) > 253 or not _HOST.fullmatch(name) or name.rpartition(".")[2].isdigit():
        raise ValueError(
            f"{host[:300]!r} is not a valid host for a secret; write one name such as 'api.example.com', without a "
            f"port, a path or '*', or '{PLAIN_HTTP}NAME' for a host without TLS"
        )
    return host.lower()


def _check_header(header: str) -> str:
    if not _HEADER.fullmatch(header.lower()) or header.lower() in _NOT_SECRET:
        raise ValueError(f"{header[:100]!r} is not a valid header for a secret; write one such as 'authorization'")
    return header.lower()


class Secret(BaseModel):
    """A value that stays outside: the sandbox has a placeholder, which is replaced only in requests to `hosts`.

    Raises:
        InvalidRequest: the value, a host or the header is not valid. The message never contains the value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    value: Annotated[SecretStr, AfterValidator(_check_value)]
    """Shown as asterisks when it is printed or dumped."""
    hosts: Annotated[
        tuple[Annotated[str, AfterValidator(_check_host)], ...], Field(min_length=1, max_length=_MAX_HOSTS)
    ]
    """The hosts that it is sent to: exact names, on every port, over TLS. `http://NAME` is a host without TLS."""
    header: Annotated[str, AfterValidator(_check_header)] = "authorization"
    """The only header in which the placeholder is replaced."""

    def __init__(self, value: str | SecretStr, *, hosts: Iterable[str], header: str = "authorization") -> None:
        given = {"value": value, "hosts": (hosts,) if isinstance(hosts, str) else tuple(hosts), "header": header}
        problem = None
        try:
            super().__init__(**given)
        except ValidationError as error:
            problem = _message(error)
        if problem is not None:  # raised here, so that no traceback refers to the value
            raise InvalidRequest(problem)


def check_request_headers(given: Mapping[str, Mapping[str, str | SecretStr]]) -> dict[str, dict[str, str]]:
    """Headers to set in requests, by host in lower case. Of two that differ in case only, the last counts.

    Raises:
        InvalidRequest: a host, a header or a value is not valid. The message never contains a value.
    """
    if len(given) > _MAX_HOSTS:
        raise InvalidRequest(f"headers are given for {len(given)} hosts; the limit is {_MAX_HOSTS}")
    checked: dict[str, dict[str, str]] = {}
    for host, headers in given.items():
        try:
            scheme = PLAIN_HTTP if host.lower().startswith(PLAIN_HTTP) else ""
            name = host[len(scheme) :]
            _check_host(name.removeprefix("*."))
            if len(headers) > _MAX_HEADERS:
                raise InvalidRequest(f"{len(headers)} headers are given for {host!r}; the limit is {_MAX_HEADERS}")
            spelled = {_check_header(header): header for header in headers}
            checked[scheme + name.lower()] = {
                header: _check_header_value(header, headers[header]) for header in spelled.values()
            }
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
    return checked


def _check_header_value(header: str, value: str | SecretStr) -> str:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if len(text) > _MAX_VALUE_CHARS or not _VALUE.fullmatch(text):
        raise ValueError(
            f"the value of the header {header!r} must be printable ASCII of 1 to {_MAX_VALUE_CHARS} characters, "
            "without a space at its ends"
        )
    return text


def check_secret_env(given: Mapping[str, str | SecretStr]) -> dict[str, str]:
    """The variables in `given`, checked.

    Raises:
        InvalidRequest: a name is not one that shells accept, or a value is not text.
    """
    variables = {}
    for name, value in given.items():
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if not isinstance(text, str):
            raise InvalidRequest(f"the value of the variable {name!r} is not text")
        variables[name] = text
    return check_env(variables)


def _message(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    return str(cause) if cause else f"the secret's {first['loc'][0]}: {first['msg']}"
