"""The briefing: what a model is told of its sandboxes before its first call.

Owns the words, for MCP clients (the server's instructions) and for `atoll agent` (the system prompt) alike. Not here:
where the facts come from (`SandboxPool.describe`), and what each vocabulary says of itself (its `instructions`). Used
by `surfaces/mcp/` and `surfaces/cli/conversation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.contract.model import Limits
from atoll.contract.network import ANY, REGISTRIES, NetworkPolicy
from atoll.runtime.sandbox_pool import PoolDescription
from atoll.tools.view import HOME
from atoll.tools.vocabularies import VOCABULARIES

_PLACE = "You have Linux sandboxes of your own. They are not the user's machine: you do not see its files"
_PROJECT = (
    "a copy of the user's project in {path} of the sandbox 'default', without its git history and without "
    "what git ignores. Commands and relative paths begin there. Work on it in place. {fate}"
)
_BROUGHT_BACK = (
    "When you have finished, the user is shown what you changed there as a diff, and may apply it; changes outside of "
    "that directory, and of what git ignores, do not reach the user."
)
_MOUNTED = (
    "You have Linux sandboxes of your own. They are not the user's machine: of its files you see only the directories "
    "that the user shares with you, and the user sees of yours only what you write there."
)
_MAX_RULES = 20
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def briefing(
    about: PoolDescription,
    vocabularies: Sequence[str],
    *,
    kept: bool,
    until: str = "session",
    brings_back: bool = False,
    saves: bool = False,
) -> str:
    """What a model has to know. `kept` and `until` say what becomes of the sandboxes at the end of what, `brings_back`
    that changes of the project are offered to the user, and `saves` that there is `save_file`."""
    end = "They are kept for the next time."
    if not kept:
        end = f"They are destroyed when this {until} ends, so show the user what matters."
    sentences = [
        _place(about, brings_back=brings_back, saves=saves),
        end,
        f"Image: {about.image}{f' ({about.os})' if about.os else ''}.",
        f"Commands run as {about.user!r}, in {about.project or about.cwd or HOME} unless you say otherwise.",
    ]
    if about.programs:
        sentences.append(f"Installed, among others: {', '.join(about.programs)}.")
    if about.mounts:
        shared = ", ".join(f"{each.target}{' (read-only)' if each.is_read_only else ''}" for each in about.mounts)
        sentences.append(f"Shared with the user: {shared}.")
    sentences.append(_network(about.network))
    if about.secrets:
        sentences.append(
            f"The environment variables {', '.join(about.secrets)} hold placeholders for secrets: send them as they "
            "are to the hosts that they are for."
        )
    if limits := _limits(about.limits):
        sentences.append(f"Limits of each sandbox: {limits}.")
    sentences += [VOCABULARIES[name].load().instructions for name in vocabularies]
    return " ".join(sentences)


def _place(about: PoolDescription, *, brings_back: bool, saves: bool) -> str:
    hands_out = "save_file hands a file or a directory to the user."
    if about.project is None:
        if about.mounts:
            return f"{_MOUNTED} {hands_out}" if saves else _MOUNTED
        return f"{_PLACE}, and the user does not see yours{f', but {hands_out}' if saves else '.'}"
    fate = _BROUGHT_BACK if brings_back else "The user's own files stay as they are."
    copy = _PROJECT.format(path=about.project, fate=f"{fate} {hands_out}" if saves else fate)
    return f"{_MOUNTED} There is also {copy}" if about.mounts else f"{_PLACE}, but for {copy}"


def _network(policy: NetworkPolicy | None) -> str:
    if policy is None or not policy.allow:
        return (
            "There is no network: nothing can be downloaded or installed from outside. If that is needed, ask the user "
            "to allow it."
        )
    if ANY in policy.allow:
        return "The network can be used, through a proxy that is configured in the environment (HTTP_PROXY)."
    rules = [
        "the package indexes of pip, npm and apt" if rule == REGISTRIES else rule for rule in policy.allow[:_MAX_RULES]
    ]
    if len(policy.allow) > _MAX_RULES:
        rules.append(f"{len(policy.allow) - _MAX_RULES} more")
    return (
        f"Of the network you can reach only {', '.join(rules)}, through a proxy that is configured in the environment "
        "(HTTP_PROXY); everything else is refused. If more is needed, ask the user to allow it."
    )


def _limits(limits: Limits) -> str:
    words = [
        limits.memory_bytes and f"{_size(limits.memory_bytes)} of memory",
        limits.cpus and f"{limits.cpus:g} CPUs",
        limits.pids and f"{limits.pids} processes",
        limits.disk_bytes and f"{_size(limits.disk_bytes)} of disk",
    ]
    return ", ".join(word for word in words if word)


def _size(amount: float) -> str:
    for unit in _UNITS[:-1]:
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} {_UNITS[-1]}"
