"""The rules for names: of sandboxes, volumes, templates, labels of checkpoints, namespaces and environment variables.

Used by the models and by every layer. Imports nothing heavy, because `atoll exec` imports it.
"""

from __future__ import annotations

import re

from atoll.contract.errors import InvalidRequest

NAME_RULE = "1 to 63 characters: lower-case letters, digits, '-', '_' and '.', beginning with a letter or a digit"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
TEMPLATE_PREFIX = "template:"
"""Before the name of a template where an image can be named too."""
DEFAULT_TAG = "default"
"""The tag of templates of those who name none."""
_SHOWN_CHARS = 200
DEFAULT_NAMESPACE = "default"
"""The namespace of those who name none."""
NAMESPACE_RULE = "1 to 32 characters: lower-case letters, digits and '-', beginning with a letter or a digit"
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
MAX_ENV_CHARS = 256 * 1024
"""Of an environment. No command starts with a longer one, and it is kept with its sandbox."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_name(name: str, *, noun: str = "a name for a sandbox") -> str:
    """Return `name` if it is allowed as what `noun` says: the name of a sandbox or volume, the label of a checkpoint.

    Raises:
        InvalidRequest: it is not; the message says what is allowed.
    """
    if not is_name(name):
        raise InvalidRequest(f"{name!r} is not {noun}; allowed are {NAME_RULE}", name=name)
    return name


def is_name(name: str) -> bool:
    """Whether `name` is allowed for a sandbox, a checkpoint or a volume."""
    return _NAME.fullmatch(name) is not None


def split_template(text: str) -> tuple[str, str]:
    """The name and the tag of a template: of `NAME`, `NAME:TAG`, or either after `template:`.

    Raises:
        InvalidRequest: it is not one.
    """
    name, colon, tag = text.removeprefix(TEMPLATE_PREFIX).partition(":")
    if not is_name(name) or (colon and not is_name(tag)):
        raise InvalidRequest(
            f"{text[:_SHOWN_CHARS]!r} is not a template; allowed are NAME and NAME:TAG, each of {NAME_RULE}"
        )
    return name, tag or DEFAULT_TAG


def check_namespace(namespace: str) -> str:
    """Return `namespace` if it is allowed as the name of a namespace.

    Raises:
        InvalidRequest: it is not; the message says what is allowed.
    """
    if not is_namespace(namespace):
        raise InvalidRequest(f"{namespace!r} is not a name for a namespace; allowed are {NAMESPACE_RULE}")
    return namespace


def is_namespace(namespace: str) -> bool:
    """Whether `namespace` is allowed as the name of a namespace."""
    return _NAMESPACE.fullmatch(namespace) is not None


def check_env(env: dict[str, str]) -> dict[str, str]:
    """Return `env` if a process can have it.

    Raises:
        InvalidRequest: a name is not one that shells accept, a value holds a NUL, or all of it is too long.
    """
    if (chars := sum(map(len, env)) + sum(map(len, env.values()))) > MAX_ENV_CHARS:
        raise InvalidRequest(
            f"the environment has {chars} characters; its names and values together may have {MAX_ENV_CHARS}. Write "
            "what is long to a file first"
        )
    for key, value in env.items():
        if not _ENV_NAME.fullmatch(key):
            raise InvalidRequest(
                f"{key!r} is not a name for an environment variable; allowed are letters, digits and '_', "
                "not beginning with a digit"
            )
        if "\0" in value:
            raise InvalidRequest(f"the value of the environment variable {key} holds a NUL character")
    return env
