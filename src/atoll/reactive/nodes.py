"""The nodes of a graph that take no time: cells and computed values, and what all nodes have in common.

Owns the state of a node, how it is read, and how a change of it is told to the graph. Not here: the order in which
nodes run (`graph.py`), and nodes that take time (`operations.py`). Used by all of `reactive/`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextvars import ContextVar
from types import CoroutineType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar, cast

from atoll.contract.errors import AtollError, InvalidRequest

if TYPE_CHECKING:
    from atoll.reactive.graph import Graph

T = TypeVar("T")
R = TypeVar("R")

VALUE, PENDING, ERROR, LATEST, OUTPUT = 1, 2, 4, 8, 16
"""What of a node is read, and what of it has changed."""
CLEAN, WAIT, RUN = 0, 1, 2
"""Whether a node is marked: to wait for what it has read, or to run."""

NodeStatus = Literal["done", "failed", "running", "queued", "waiting", "disposed"]

running_body: ContextVar[Node[Any] | None] = ContextVar("atoll_reactive_body", default=None)
"""The node whose asynchronous function runs in this task, and tracks what it reads."""


class NotReady(BaseException):
    """Raised by reading a value that is not there yet. The node that reads it waits; programs never see it."""


class PutOff(BaseException):
    """Raised by reading a node that has to run first, too deep inside of other runs. The reader runs again later."""


class NodeState(NamedTuple, Generic[T]):
    """The state of a node at one moment."""

    pending: bool
    """A newer result is on its way."""
    result: T | None
    """Unset while it is pending, and if it has failed."""
    error: Exception | None
    latest_complete: T | None
    """The last good result, also while it is pending or has failed."""


class NodeInfo(NamedTuple):
    """A node as views show it."""

    id: int
    name: str
    kind: str
    inputs: tuple[int, ...]
    """The ids of the nodes that it has read."""
    status: NodeStatus
    error: str | None
    duration_s: float | None
    """Of its last run. Unset: it has not run to an end."""
    runs: int
    running_s: float | None
    """How long it has been pending. Unset: it is not."""


def same(one: object, other: object) -> bool:
    """Whether a value counts as unchanged: of one type and equal. Values that cannot be compared count as changed."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - a foreign `__eq__`, such as that of arrays
        return False


class Node(Generic[T]):
    """A value in a graph that changes: a reference to what is, or will be, the result of something.

    Reading it in a function of the graph makes that function run again when it changes: `result` and `get` for each
    new value, `pending`, `error` and `latest_complete` for each change of these alone. Awaiting it gives the result as
    soon as nothing is pending, or raises its error.
    """

    __slots__ = (
        "__weakref__",
        "_changed_at",
        "current",
        "disposed",
        "duration_s",
        "graph",
        "height",
        "id",
        "inputs",
        "kind",
        "marked",
        "name",
        "readers",
        "reads",
        "refused",
        "runs",
        "trace",
        "waiters",
    )

    def __init__(self, graph: Graph, kind: str, name: str | None) -> None:
        self.graph = graph
        self.id = graph.new_id()
        self.kind = kind
        self.name = name or f"{kind}-{self.id}"
        self.height = 0
        self.inputs: dict[Node[Any], int] = {}
        """The nodes that its last run has read, and what of each."""
        self.runs = 0
        self.duration_s: float | None = None
        self.disposed = False
        self.current: NodeState[T] = _WAITING
        self.readers: dict[Node[Any], None] = {}
        self.reads: dict[Node[Any], int] = {}
        self.marked = CLEAN
        self.refused: Node[Any] | None = None
        """A node that it must not read, because that depends on it."""
        self.trace: TracebackType | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self._changed_at = time.monotonic()
        graph.admit(self)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}: {self.status}>"

    # ------------------------------------------------------------------------------------------------------ reading

    def get(self) -> T:
        """The result. In a function of the graph: who reads it before it is there waits with it.

        Raises:
            InvalidRequest: it is pending, and this is not a function of the graph: await it.
            Exception: what it failed with.
        """
        reader = self.graph.reader or running_body.get()
        if reader is not None:
            reads = reader.reads
            if self in reads:
                reads[self] |= VALUE
            else:
                self.graph.note_read(reader, self, VALUE)
        pending, result, error, _ = self.current
        if pending:
            if reader is not None:
                raise NotReady
            raise InvalidRequest(f"{self.name} has no result yet; await it, or read latest_complete")
        if error is not None:
            raise error.with_traceback(self.trace)
        return result  # type: ignore[return-value] # of a state that is neither pending nor failed

    @property
    def result(self) -> T:
        """As `get`."""
        return self.get()

    @property
    def pending(self) -> bool:
        """Whether a newer result is on its way. Reading it waits for nothing."""
        return self._read(PENDING).pending

    @property
    def error(self) -> Exception | None:
        """What it failed with. It is cleared when a new run begins."""
        return self._read(ERROR).error

    @property
    def latest_complete(self) -> T | None:
        """The last good result, also while a newer one is pending or after a failure. None: there was none yet."""
        return self._read(LATEST).latest_complete

    @property
    def state(self) -> NodeState[T]:
        """All four at one moment."""
        return self._read(PENDING | ERROR | LATEST)

    def _read(self, what: int) -> NodeState[T]:
        reader = self.graph.reader or running_body.get()
        if reader is not None:
            self.graph.note_read(reader, self, what)
        return self.current

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        if self.graph.reader is None and running_body.get() is None:
            while self.current.pending and not self.disposed:
                waiter = asyncio.get_running_loop().create_future()
                self.waiters.append(waiter)
                await waiter
            self._require_live()
        return self.get()

    # ---------------------------------------------------------------------------------------------------- observing

    @property
    def status(self) -> NodeStatus:
        """In one word: `waiting` is for what it reads, `queued` for its turn to run."""
        if self.disposed:
            return "disposed"
        if self.current.pending:
            return self._pending_status()
        return "done" if self.current.error is None else "failed"

    def _pending_status(self) -> NodeStatus:
        return "waiting"

    def info(self) -> NodeInfo:
        """The node as views show it. Nothing is tracked."""
        pending, _, error, _ = self.current
        return NodeInfo(
            id=self.id,
            name=self.name,
            kind=self.kind,
            inputs=tuple(node.id for node in self.inputs),
            status=self.status,
            error=None if error is None else describe(error),
            duration_s=self.duration_s,
            runs=self.runs,
            running_s=time.monotonic() - self._changed_at if pending else None,
        )

    def subscribe(self, callback: Callable[[Self], None]) -> Callable[[], None]:
        """Call `callback` after each change in which the state of this node changed. Returns what ends that."""

        def changed(nodes: tuple[Node[Any], ...]) -> None:
            if self in nodes:
                callback(self)

        return self.graph.subscribe(changed)

    # ----------------------------------------------------------------------------------------------------- changing

    def dispose(self) -> None:
        """Take it out of the graph: what it runs is killed, and what reads it fails. Does nothing the second time."""
        if not self.disposed:
            self.graph.dispose_node(self)
            self.end()

    def refresh(self, mark: int) -> None:
        """Run, or wait, as it is marked. The graph calls it in order of height."""

    def end(self) -> None:
        """End what it runs, after it was disposed."""

    def _require_live(self) -> None:
        if self.disposed:
            raise InvalidRequest(f"{self.name} was disposed")

    def track(self, function: Callable[[], R]) -> R:
        """Call a function, and have this node run again when what it reads changes.

        Raises:
            NotReady: something that it reads is not there yet.
            Exception: whatever it raises.
        """
        self.reads = {}
        self.refused = None
        before = self.graph.begin_reading(self)
        try:
            return function()
        finally:
            self.graph.end_reading(before)
            self.link(self.reads)

    def link(self, reads: dict[Node[Any], int]) -> None:
        before = self.inputs
        self.inputs = reads
        if before.keys() != reads.keys():
            for node in before:
                if node not in reads:
                    node.readers.pop(self, None)
            for node in reads:
                if node not in before:
                    node.readers[self] = None

    def wait(self) -> None:
        """Show that it is pending."""
        if not self.current.pending:
            self._show(NodeState(True, None, None, self.current.latest_complete))

    def complete(self, value: T) -> None:
        """Show a result."""
        pending, _, error, latest = self.current
        if latest is not None and same(latest, value):
            if not pending and error is None:
                return
            value = latest  # the same object, so that who reads only the latest one sees no change
        self.trace = None
        self._show(NodeState(False, value, None, value))

    def fail(self, error: Exception) -> None:
        """Show a failure."""
        self.trace = error.__traceback__
        self._show(NodeState(False, None, error, self.current.latest_complete))

    def _show(self, state: NodeState[T]) -> None:
        if self.disposed:
            return
        before, self.current = self.current, state
        changed = VALUE
        if before.pending is not state.pending:
            changed |= PENDING
            self._changed_at = time.monotonic()
        if before.error is not state.error:
            changed |= ERROR
        if before.latest_complete is not state.latest_complete:
            changed |= LATEST
        self.graph.spread(self, changed, waits=state.pending)


_WAITING: NodeState[Any] = NodeState(True, None, None, None)


def describe(error: BaseException) -> str:
    """An error in a line: its message, after its kind unless it is one of Atoll's."""
    text = str(error)
    return text if isinstance(error, AtollError) and text else f"{type(error).__name__}: {text}".removesuffix(": ")


class Cell(Node[T]):
    """A value that programs set."""

    __slots__ = ()

    def __init__(self, graph: Graph, value: T, name: str | None = None) -> None:
        super().__init__(graph, "cell", name)
        self.current = NodeState(False, value, None, value)

    def set(self, value: T) -> None:
        """Set the value. When this returns, all that follows from it without waiting has been computed.

        A value that is equal to the one before, and of the same type, changes nothing. So a list or another mutable
        value is not to be changed in place: set a new one, for example with `update`.

        Raises:
            InvalidRequest: a function of the graph calls it, another thread does, or the cell was disposed.
        """
        self.graph.require_writable(self)
        if not same(self.current.result, value):
            self._show(NodeState(False, value, None, value))
            self.graph.flush()

    def update(self, function: Callable[[T], T]) -> None:
        """Set the value to what `function` makes of the present one.

        Raises:
            as `set`.
        """
        self.set(function(cast("T", self.current.result)))


class Computed(Node[T]):
    """A value that a function computes from others."""

    __slots__ = ("_function",)

    def __init__(
        self, graph: Graph, function: Callable[[], T], name: str | None = None, *, kind: str = "computed"
    ) -> None:
        self._function = function
        super().__init__(graph, kind, name or name_of(function))
        graph.begin(self)

    def refresh(self, mark: int) -> None:
        if mark == WAIT:
            self.wait()
            return
        self.runs += 1
        begun = time.perf_counter()
        try:
            value = self.track(self._function)
            if isinstance(value, CoroutineType):
                value.close()
                raise InvalidRequest(f"{self.name} returns a coroutine; write its function with `async def`")  # noqa: TRY301
        except NotReady:
            self.wait()
        except PutOff:
            self.runs -= 1
            raise
        except Exception as error:  # noqa: BLE001 - the function is the user's; its error is this node's state
            self.fail(error)
        else:
            self.complete(value)
        self.duration_s = time.perf_counter() - begun


def name_of(function: Callable[..., object]) -> str | None:
    """The name of a function that has one of its own."""
    name = function.__name__ if isinstance(function, FunctionType) else "<lambda>"
    return None if name == "<lambda>" else name
