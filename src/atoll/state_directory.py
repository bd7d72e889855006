"""Where the state directory is: as the caller says, as `ATOLL_STATE_DIR` says, or one of this user; and the namespace.

Used by `settings.py`, and by `atoll exec`, which must start at once and needs no other setting. Imports nothing heavy.
"""

from __future__ import annotations

import os

from atoll.contract.names import DEFAULT_NAMESPACE, is_namespace

VARIABLE = "ATOLL_STATE_DIR"
NAMESPACE_VARIABLE = "ATOLL_NAMESPACE"
CHECKED = (
    "ATOLL_RUNTIME",
    "ATOLL_SECRETS_KEY",
    "ATOLL_PREVIEW_LISTEN",
    "ATOLL_MCP_TOKEN",
    "ATOLL_MESSAGES_TOKEN",
    "ATOLL_PATTERN_TOKEN",
    "ATOLL_DATABASE_URL",
    "ATOLL_WEBHOOK_ALLOW",
    "ATOLL_URL",
    "ATOLL_API_KEY",
    "ATOLL_CA_FILE",
    "ATOLL_PROJECT_MIB",
    "ATOLL_PROJECT_FILES",
)
"""The variables of settings that may have a wrong value, besides those two. A test compares."""


def resolve(setting: str | None) -> str:
    """The absolute path of the state directory. `setting` unset: /var/lib/atoll for root, else atoll below
    $XDG_DATA_HOME or ~/.local/share."""
    if setting is not None:
        return os.path.join(os.getcwd(), os.path.expanduser(setting))
    if os.geteuid() == 0:
        return "/var/lib/atoll"
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return os.path.join(os.path.expanduser(data), "atoll")


def server_url() -> str | None:
    """The server that the command line works with. None: with sandboxes of this machine."""
    return os.environ.get("ATOLL_URL")


def resolve_plain(given: str | None) -> str | None:
    """`resolve`, of what the caller gives or else of the environment. None: the settings have to be checked first."""
    if any(variable in os.environ for variable in CHECKED):
        return None
    setting = os.environ.get(VARIABLE) if given is None else given
    return None if setting == "" else resolve(setting)


def resolve_plain_namespace(given: str | None) -> str | None:
    """The namespace that the caller gives, or else the environment. None: the settings have to be checked first."""
    namespace = os.environ.get(NAMESPACE_VARIABLE, DEFAULT_NAMESPACE) if given is None else given
    return namespace if is_namespace(namespace) else None
