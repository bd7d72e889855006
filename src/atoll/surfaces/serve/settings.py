"""The settings of `atoll serve`: those of an engine and those of the server, each from a flag, a variable or a file.

Owns what can be set, and where each value came from. A flag comes before a variable (`ATOLL_LISTEN` for `listen`), a
variable before the TOML file, the file before the default. Not here: reading the environment (`atoll/settings.py`), and
the commands (`surfaces/cli/commands/serve.py`).
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import AfterValidator, Field, holds_secret, pydantic_model
from atoll.settings import PreviewListen, Settings, where_to_listen

DEFAULT_LISTEN = "127.0.0.1:8080"
_DOMAIN = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")


def _check_domain(value: str) -> str:
    if not _DOMAIN.fullmatch(value):
        raise ValueError("give a host name in lower case, such as atoll.localhost or sandboxes.example.com")
    return value


def _check_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s]+", value):
        raise ValueError("give a URL without a path, such as https://sandboxes.example.com")
    return value


Domain = Annotated[str, AfterValidator(_check_domain)]
PublicUrl = Annotated[str, AfterValidator(_check_url)]


class ServerSettings(Settings):
    listen: PreviewListen = DEFAULT_LISTEN
    """The address and port of the server: an IP address, or `localhost` for both loopback addresses."""
    public_url: PublicUrl | None = None
    """The URL that clients use, if a reverse proxy is in front. Unset: that of `listen`."""
    domain: Domain = "atoll.localhost"
    """Previews are at PORT-NAME.DOMAIN. For other machines: a domain whose names (a wildcard in DNS) lead here."""
    hosts: tuple[str, ...] = ()
    """Host names that requests may be for, besides loopback, the addresses of this machine and `domain`; `*` is any."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of reverse proxies, whose X-Forwarded-For and X-Forwarded-Proto are believed."""
    tls_cert: Path | None = None
    """A certificate with its chain, as PEM. It is read again when it changes."""
    tls_key: Path | None = None
    """The key of `tls_cert`, as PEM."""
    tls_self_signed: tuple[str, ...] | None = None
    """Set: TLS with a certificate of our own, for `domain`, the names below it, loopback, and these names."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one object in each line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least of the log's levels that is written."""
    connections: int = Field(default=2048, ge=1)
    """Connections at the same time."""
    connections_per_client: int = Field(default=512, ge=1)
    """Connections at the same time of one address, or of one IPv6 network of 64 bits; not of `trusted_proxies`."""
    head_timeout_s: float = Field(default=10.0, gt=0)
    """For the head of a request, and for a TLS handshake."""
    body_timeout_s: float = Field(default=20.0, gt=0)
    """In which a body has to bring 1 KiB, or its end."""
    body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Of a request's body, but those that are written to a file or an archive."""
    shutdown_s: int = Field(default=10, ge=0)
    """For requests that are under way when the server stops."""
    mcp_tools: str = "workspace,sprites"
    """The tools of MCP clients at /mcp, as `atoll mcp --tools` takes them. Empty: there is no /mcp."""
    messages: bool = False
    """Whether there is /v1/messages, with `model`."""

    def listen_address(self) -> tuple[str, int]:
        return where_to_listen(self.listen)


@dataclass(frozen=True)
class SettingValue:
    """One setting as it is in effect."""

    name: str
    value: Any
    """As it is shown: a secret is `********`."""
    origin: str
    """A flag, a variable, a file, or `default`."""


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and where each came from."""

    settings: ServerSettings
    origins: Mapping[str, str]

    def shown(self) -> list[SettingValue]:
        """All settings, in their order."""
        return [
            SettingValue(name, _shown(getattr(self.settings, name)), self.origins.get(name, "default"))
            for name in ServerSettings.field_names()
        ]


def default_config() -> Path:
    """The file that is read if none is named, and if it is there."""
    if os.geteuid() == 0:
        return Path("/etc/atoll/server.toml")
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "atoll" / "server.toml"


def load(flags: Mapping[str, Any], config: Path | None = None) -> LoadedSettings:
    """The settings in effect. `flags` are those that were given, by the names of the settings.

    Raises:
        InvalidRequest: a value is not allowed, the file cannot be read or has an unknown name, or it holds a secret and
            others may read it.
    """
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    path = config or default_config()
    if config is not None or path.exists():
        values = _read(path)
        given.update(values)
        origins.update(dict.fromkeys(values, str(path)))
    for name, text in ServerSettings.in_environment().items():
        given[name] = _list_of(name, text)
        origins[name] = ServerSettings.variable(name)
    for name, value in flags.items():
        given[name] = value
        origins[name] = "--" + name.replace("_", "-")
    settings = ServerSettings.checked(given, origins)
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise InvalidRequest("tls_cert and tls_key belong together: give both, or neither")
    if settings.tls_cert is not None and settings.tls_self_signed is not None:
        raise InvalidRequest("there are tls_cert and tls_self_signed: give a certificate, or have one made, not both")
    return LoadedSettings(settings, origins)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            values = tomllib.load(file)
    except OSError as error:
        raise InvalidRequest(f"the settings {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the settings {path} are not valid TOML: {error}") from None
    known = ServerSettings.field_names()
    for name in values:
        if name not in known:
            raise InvalidRequest(f"{path}: unknown setting {name!r}; `atoll config` lists all of them")
    secrets = [name for name in values if _is_secret(name)]
    if secrets and stat.S_IMODE(mode) & 0o077:
        raise InvalidRequest(f"{path} holds {secrets[0]}, a secret, and others may read it; chmod 600 it")
    return values


def _is_secret(name: str) -> bool:
    return holds_secret(pydantic_model(ServerSettings).model_fields[name].annotation)


def _list_of(name: str, text: str) -> Any:
    """A variable's value: of a setting with several, they are separated by commas."""
    annotation = pydantic_model(ServerSettings).model_fields[name].annotation
    if "tuple" not in str(annotation) and tuple not in get_args(annotation):
        return text
    return tuple(filter(None, map(str.strip, text.split(","))))


def _shown(value: Any) -> Any:
    if hasattr(value, "get_secret_value"):
        return "********"
    return str(value) if isinstance(value, Path) else [*value] if isinstance(value, tuple) else value
