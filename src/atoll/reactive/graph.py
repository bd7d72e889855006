"""The reactive engine: which nodes run after a change, and in what order.

Owns marking, heights, cycles, how many operations run at once, observation and disposal. Not here: the nodes
themselves (`nodes.py`, `operations.py`), and what commands, requests and models do in a graph (`builtins.py`,
`sandboxes.py`). Used by all of `reactive/`. Why it is not a library is in docs/design/0029.

A node has a state, which is replaced as a whole. A change marks the nodes that have read it; marked nodes run in the
order of their heights (one more than the highest that a node has read), so each runs once and sees only values of the
same change. A node whose value turns out the same marks nothing. All of this happens within `Cell.set`, without
recursion; what takes time runs as a task, one at a time for each node, and shows its outcome in a change of its own.
While a node waits, the nodes that read its value wait too: they are marked to wait, and not run.

A node may begin to read one that is as high as itself or higher. That one, and what it depends on, is then brought up
to date first, within the run. Everything below the lowest node that runs is up to date, so only what is not lower has
to be looked at.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from heapq import heappop, heappush
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast, overload

import anyio

from atoll.contract.errors import InvalidRequest
from atoll.reactive.nodes import (
    CLEAN,
    ERROR,
    LATEST,
    PENDING,
    RUN,
    VALUE,
    WAIT,
    Cell,
    Computed,
    Node,
    NodeState,
    PutOff,
    name_of,
    running_body,
)
from atoll.reactive.operations import Handler, Operation, handling
from atoll.runtime.lifetimes import BackgroundTasks

if TYPE_CHECKING:
    from atoll.contract.network import NetworkPolicy
    from atoll.runtime.egress.proxy import Connector
    from atoll.runtime.interface import Engine

T = TypeVar("T")
P = ParamSpec("P")

MAX_RUNNING = 8
"""Operations of one graph that run at once, unless `Graph(max_running=…)` says otherwise."""
_CLEANUP_DELAY_S = 0.02
"""How long after a run its sandbox is destroyed: who waits for the result goes first."""
_MAX_DEPTH = 40
"""How deep runs may be nested in runs that have just begun to read them. Deeper ones are put off and begin again."""
Subscriber = Callable[[tuple[Node[Any], ...]], None]
_log = logging.getLogger(__name__)

_current: ContextVar[Graph | None] = ContextVar("atoll_reactive_graph", default=None)


def current_graph() -> Graph:
    """The graph whose `async with` block this is.

    Raises:
        InvalidRequest: there is none.
    """
    graph = _current.get()
    if graph is None:
        raise InvalidRequest("there is no graph here; write `async with reactive.Graph(engine):` around it")
    return graph


class Graph:
    """Cells, computed values, operations and handlers, and the order in which they run.

    A context manager: within it, `cell`, `computed`, `exec` and so on make nodes of this graph. Its end cancels what
    runs, waits for it, and destroys the sandboxes of the graph. `engine` is where `exec` and `sandbox` have theirs;
    `network` is what those and `fetch_data` may connect to, unless they are given their own; unset: nothing. At most
    `max_running` operations run at once; the others wait for their turn, and then run with their newest inputs.
    """

    def __init__(
        self, engine: Engine | None = None, *, network: NetworkPolicy | None = None, max_running: int = MAX_RUNNING
    ) -> None:
        if max_running < 1:
            raise InvalidRequest(f"max_running is {max_running}; it must be at least 1")
        self._engine = engine
        self.network = network
        self.max_running = max_running
        self.connector: Connector | None = None
        """How `fetch_data` resolves names and connects. Unset: as programs of this machine do."""
        self.closed = False
        self.is_closing = False
        self.shared: dict[object, object] = {}
        """What operations of this graph share with each other."""
        self._at_end: list[Callable[[], Awaitable[None]]] = []
        self.reader: Node[Any] | None = None
        """The node whose function runs now."""
        self._nodes: dict[int, Node[Any]] = {}
        self._ids = 0
        self._tasks: BackgroundTasks | None = None
        self._thread = threading.get_ident()
        self._token: Token[Graph | None] | None = None
        # marked nodes, by height
        self._marked: dict[int, deque[Node[Any]]] = {}
        self._heights: list[int] = []
        self._marks = 0
        self._flushing = False
        self._batches = 0
        # nested runs
        self._stack: list[Node[Any]] = []
        """The nodes whose functions run now, each because the one before it reads it."""
        self._floor = 0
        """The height of the lowest of them: everything below it is up to date."""
        self._put_off: dict[Node[Any], list[Node[Any]]] = {}
        """The nodes that run once the key has run. They are marked."""
        self._in_cycles: dict[Node[Any], None] = {}
        # operations and handlers
        self._queue: dict[Operation[Any], None] = {}
        self._running: set[Operation[Any]] = set()
        self._handlers: set[Handler[..., Any]] = set()
        self._background = 0
        self._closed_soon = anyio.Event()
        self._idle_waiters: list[asyncio.Future[None]] = []
        # observation
        self._changed: dict[Node[Any], None] = {}
        self._subscribers: dict[object, Subscriber] = {}
        self._notifying = False

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise InvalidRequest("a graph is entered once; make another")
        self._tasks = await BackgroundTasks.open()
        self._thread = threading.get_ident()
        self._token = _current.set(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            try:
                _current.reset(self._token)
            except ValueError:  # entered in another task's context, as in two fixtures of a test
                _current.set(None)
            self._token = None
        await self.aclose()

    async def aclose(self) -> None:
        """Dispose of all nodes: cancel what runs, wait for it, and destroy sandboxes. Doing it twice does nothing."""
        if self.is_closing or self._tasks is None:
            return
        self.is_closing = True
        self._closed_soon.set()
        with anyio.CancelScope(shield=True):
            nodes = list(self._nodes.values())
            for node in nodes:
                node.readers.clear()  # none of them is to run once more, because others are gone
            for node in nodes:
                node.dispose()
            await self._until(lambda: not (self._running or self._handlers))
            for function in self._at_end:
                self.in_background(function)
            await self._until(lambda: not self._background)
            self.closed = True
            self._subscribers.clear()
            await self._tasks.close()

    @property
    def engine(self) -> Engine:
        """
        Raises:
            InvalidRequest: the graph has no engine.
        """
        if self._engine is None:
            raise InvalidRequest("this graph has no engine for sandboxes; make it with reactive.Graph(engine)")
        return self._engine

    @property
    def nodes(self) -> tuple[Node[Any], ...]:
        """All nodes, in the order in which they were made."""
        return tuple(self._nodes.values())

    def find(self, id: int) -> Node[Any] | None:
        return self._nodes.get(id)

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call `callback` after each change, with the nodes whose state changed in it. Returns what ends that.

        It sees all values of one change, and never half of it. It must not block; what it raises is logged.
        """
        key = object()
        self._subscribers[key] = callback

        def end() -> None:
            self._subscribers.pop(key, None)

        return end

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make all that is set in this block one change, at its end. There must be no `await` in it."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            self.flush()

    async def settled(self) -> None:
        """Wait until nothing runs and nothing waits for its turn."""
        await self._until(lambda: not (self._running or self._queue or self._handlers))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    # ------------------------------------------------------------------------------------------------ nodes come and go

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def admit(self, node: Node[Any]) -> None:
        """
        Raises:
            InvalidRequest: the graph is not open, or a function of the graph makes the node.
        """
        if self._tasks is None or self.is_closing:
            raise InvalidRequest("the graph is not open; make nodes inside of `async with reactive.Graph(…)`")
        reader = self.reader or running_body.get()
        if reader is not None:
            raise InvalidRequest(
                f"{reader.name} makes a node while it runs, and would make another each time; make it outside, and "
                "read it there"
            )
        self._nodes[node.id] = node

    def forget(self, node: Node[Any]) -> None:
        self._nodes.pop(node.id, None)

    def dispose_node(self, node: Node[Any]) -> None:
        """
        Raises:
            InvalidRequest: a function of the graph, or another thread, does it.
        """
        self.require_writable(node)
        node.disposed = True
        self._nodes.pop(node.id, None)
        for read in node.inputs:
            read.readers.pop(node, None)
        node.inputs = {}
        self._clean(node)
        node.trace = None
        node.current = NodeState(False, None, InvalidRequest(f"{node.name} was disposed"), None)
        self.spread(node, VALUE | PENDING | ERROR | LATEST, waits=False)
        self.flush()

    @staticmethod
    def in_handler() -> bool:
        """Whether a handler runs here: an operation that it makes runs once."""
        return handling.get()

    def require_writable(self, node: Node[Any]) -> None:
        """
        Raises:
            InvalidRequest: this may not change a node.
        """
        reader = self.reader or running_body.get()
        if reader is not None:
            raise InvalidRequest(
                f"{reader.name} changes {node.name} while it runs; only handlers and programs change nodes"
            )
        if threading.get_ident() != self._thread:
            raise InvalidRequest(
                f"{node.name} is changed by another thread than its event loop's; use loop.call_soon_threadsafe"
            )
        if node.disposed:
            raise InvalidRequest(f"{node.name} was disposed")

    # --------------------------------------------------------------------------------------------------------- marking

    def begin(self, node: Node[Any]) -> None:
        """Run a node for the first time."""
        self.mark(node, RUN)
        self.flush()

    def mark(self, node: Node[Any], mark: int) -> None:
        if node.marked == CLEAN:
            self._marks += 1
            node.marked = mark
            self._place(node)
        elif node.marked < mark:
            node.marked = mark

    def _place(self, node: Node[Any]) -> None:
        height = node.height
        marked = self._marked.get(height)
        if marked is None:
            self._marked[height] = marked = deque()
            heappush(self._heights, height)
        marked.append(node)

    def _clean(self, node: Node[Any]) -> int:
        mark, node.marked = node.marked, CLEAN
        self._marks -= mark != CLEAN
        return mark

    def spread(self, node: Node[Any], changed: int, *, waits: bool) -> None:
        """Note that something of a node has changed, and mark who has read it. `waits`: it has become pending."""
        self._changed[node] = None
        for reader in node.readers:
            read = reader.inputs.get(node, 0) & changed
            if read:
                self.mark(reader, WAIT if waits and read == VALUE else RUN)

    def flush(self) -> None:
        """Run all marked nodes, and start the operations that are due. Does nothing within a change or a batch."""
        if self._flushing or self._batches:
            return
        self._flushing = True
        try:
            while self._heights:
                self._refresh_lowest()
                if not self._heights and self._in_cycles:
                    self._reconsider_cycles()
        finally:
            self._flushing = False
        self._launch()
        self._notify()

    def _refresh_lowest(self) -> None:
        height = self._heights[0]
        marked = self._marked[height]
        while marked:
            node = marked.popleft()
            if node.marked == CLEAN:
                continue  # it was disposed, or has run when another node began to read it
            if node.height != height:
                self._place(node)
                if node.height < height:
                    return
                continue
            self._refresh(node)
            if self._heights[0] != height:
                return
        del self._marked[height]
        heappop(self._heights)

    def _refresh(self, node: Node[Any]) -> None:
        mark = self._clean(node)
        try:
            node.refresh(mark)
        except PutOff:
            node.marked = RUN
            self._marks += 1
            return
        except BaseException:
            self.mark(node, mark)  # a signal's, such as KeyboardInterrupt: the next change runs it again
            raise
        if self._put_off:
            for after in self._put_off.pop(node, ()):
                self._place(after)

    def begin_reading(self, node: Node[Any]) -> tuple[Node[Any] | None, int]:
        """Have `node` be the one that reads, until `end_reading` is called with what this returns."""
        before = self.reader, self._floor
        self._floor = min(self._floor, node.height) if self._stack else node.height
        self._stack.append(node)
        self.reader = node
        return before

    def end_reading(self, before: tuple[Node[Any] | None, int]) -> None:
        self._stack.pop()
        self.reader, self._floor = before

    # --------------------------------------------------------------------------------------------------------- reading

    def note_read(self, reader: Node[Any], node: Node[Any], what: int) -> None:
        """Note that `reader`, which runs, reads `node`, and have `node` up to date.

        Raises:
            InvalidRequest: `node` depends on `reader`, or was disposed.
        """
        reads = reader.reads
        if node not in reads:
            if node.height >= reader.height or (len(self._stack) > 1 and node.height >= self._floor):
                self._put_in_order(reader, node)
            if reads is reader.inputs:  # a body, in which time passes between reading and the end
                node.readers[reader] = None
        reads[node] = reads.get(node, 0) | what

    def _put_in_order(self, reader: Node[Any], node: Node[Any]) -> None:
        """Bring `node` up to date, and the height of `reader` above it."""
        if self._marks or reader.readers or node is reader or len(self._stack) > 1:
            floor = min(self._floor, reader.height) if self._stack else reader.height
            below = self._collect_below(reader, node, floor)
            if self._marks and self._flushing:
                for stale in sorted(below, key=lambda each: each.height):
                    if stale.marked == CLEAN:
                        continue
                    if len(self._stack) < _MAX_DEPTH:
                        self._refresh(stale)
                    if stale.marked != CLEAN:
                        self._raise_height(reader, stale.height + 1)
                        self._put_off.setdefault(stale, []).append(reader)
                        reader.reads[node] = VALUE  # it shows in cycles
                        raise PutOff
        self._raise_height(reader, node.height + 1)

    def _collect_below(self, reader: Node[Any], node: Node[Any], floor: int) -> dict[Node[Any], Node[Any]]:
        """`node` and what it depends on, no lower than `floor`; each with the node by which it was found.

        Raises:
            InvalidRequest: `reader`, or another node that runs now, is among them.
        """
        found: dict[Node[Any], Node[Any]] = {node: reader}
        left = [node]
        while left:
            each = left.pop()
            if each is reader or each in self._stack:
                raise self._cycle(reader, node, each, found)
            for read in each.inputs:
                if read.height >= floor and read not in found:
                    found[read] = each
                    left.append(read)
        return found

    def _cycle(
        self, reader: Node[Any], node: Node[Any], last: Node[Any], found: dict[Node[Any], Node[Any]]
    ) -> InvalidRequest:
        path = [last]
        while path[-1] is not node:
            path.append(found[path[-1]])
        path = [reader, *reversed(path)]
        if last is not reader:  # it runs, and is what leads to `reader`
            path += self._stack[self._stack.index(last) + 1 :]
        reader.refused = node
        self._in_cycles[reader] = None
        names = " → ".join(each.name for each in path)
        return InvalidRequest(f"{reader.name} reads what depends on it: {names}; a cycle has no first value")

    def _reconsider_cycles(self) -> None:
        """Mark the nodes whose cycle is no longer one."""
        for node in list(self._in_cycles):
            if node.refused is None or node.disposed:
                del self._in_cycles[node]
            elif not self._depends(node.refused, node):
                del self._in_cycles[node]
                self.mark(node, RUN)

    @staticmethod
    def _depends(node: Node[Any], on: Node[Any]) -> bool:
        seen = {node}
        left = [node]
        while left:
            each = left.pop()
            if each is on:
                return True
            new = [read for read in each.inputs if read not in seen]
            seen.update(new)
            left += new
        return False

    @staticmethod
    def _raise_height(node: Node[Any], height: int) -> None:
        left = [(node, height)]
        while left:
            each, wanted = left.pop()
            if each.height < wanted:
                each.height = wanted
                left += [(reader, wanted + 1) for reader in each.readers if reader.height <= wanted]

    # ------------------------------------------------------------------------------------------------------ operations

    def enqueue(self, operation: Operation[Any]) -> None:
        self._queue[operation] = None

    def dequeue(self, operation: Operation[Any]) -> None:
        self._queue.pop(operation, None)

    def _launch(self) -> None:
        while self._queue and len(self._running) < self.max_running:
            operation = next(iter(self._queue))
            del self._queue[operation]
            self._running.add(operation)
            operation.start(cast("BackgroundTasks", self._tasks))
            self._changed[operation] = None

    def ended(self, operation: Operation[Any]) -> None:
        self._running.discard(operation)

    def handle(self, handler: Handler[..., Any], calls: Coroutine[Any, Any, None]) -> None:
        """Run the calls of a handler as a task."""
        self._handlers.add(handler)

        async def run() -> None:
            try:
                await calls
            finally:
                self._handlers.discard(handler)
                self.flush()

        cast("BackgroundTasks", self._tasks).start_soon(run)

    def at_end(self, function: Callable[[], Awaitable[None]]) -> None:
        """Do something when the graph ends, after all nodes have been disposed of."""
        self._at_end.append(function)

    def in_background(self, function: Callable[[], Awaitable[None]], *, delay_s: float | None = None) -> None:
        """Do something that the end of the graph waits for, such as destroying a sandbox. What it raises is logged.

        It is done after a moment, so that what waits for a result goes first; after `delay_s`, if that is given.
        """
        self._background += 1

        async def run() -> None:
            try:
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(_CLEANUP_DELAY_S if delay_s is None else delay_s):
                        await self._closed_soon.wait()
                    await function()
            except Exception:  # noqa: BLE001 - no caller waits for it
                _log.exception("cleaning up after a node failed")
            finally:
                self._background -= 1
                self._notify()

        cast("BackgroundTasks", self._tasks).start_soon(run)

    # ----------------------------------------------------------------------------------------------------- observation

    def _notify(self) -> None:
        if self._notifying:
            return
        self._notifying = True
        try:
            while self._changed:
                nodes = tuple(self._changed)
                self._changed.clear()
                for node in nodes:
                    if node.waiters and not node.current.pending:
                        _wake(node.waiters)
                for callback in list(self._subscribers.values()):
                    try:
                        callback(nodes)
                    except Exception:  # noqa: BLE001 - it must not keep the others from theirs
                        _log.exception("a subscriber of a graph failed")
        finally:
            self._notifying = False
        if self._idle_waiters:
            _wake(self._idle_waiters)


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


# ----------------------------------------------------------------------------------------------------- public functions


def cell(value: T, *, name: str | None = None) -> Cell[T]:
    """A value that is set with `set`, and begins as `value`."""
    return Cell(current_graph(), value, name)


@overload
def computed(  # type: ignore[overload-overlap] # a coroutine is a value too, but never a useful one
    function: Callable[[], Coroutine[Any, Any, T]], *, name: str | None = None
) -> Operation[T]: ...
@overload
def computed(function: Callable[[], T], *, name: str | None = None) -> Computed[T]: ...
def computed(function: Callable[[], Any], *, name: str | None = None) -> Computed[Any] | Operation[Any]:
    """The value of a function of other nodes, which runs again when one that it has read changes.

    The function has to be pure. Where it reads a result that is not there yet, it is left, and runs again when the
    result is there: it needs no `if`. Where it reads one that failed, it fails with the same error, unless it catches
    it. An `async` function runs as a task; a change of something that it has read cancels it and runs it again.
    """
    if inspect.iscoroutinefunction(function):
        return Operation(current_graph(), function, kind="computed", name=name or name_of(function))
    return Computed(current_graph(), function, name)


@overload
def handler(function: Callable[P, Coroutine[Any, Any, T]], *, name: str | None = None) -> Handler[P, T]: ...
@overload
def handler(function: Callable[P, T], *, name: str | None = None) -> Handler[P, T]: ...
def handler(function: Callable[P, Any], *, name: str | None = None) -> Handler[P, Any]:
    """A function that may set cells and start operations. Called, it runs after the calls before it."""
    return Handler(current_graph(), function, name)


@contextmanager
def batch() -> Iterator[None]:
    """Make all that is set in this block one change of the current graph. There must be no `await` in it."""
    with current_graph().batch():
        yield


def value_of(value: Any) -> Any:
    """An input as it is now: a plain value, or the result of a node; of a list or a tuple, that of each element."""
    if isinstance(value, Node):
        return value.get()
    if isinstance(value, list | tuple):  # as a list
        return [value_of(each) for each in cast("Iterable[Any]", value)]
    return value
