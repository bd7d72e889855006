"""Namespaces: which of the sandboxes, checkpoints, volumes, sessions and warm pools of a state directory are whose.

Owns how an entry of the state directory says which namespace it belongs to: `NAME` for that of the namespace `default`,
`NAMESPACE:NAME` for that of another. No name, id or key has a ':' in it, so two namespaces cannot mean the same entry,
and what looks for a name of one cannot find that of another. Not here: which namespace an engine has (`engine.py`), and
the rule for the names of namespaces (`contract/names.py`). Used by all that keeps named entries. Imports nothing heavy,
because `atoll exec` imports it.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.contract.names import DEFAULT_NAMESPACE

_SEPARATOR = ":"


def entry_of(namespace: str, name: str) -> str:
    """The entry of what has this name in a namespace. Prefixes of names give prefixes of entries."""
    return name if namespace == DEFAULT_NAMESPACE else f"{namespace}{_SEPARATOR}{name}"


def split_entry(entry: str) -> tuple[str, str]:
    """The namespace and the name of an entry."""
    namespace, _, name = entry.rpartition(_SEPARATOR)
    return namespace or DEFAULT_NAMESPACE, name


def names_in(namespace: str, entries: Iterable[str]) -> list[str]:
    """The names of those entries that belong to a namespace."""
    if namespace == DEFAULT_NAMESPACE:
        return [entry for entry in entries if _SEPARATOR not in entry]
    start = f"{namespace}{_SEPARATOR}"
    return [entry[len(start) :] for entry in entries if entry.startswith(start)]
