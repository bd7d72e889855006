"""The nodes of a graph that take time: operations, which run as tasks, and handlers, which programs call.

Owns when a run begins, how an older one is cancelled and waited for, partial output, and the queue of a handler's
calls. Not here: how many may run at once (`graph.py`), and what commands, requests and models do (`builtins.py`,
`sandboxes.py`). Used by `graph.py` and those.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast

import anyio

from atoll.contract.errors import InvalidRequest
from atoll.reactive.nodes import OUTPUT, RUN, WAIT, Node, NodeState, NodeStatus, NotReady, name_of, running_body, same

if TYPE_CHECKING:
    from atoll.reactive.graph import Graph
    from atoll.runtime.lifetimes import BackgroundTasks

T = TypeVar("T")
P = ParamSpec("P")

MAX_HANDLER_CALLS = 256
"""Calls of one handler that may be waiting for those before them."""
OUTPUT_INTERVAL_S = 0.03
"""How often partial output is shown, at most: who reads it runs each time."""
_NOTHING: Any = object()

handling: ContextVar[bool] = ContextVar("atoll_reactive_handling", default=False)
"""Whether a handler runs in this task."""


class Operation(Node[T]):
    """A value that takes time: an asynchronous function, which runs as a task.

    With `collect`, that function alone is tracked; it gives the inputs of `body`, which runs when they differ from
    those of the last good run. Without, the body itself is tracked, and runs whenever something that it reads changes.

    At most one run is in progress. A newer input cancels it and waits for its end; its outcome is never shown. With
    `once`, it runs to one outcome and then reads nothing any more.
    """

    __slots__ = (
        "_collect",
        "_function",
        "_given",
        "_once",
        "_output",
        "_output_timer",
        "_release",
        "_scope",
        "_wanted",
    )

    def __init__(
        self,
        graph: Graph,
        body: Callable[..., Awaitable[T]],
        collect: Callable[[], Any] | None = None,
        *,
        kind: str = "operation",
        name: str | None = None,
        once: bool = False,
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._function = body
        self._collect = collect
        self._given: Any = _NOTHING
        """The inputs of the run that is in progress, or of the last one if its result is good."""
        self._wanted: Any = _NOTHING
        """The inputs of a run that is to begin."""
        self._once = once
        self._release = release
        self._scope: anyio.CancelScope | None = None
        self._output = ""
        self._output_timer: asyncio.TimerHandle | None = None
        super().__init__(graph, kind, name)
        graph.begin(self)

    @property
    def output(self) -> str:
        """What the run has shown so far, such as the last part of a command's output. It waits for nothing."""
        reader = self.graph.reader or running_body.get()
        if reader is not None:
            self.graph.note_read(reader, self, OUTPUT)
        return self._output

    def show_output(self, output: str) -> None:
        """Show what there is so far. `body` calls it."""
        if self._scope is None or self._scope.cancel_called:
            return
        self._output = output
        if self._output_timer is None:
            loop = asyncio.get_running_loop()
            self._output_timer = loop.call_later(OUTPUT_INTERVAL_S, self._output_due)

    def _output_due(self) -> None:
        self._output_timer = None
        if not self.disposed:
            self.graph.spread(self, OUTPUT, waits=False)
            self.graph.flush()

    def rerun(self) -> None:
        """Run again, with the same inputs.

        Raises:
            InvalidRequest: a function of the graph calls it, or the node was disposed.
        """
        self.graph.require_writable(self)
        self._given = _NOTHING
        self.graph.mark(self, RUN)
        self.graph.flush()

    def _pending_status(self) -> NodeStatus:
        if self._scope is not None:
            return "running"
        return "waiting" if self._wanted is _NOTHING else "queued"

    def refresh(self, mark: int) -> None:
        if mark == WAIT:
            self._hold()
            return
        inputs: Any = None
        if self._collect is not None:
            try:
                inputs = self.track(self._collect)
            except NotReady:
                self._hold()
                return
            except Exception as error:  # noqa: BLE001 - of a user's function, or what an input failed with
                self._hold()
                self._given = _NOTHING
                self.fail(error)
                self._retire()
                return
            if self._given is not _NOTHING and same(self._given, inputs) and self._still_valid():
                return
        self._wanted = inputs
        self.wait()
        if self._scope is not None:
            self._scope.cancel()
        else:
            self.graph.enqueue(self)

    def _still_valid(self) -> bool:
        """Whether what runs, or has run, is for the present inputs. A result that was held back is shown again."""
        if self._scope is not None:
            return not self._scope.cancel_called
        self._wanted = _NOTHING
        self.graph.dequeue(self)
        self.complete(cast("T", self.current.latest_complete))
        return True

    def _hold(self) -> None:
        """Wait for inputs. What runs is for older ones."""
        self._wanted = _NOTHING
        self.graph.dequeue(self)
        if self._scope is not None:
            self._scope.cancel()
            self._given = _NOTHING
        self.wait()

    def start(self, tasks: BackgroundTasks) -> None:
        """Run with the inputs that are wanted now."""
        self._given, self._wanted = self._wanted, _NOTHING
        self._scope = anyio.CancelScope()
        self.runs += 1
        self._output = ""
        if self._collect is None:
            self.link({})
            self.reads = self.inputs
            self.refused = None
        tasks.start_soon(self._run, self._scope, self._given)

    async def _run(self, scope: anyio.CancelScope, given: Any) -> None:
        running_body.set(self if self._collect is None else None)
        begun = time.perf_counter()
        value: Any = _NOTHING
        failure: Exception | None = None
        waits = False
        try:
            with scope:
                value = await (self._function() if self._collect is None else self._function(given, self))
        except NotReady:
            waits = True
        except asyncio.CancelledError:
            if self.graph.closed:
                raise
            failure = InvalidRequest(f"{self.name} was cancelled from inside")
        except Exception as error:  # noqa: BLE001 - it is the state of this node
            failure = error
        finally:
            self._scope = None
            self.graph.ended(self)
        running_body.set(None)
        if self._output_timer is not None:
            self._output_timer.cancel()
            self._output_timer = None
        if self.disposed:
            self.release()
        elif self._wanted is not _NOTHING:
            self._given = _NOTHING
            self.graph.enqueue(self)
        elif not waits and not scope.cancel_called:
            self.duration_s = time.perf_counter() - begun
            if failure is not None:
                self._given = _NOTHING
                self.fail(failure)
            else:
                self.complete(value)
            self._retire()
        self.graph.flush()

    def _retire(self) -> None:
        if self._once:
            self.link({})
            self.graph.forget(self)

    def end(self) -> None:
        self.graph.dequeue(self)
        if self._scope is not None:
            self._scope.cancel()
        else:
            self.release()

    def release(self) -> None:
        """Give back what it holds."""
        release, self._release = self._release, None
        if release is not None:
            self.graph.in_background(release)


class Handler(Node[T], Generic[P, T]):
    """A function that may change cells and start operations, such as for the press of a button.

    Calls run one after another. All that a plain function sets is one change; an asynchronous one sets one by one,
    unless in a `batch`. Nothing is tracked: an operation that a handler starts runs once. The state of the handler is
    that of its last call.
    """

    __slots__ = ("_calls", "_function", "_scope")

    def __init__(self, graph: Graph, function: Callable[P, T | Awaitable[T]], name: str | None = None) -> None:
        super().__init__(graph, "handler", name or name_of(function))
        self._function = function
        self._calls: deque[tuple[tuple[Any, ...], dict[str, Any], asyncio.Future[T]]] = deque()
        self._scope: anyio.CancelScope | None = None
        self.current = NodeState(False, None, None, None)

    def _pending_status(self) -> NodeStatus:
        return "running"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call it, after the calls before. What is returned gives its outcome, and may be ignored.

        Raises:
            InvalidRequest: too many calls wait, a function of the graph calls it, or it was disposed.
        """
        self.graph.require_writable(self)
        if len(self._calls) >= MAX_HANDLER_CALLS:
            raise InvalidRequest(f"{MAX_HANDLER_CALLS} calls of {self.name} wait already; call it again later")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append((args, kwargs, future))
        if self._scope is None:
            if not inspect.iscoroutinefunction(self._function):
                self._call_all()
            else:
                self._scope = anyio.CancelScope()
                self.wait()
                self.graph.flush()
                self.graph.handle(self, self._await_all(self._scope))
        return future

    def _call_all(self) -> None:
        while self._calls:
            args, kwargs, future = self._calls.popleft()
            outside = handling.set(True)
            self.runs += 1
            begun = time.perf_counter()
            try:
                with self.graph.batch():
                    value = cast("T", self._function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - it is the state of this node, and the caller's
                self._failed(error, future)
            else:
                self._done(value, future)
            finally:
                handling.reset(outside)
            self.duration_s = time.perf_counter() - begun
        self.graph.flush()

    async def _await_all(self, scope: anyio.CancelScope) -> None:
        handling.set(True)
        running_body.set(None)
        with scope:
            while self._calls:
                args, kwargs, future = self._calls.popleft()
                self.wait()
                self.graph.flush()
                self.runs += 1
                begun = time.perf_counter()
                try:
                    value = await cast("Awaitable[T]", self._function(*args, **kwargs))
                except Exception as error:  # noqa: BLE001 - as above
                    self._failed(error, future)
                except BaseException:
                    future.cancel()
                    raise
                else:
                    self._done(value, future)
                self.duration_s = time.perf_counter() - begun
                self.graph.flush()
        self._scope = None

    def _failed(self, error: Exception, future: asyncio.Future[T]) -> None:
        self.fail(error)
        if not future.done():
            future.set_exception(error)
            future.exception()  # it need not be awaited

    def _done(self, value: T, future: asyncio.Future[T]) -> None:
        self.complete(value)
        if not future.done():
            future.set_result(value)

    def end(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
        for *_, future in self._calls:
            future.cancel()
        self._calls.clear()
