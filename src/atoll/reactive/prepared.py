"""Sandboxes that are ready before a command runs again.

Owns when one is made ahead of time, for which image and policy, and how many there are. Not here: warm pools
(`runtime/lifecycle/warm_pool.py`), from which these come too, where there is one. Used by `builtins.py`.

A node that has run twice will most likely run again: then a sandbox is created and connected to while nothing waits for
it, and the next run only has to run its command. A graph has few of these, and destroys them when it ends.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from atoll.contract.errors import AtollError

if TYPE_CHECKING:
    from atoll.contract.network import NetworkPolicy
    from atoll.reactive.graph import Graph
    from atoll.runtime.sandbox import Sandbox

MAX_PREPARED = 2
"""Sandboxes of a graph that are ready and unused."""


class SandboxKind(NamedTuple):
    """What a prepared sandbox and the run that takes it have in common."""

    image: str | None
    network: NetworkPolicy | None


class PreparedSandboxes:
    """Those of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ready: OrderedDict[SandboxKind, Sandbox] = OrderedDict()
        self._making: set[SandboxKind] = set()
        graph.at_end(self._destroy_all)

    @classmethod
    def of(cls, graph: Graph) -> PreparedSandboxes:
        """Those of a graph, which has one of these."""
        found = graph.shared.get(cls)
        if not isinstance(found, cls):
            found = graph.shared[cls] = cls(graph)
        return found

    async def take(self, kind: SandboxKind) -> Sandbox:
        """A sandbox of this kind that nothing has run in: one that is ready, or a new one. It is the caller's.

        Raises:
            What `Engine.create` raises.
        """
        box = self._ready.pop(kind, None)
        if box is not None:
            try:
                await box.connect()  # it may have died meanwhile
            except AtollError:
                self._graph.in_background(box.destroy)
            except BaseException:
                self._graph.in_background(box.destroy)
                raise
            else:
                return box
        return await self._graph.engine.create(image=kind.image, network=kind.network, ephemeral=True)

    def prepare(self, kind: SandboxKind) -> None:
        """Have one of this kind ready, soon. What fails is left to the next run."""
        if kind in self._making or kind in self._ready or self._graph.is_closing:
            return
        self._making.add(kind)

        async def make() -> None:
            with contextlib.suppress(AtollError, OSError):
                if not self._graph.is_closing:
                    box = await self._graph.engine.create(image=kind.image, network=kind.network, ephemeral=True)
                    self._ready[kind] = box
                    await box.connect()
            self._making.discard(kind)
            while len(self._ready) > MAX_PREPARED:
                self._graph.in_background(self._ready.popitem(last=False)[1].destroy)
            if self._graph.is_closing:
                await self._destroy_all()

        self._graph.in_background(make)

    async def _destroy_all(self) -> None:
        while self._ready:
            await self._ready.popitem()[1].destroy()
