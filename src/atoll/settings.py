"""The operator's settings. The one module that reads Atoll's own variables, besides `state_directory.py`.

Every setting can be given in code as `atoll.open(settings=Settings(…))` or as a variable with the prefix `ATOLL_`,
`ATOLL_STATE_DIR` for `state_dir`. Below the settings, nothing of Atoll depends on the environment, except for variables
that are not Atoll's own and are read where they are used:

    PATH                        drivers: where the runtimes are
    TERM, NO_COLOR              surfaces/cli: what the terminal of the command line can show, and the TERM of `-t`
    the NAME of --env NAME      surfaces/cli/values.py: a variable that the caller passes on by name
    the NAME of --secret …      surfaces/cli/values.py: the variable that holds a secret's value
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from atoll import state_directory
from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import AfterValidator, Field, FrozenRequest, holds_secret, pydantic_model
from atoll.contract.model import RuntimeName
from atoll.contract.names import DEFAULT_NAMESPACE, check_namespace

if TYPE_CHECKING:
    from pydantic import SecretStr, ValidationError

SHORTEST_KEY = 32
"""Of the key that encrypts secrets, in characters."""
SHORTEST_TOKEN = 16
"""Of the token that clients send, in characters."""
_PREFIX = "ATOLL_"


def program_environment() -> dict[str, str]:
    """Our environment without Atoll's own variables, for a program that Atoll starts on this machine.

    One of them is the key that encrypts secrets, and many such programs read files that a sandbox or a registry made.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}


def where_to_listen(value: str) -> tuple[str, int]:
    """The address, or `localhost`, and the port of `ADDRESS:PORT`.

    Raises:
        ValueError: it is not of this form.
    """
    address, _, port = value.rpartition(":")
    import ipaddress

    known = address == "localhost"
    with suppress(ValueError):
        known = known or bool(ipaddress.ip_address(address.strip("[]")))
    if not known or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            "give an address and a port, such as localhost:8000 or 0.0.0.0:8000; port 0 is any that is free"
        )
    return address.strip("[]"), int(port)


def _check_listen(value: str) -> str:
    where_to_listen(value)
    return value


def _check_webhook_rules(value: str) -> str:
    from atoll.contract.network import parse_rule

    for rule in value.split():
        if parse_rule(rule).network is None:
            raise ValueError(f"{rule!r} is not a rule for addresses, such as 10.1.0.0/16:443")
    return value


PreviewListen = Annotated[str, AfterValidator(_check_listen)]
WebhookRules = Annotated[str, AfterValidator(_check_webhook_rules)]


class Settings(FrozenRequest):
    state_dir: Path | None = None
    """Where sandboxes and images are kept. Unset: /var/lib/atoll for root, else atoll below $XDG_DATA_HOME or
    ~/.local/share."""
    namespace: Annotated[str, AfterValidator(check_namespace)] = DEFAULT_NAMESPACE
    """The namespace of engines that name none: whose sandboxes, checkpoints, volumes, sessions and warm pools they
    see."""
    image: str = "host"
    """The image of sandboxes that do not name one."""
    runtime: RuntimeName | None = None
    """The runtime of sandboxes that do not name one. Unset: the fastest that works on this machine."""
    secrets_key: SecretStr | None = Field(default=None, min_length=SHORTEST_KEY)
    """The key that encrypts secrets on disk: 32 characters or more, at random. Unset: the file `key` in the state
    directory, which is made when it is first needed."""
    model: str = "anthropic:claude-sonnet-5-5"
    """The model of agents that do not name one."""
    agent_models: str = "anthropic:* bedrock:* openai:* openai-chat:* openai-responses:*"
    """Models that agents of `atoll serve` may name besides `model`: patterns, separated by spaces. Scripted ones are
    files of this machine: `script:/srv/scripts/*`. Empty: none."""
    project_mib: int = Field(default=512, ge=1)
    """What the copy of a project may have, in MiB (`atoll agent --here`, `atoll mcp --upload`)."""
    project_files: int = Field(default=50_000, ge=1)
    """Files and directories that the copy of a project may have."""
    preview_listen: PreviewListen = "localhost:0"
    """The address of previews: an address, or `localhost` for both loopback addresses, and a port. Port 0 is any that
    is free, so that any number of programs can each serve their own."""
    mcp_token: SecretStr | None = Field(default=None, min_length=SHORTEST_TOKEN)
    """The token that clients of an MCP server over HTTP must send: 16 characters or more, at random. Unset: no token is
    required, and the server accepts clients of this machine only."""
    messages_token: SecretStr | None = Field(default=None, min_length=SHORTEST_TOKEN)
    """The token that clients of `atoll messages` must send as their API key: 16 characters or more, at random. Unset:
    any key is accepted, of clients of this machine only."""
    pattern_token: SecretStr | None = Field(default=None, min_length=SHORTEST_TOKEN)
    """The token with which the page of `atoll pattern serve` is opened, as `/?token=TOKEN`: 16 characters or more, at
    random. Unset: none is required, and the page is for browsers of this machine only."""

    url: str | None = Field(default=None, min_length=1)
    """The server whose sandboxes these are (`atoll serve`): `https://HOST[:PORT]`. The command line then works with it,
    and so does `atoll.connect()`. Unset: those of this machine."""
    api_key: SecretStr | None = Field(default=None, min_length=1)
    """The key for that server."""
    ca_file: Path | None = None
    """Certificates (PEM) that verify that server, such as a self-signed one of its own. Unset: those that this machine
    trusts."""
    database_url: SecretStr | None = Field(default=None, min_length=1)
    """The database of `atoll serve`: `postgresql+asyncpg://USER:PASSWORD@HOST/NAME`, or `sqlite+aiosqlite:////PATH`.
    Unset: SQLite, in the file `server/server.db` of the state directory."""
    webhook_allow: WebhookRules = ""
    """Addresses that webhooks of `atoll serve` may call though they are not public: network rules, separated by spaces,
    such as `10.1.0.0/16:443`. Empty: none."""

    @classmethod
    def variable(cls, name: str) -> str:
        """The variable of a setting."""
        return _PREFIX + name.upper()

    @classmethod
    def in_environment(cls) -> dict[str, str]:
        """The settings that the environment has, as they are written there."""
        variables = {name: cls.variable(name) for name in cls.field_names()}
        return {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}

    @classmethod
    def from_environment(cls) -> Self:
        """The settings in the environment.

        Raises:
            InvalidRequest: the value of a variable is not allowed.
        """
        given = cls.in_environment()
        return cls.checked(given, {name: cls.variable(name) for name in given})

    @classmethod
    def checked(cls, given: Mapping[str, Any], origins: Mapping[str, str]) -> Self:
        """The settings with these values. `origins` name where each was written, for messages.

        Raises:
            InvalidRequest: a value is not allowed. The message does not show a secret.
        """
        try:
            return cls.model_validate(dict(given))
        except ValueError as error:
            # Never chained: the message of pydantic's error shows the values of all wrong variables.
            first = cast("ValidationError", error).errors()[0]
            field = str(first["loc"][0])
            origin = origins[field]
            shown = f"{origin}: {field}" if "/" in origin else origin
            shortest = first.get("ctx", {}).get("min_length")
            if first["input"] == "" and shortest is not None:
                reason = f"{shown} is empty; give it a value, or unset it"
            elif not holds_secret(pydantic_model(cls).model_fields[field].annotation):
                reason = f"{shown}={first['input']!r}: {first.get('ctx', {}).get('error', first['msg'])}"
            elif shortest is not None:
                reason = f"{shown} has fewer than {shortest} characters"
            else:
                reason = f"{shown} is not allowed; its value is a secret and is not shown"
            raise InvalidRequest(reason) from None

    def webhook_rules(self) -> tuple[str, ...]:
        return tuple(self.webhook_allow.split())

    def preview_address(self) -> tuple[str, int]:
        return where_to_listen(self.preview_listen)

    def resolve_state_dir(self) -> Path:
        return Path(state_directory.resolve(None if self.state_dir is None else str(self.state_dir)))
