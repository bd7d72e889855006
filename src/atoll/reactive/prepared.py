"""Sandboxes for runs: made when one is needed, or before.

Owns when one is made ahead of time, for which image and policy, and how many are ready. Not here: warm pools
(`runtime/lifecycle/warm_pool.py`), from which these come too, where there is one. Used by `builtins.py` and
`sandboxes.py`.

A node that has run twice will most likely run again: then a sandbox is created, connected to and tried while nothing
waits for it, and the next run only has to run its command, as the second one there: a first one takes half as long
again. Making one is not cancelled with the run that wanted it, because
the newer run wants the same. A graph has few that are ready, and destroys them when it ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio

from atoll.contract.errors import AtollError

if TYPE_CHECKING:
    from atoll.contract.network import NetworkPolicy
    from atoll.reactive.graph import Graph
    from atoll.runtime.sandbox import Sandbox

MAX_PREPARED = 2
"""Sandboxes of a graph that are ready and unused."""
_TRY_S = 5.0
_END_S = 2.0
"""How long the end of a graph waits for sandboxes that are being made. An image that is fetched may take minutes."""


class SandboxKind(NamedTuple):
    """What a prepared sandbox and the run that takes it have in common."""

    image: str | None
    network: NetworkPolicy | None


class PreparedSandboxes:
    """Those of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._ready: deque[tuple[SandboxKind, Sandbox]] = deque()
        self._wanted: defaultdict[SandboxKind, deque[asyncio.Future[Sandbox]]] = defaultdict(deque)
        self._making: Counter[SandboxKind] = Counter()
        self._scopes: set[anyio.CancelScope] = set()
        self._made = anyio.Event()
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
        if (box := self._pop(kind)) is not None:
            try:
                await box.connect()  # it may have died meanwhile
            except BaseException as error:
                self._graph.in_background(box.destroy)
                if not isinstance(error, AtollError):
                    raise
            else:
                return box
        wanted: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        self._wanted[kind].append(wanted)
        if self._making[kind] < len(self._wanted[kind]):
            self._make(kind, delay_s=0)
        try:
            return await wanted
        except asyncio.CancelledError:
            if wanted.done() and not wanted.cancelled() and wanted.exception() is None:
                self._put(kind, wanted.result())
            raise
        finally:
            if wanted in self._wanted[kind]:
                self._wanted[kind].remove(wanted)

    def prepare(self, kind: SandboxKind) -> None:
        """Have one of this kind ready, soon. What fails is left to the next run."""
        if not self._making[kind] and all(kind != each for each, _ in self._ready):
            self._make(kind)

    def _make(self, kind: SandboxKind, *, delay_s: float | None = None) -> None:
        self._making[kind] += 1

        async def make() -> None:
            box: Sandbox | None = None
            scope = anyio.CancelScope()
            self._scopes.add(scope)
            try:
                with scope:
                    if not self._graph.is_closing:
                        box = await self._graph.engine.create(image=kind.image, network=kind.network, ephemeral=True)
                        await box.connect()
                        if not self._wanted[kind]:
                            with suppress(AtollError):  # an image without a shell
                                await box.exec("true", timeout_s=_TRY_S)
            except Exception as error:  # noqa: BLE001 - it is raised in the run that wants the sandbox
                if box is not None:
                    await box.destroy()
                if (wanted := self._next_wanted(kind)) is not None:
                    wanted.set_exception(error)
            else:
                if box is not None:
                    self._put(kind, box)
            finally:
                self._scopes.discard(scope)
                self._making[kind] -= 1
                self._made.set()

        self._graph.in_background(make, delay_s=delay_s)

    def _put(self, kind: SandboxKind, box: Sandbox) -> None:
        """Give a sandbox to a run that wants it, or keep it."""
        if (wanted := self._next_wanted(kind)) is not None:
            wanted.set_result(box)
            return
        self._ready.append((kind, box))
        while len(self._ready) > (0 if self._graph.is_closing else MAX_PREPARED):
            self._graph.in_background(self._ready.popleft()[1].destroy)

    def _pop(self, kind: SandboxKind) -> Sandbox | None:
        for number, (each, box) in enumerate(self._ready):
            if each == kind:
                del self._ready[number]
                return box
        return None

    def _next_wanted(self, kind: SandboxKind) -> asyncio.Future[Sandbox] | None:
        while self._wanted[kind]:
            wanted = self._wanted[kind].popleft()
            if not wanted.done():
                return wanted
        return None

    async def _destroy_all(self) -> None:
        with anyio.move_on_after(_END_S):
            while self._scopes:
                self._made = anyio.Event()
                await self._made.wait()
        for scope in self._scopes:
            scope.cancel()
        while self._ready:
            await self._ready.popleft()[1].destroy()
