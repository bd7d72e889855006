"""Which vocabularies are offered together, and what they are for a session.

Knows the three by name, and which of them a model could not tell apart. Refuses to know what is in any of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping

from atoll.contract.errors import InvalidRequest
from atoll.runtime.sandbox_pool import SandboxPool
from atoll.tools.agent import pool_tools
from atoll.tools.coding import pool_coding_tools
from atoll.tools.sprites import sprite_tools
from atoll.tools.tasks import Tasks
from atoll.tools.tool import VOCABULARIES, ToolSet, nearest


def choose(words: Iterable[str]) -> tuple[str, ...]:
    """Vocabularies that are to be offered together, each once.

    Raises:
        InvalidRequest: one is not known, there is none, or two have a tool of the same name.
    """
    chosen = tuple(dict.fromkeys(words))
    known = ", ".join(VOCABULARIES)
    for word in chosen:
        if word not in VOCABULARIES:
            raise InvalidRequest(f"{word!r} is no set of tools; there are {known}{nearest(word, VOCABULARIES)}")
    if not chosen:
        raise InvalidRequest(f"no set of tools is chosen; there are {known}")
    for one, other in itertools.combinations(chosen, 2):
        if both := sorted(VOCABULARIES[one] & VOCABULARIES[other]):
            raise InvalidRequest(
                f"{one} and {other} cannot be offered together: both have a tool {both[0]!r}, and a model could not "
                "tell which is which; choose one of them. sprites goes with either"
            )
    return chosen


def session_tools(pool: SandboxPool, chosen: Iterable[str], *, tasks: Tasks | None = None) -> ToolSet:
    """The tools of these vocabularies for the sandboxes of a session. Without `tasks` there is no `task`."""
    makers: Mapping[str, Callable[[SandboxPool], ToolSet]] = {
        "agent": pool_tools,
        "coding": functools.partial(pool_coding_tools, tasks=tasks),
        "sprites": sprite_tools,
    }
    return functools.reduce(operator.or_, (makers[each](pool) for each in chosen))
