"""The blocking face: the asynchronous API for scripts, notebooks and programs that are not asynchronous.

    import atoll.sync

    with atoll.sync.open() as engine, engine.create("demo") as box:
        print(box.exec("echo hello").stdout)

Owns how a blocking call reaches the event loop of its engine, which runs in a thread of its own. Every object of the
API that has something to await is wrapped when it comes out (`engine`, `box`, `box.files`, a process); everything else
is passed through as it is. What is awaited there blocks here, `async with` is `with`, `async for` is `for`, and
`aclose` is `close`. So there is one API, and this module knows none of it but the names of its classes, for
annotations and `isinstance`. `sync.pyi` gives it types; `scripts/sync_stub.py` writes that file from the asynchronous
classes, and `make check` compares.

- Any thread may call. Calls of several threads run at the same time.
- Ctrl-C during a call cancels it, as cancelling a task does: `exec` kills its command before KeyboardInterrupt is
  raised.
- Functions given as arguments (`progress`, `on_stdout`) are called in the engine's thread: they must not block, and
  cannot call the engine.
- After a fork, only the process that opened an engine can use it.

Not here: what the calls do (`runtime/`, `tools/`). Used by programs that embed Atoll.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio.to_thread
from anyio.from_thread import BlockingPortal

from atoll.contract.errors import InvalidRequest
from atoll.runtime import engine as asynchronous, interface
from atoll.settings import Settings

if TYPE_CHECKING:
    import ssl

    from pydantic import SecretStr

CLASSES = {
    "Engine": "atoll.runtime.interface",
    "Sandbox": "atoll.runtime.sandbox",
    "SandboxPool": "atoll.runtime.sandbox_pool",
    "Process": "atoll.runtime.guest.process",
    "ProcessInput": "atoll.runtime.guest.process",
    "Files": "atoll.runtime.guest.files",
    "ProjectCopy": "atoll.runtime.project.project",
    "Listener": "atoll.runtime.guest.ports",
    "PortConnection": "atoll.runtime.guest.ports",
    "Images": "atoll.runtime.interface",
    "ImageStore": "atoll.runtime.images.store",
    "LoopStorage": "atoll.runtime.state.loop_storage",
    "Volumes": "atoll.runtime.interface",
    "VolumeStore": "atoll.runtime.state.volumes",
    "ToolSet": "atoll.tools.tool",
}
"""The classes with something to await that a program gets from an engine, and their modules."""

_CANCEL_S = 30
"""How long Ctrl-C waits for the call that it cancelled. Killing a process tree takes milliseconds."""


def open(state_dir: Path | str | None = None, *, namespace: str | None = None, settings: Settings | None = None) -> Any:
    """An engine over a namespace of `state_dir`, as `atoll.open()` gives, with methods that block.

    Close it with `close()`, or use it as a context manager. One that is forgotten is closed when the program ends.

    Raises:
        InvalidRequest: the state directory cannot be used, or the namespace or a setting is wrong.
    """
    return _opened(asynchronous.open, state_dir, namespace=namespace, settings=settings)


def connect(
    url: str | None = None,
    key: str | SecretStr | None = None,
    *,
    tenant: str | None = None,
    trust: ssl.SSLContext | None = None,
    settings: Settings | None = None,
) -> Any:
    """The engine of a server, as `atoll.connect()` gives, with methods that block. It is closed as that of `open`.

    Raises:
        InvalidRequest: there is no address or no key, or they are malformed.
        Unauthenticated: the server does not accept the key.
        ServerUnavailable: the server cannot be reached.
    """
    from atoll.client.engine import connect as connect_asynchronously

    return _opened(connect_asynchronously, url, key, tenant=tenant, trust=trust, settings=settings)


def _opened(open_asynchronously: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    loop = _Loop()
    try:
        return _BlockingEngine(loop.run(open_asynchronously, *arguments, **named), loop)
    except BaseException:
        loop.stop()
        raise


def __getattr__(name: str) -> Any:
    """`atoll.sync.Sandbox` and so on: the class of the objects that a program gets."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _face(getattr(importlib.import_module(CLASSES[name]), name))


class _Loop:
    """An event loop in a thread of its own, and the way into it. It ends when nothing refers to it any more."""

    def __init__(self) -> None:
        self._process = os.getpid()
        ready: Future[BlockingPortal] = Future()
        # A daemon: the interpreter would otherwise wait at its end for an engine that was not closed.
        self._thread = threading.Thread(target=asyncio.run, args=(_serve(ready),), name="atoll engine", daemon=True)
        self._thread.start()
        self._portal = ready.result()
        self.stop = weakref.finalize(self, _stop, self._portal, self._thread, self._process)
        """End the loop and its thread. Stopping twice does nothing."""

    @property
    def is_open(self) -> bool:
        return self.stop.alive and self._thread.is_alive()

    def run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function in the loop, await what it returns if that can be awaited, and give the result.

        Raises:
            InvalidRequest: the engine is closed, or this is the loop's own thread, or another process.
        """
        ended = threading.Event()

        async def call() -> Any:
            try:
                result = function(*arguments, **named)
                return await result if inspect.isawaitable(result) else result
            finally:
                ended.set()

        future = self._open_portal().start_task_soon(call)
        try:
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C
                future.cancel()
                ended.wait(_CANCEL_S)
            raise

    def context(self, entered: AbstractAsyncContextManager[Any, Any]) -> AbstractContextManager[Any, bool | None]:
        """A context manager whose beginning and end run in one task of the loop."""
        return self._open_portal().wrap_async_context_manager(entered)

    def _open_portal(self) -> BlockingPortal:
        if os.getpid() != self._process:
            raise InvalidRequest("this engine was opened before this process was forked; open another here")
        if threading.current_thread() is self._thread:
            raise InvalidRequest("a callback cannot call the engine that called it; hand the work to another thread")
        if not self.is_open:
            raise InvalidRequest("the engine is closed; open another with atoll.sync.open()")
        return self._portal


async def _serve(ready: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        ready.set_result(portal)
        await portal.sleep_until_stopped()


def _stop(portal: BlockingPortal, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process or not thread.is_alive():
        return
    with contextlib.suppress(RuntimeError):  # it has ended meanwhile
        portal.start_task_soon(portal.stop, True)
    if threading.current_thread() is not thread:  # as it is when garbage is collected there
        thread.join()


class Blocking:
    """An object of the asynchronous API with methods that block."""

    def __init__(self, wrapped: Any, loop: _Loop) -> None:
        self._wrapped = wrapped
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._wrapped, "aclose" if name == "close" else name)
        if not callable(value) or isinstance(value, type):
            return _outward(value, self._loop)

        @functools.wraps(value)
        def method(*arguments: Any, **named: Any) -> Any:
            named = {key: _inward(each) for key, each in named.items()}
            return _outward(self._loop.run(value, *map(_inward, arguments), **named), self._loop)

        return method

    def __dir__(self) -> list[str]:
        names = {name for name in dir(self._wrapped) if not name.startswith("_")}
        return sorted({"close" if name == "aclose" else name for name in names})

    def __repr__(self) -> str:
        return f"atoll.sync.{self._wrapped!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocking) and self._wrapped is other._wrapped

    def __hash__(self) -> int:
        return hash(self._wrapped)


class _Enterable(Blocking):
    """An object that is a context manager."""

    _context: AbstractContextManager[Any, bool | None]

    def __enter__(self) -> Any:
        self._context = self._loop.context(self._wrapped)
        entered = self._context.__enter__()
        return self if entered is self._wrapped else _outward(entered, self._loop)

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


class _Iterable(Blocking):
    """An object that can be iterated over."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return _outward(self._loop.run(self._wrapped.__anext__), self._loop)
        except StopAsyncIteration:
            raise StopIteration from None


class _BlockingEngine(Blocking):
    """An engine: its end is the end of its loop, too."""

    def close(self) -> None:
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._loop.is_open:
                self._loop.run(self._wrapped.__aexit__, *error)
        finally:
            self._loop.stop()


def _outward(value: Any, loop: _Loop) -> Any:
    """What a call gives to its blocking caller: wrapped if there is something to await in it."""
    if type(value) in (list, tuple):
        return type(value)(_outward(each, loop) for each in value)
    face = _face(type(value))
    return value if face is None else face(value, loop)


def _inward(value: Any) -> Any:
    """What the asynchronous API is given for an argument."""
    if isinstance(value, Blocking):
        return value._wrapped  # noqa: SLF001 - it is one of ours
    if isinstance(value, Iterator) and not hasattr(value, "fileno"):  # a file is an iterator too
        return _pull(value)
    return value


async def _pull(values: Iterator[Any]) -> AsyncIterator[Any]:
    """What a blocking iterator gives, each value fetched in a thread."""
    end = object()
    while (value := await anyio.to_thread.run_sync(next, values, end)) is not end:
        yield value


@functools.cache
def _face(kind: type) -> type[Blocking] | None:
    """The class that wraps objects of `kind`. None: they are passed through."""
    if issubclass(kind, interface.Engine):
        return _BlockingEngine
    enters, iterates = hasattr(kind, "__aenter__"), hasattr(kind, "__anext__")
    ours = kind.__module__.partition(".")[0] == "atoll"
    awaits = ours and any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in dir(kind))
    if not (enters or iterates or awaits):
        return None
    bases = tuple(base for base, has in ((_Enterable, enters), (_Iterable, iterates)) if has)
    return type(kind.__name__, bases or (Blocking,), {"__doc__": kind.__doc__})
