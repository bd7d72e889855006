"""The program inside a sandbox that executes cells of Python and lets them call tools on the host.

Owns the namespace of a session, how a cell is compiled and run, its traceback, and the functions that stand for tools.
Not here: what a tool does, and whether it may be called (the host decides: `code/session.py`); values as HTML, images
and charts (`rich.py`, loaded when one is shown). Used by `code/session.py`, which sends this text to an interpreter of
the image: Python 3.8 or later, the standard library, and nothing else.

Messages are lines of JSON on descriptor 3, a socket of the guest's that only this process has; `code/messages.py`
describes them. stdout and stderr are the cell's own: nothing printed can be mistaken for a message. At the end of a
cell its marker is written to both, so that the host knows which output belongs to it.

Everything here runs in the process of the code that a model wrote, which may change any of it: the host believes
nothing that it sends.
"""

import _ast
import _signal
import _socket
import _thread
import builtins
import json
import os
import sys

KERNEL = "<atoll kernel>"
_AWAIT, _ONLY_AST, _COROUTINE = 0x2000, 0x400, 0x80  # PyCF_ALLOW_TOP_LEVEL_AWAIT, PyCF_ONLY_AST, CO_COROUTINE
_VALUE = "__cell_value__"
_MAX_REPR_CHARS = 100_000
_MAX_PARTS_BYTES = 16 * 1024 * 1024
_MAX_DEPTH = 60
_PREPARE_S = 0.02
_MAX_CALL_BYTES = 4 * 1024 * 1024
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # `json.dumps` would make one each time
OUTBOX = os.path.abspath("outbox")


class ToolError(Exception):
    """A call failed on the host. `type` is the name of the error there."""

    def __init__(self, message, type="ToolError"):
        super().__init__(message if type == "ToolError" else f"{type}: {message}")
        self.type, self.message = type, message


class ToolTimeout(ToolError, TimeoutError):
    """A call took too long on the host."""


class CellInterrupted(KeyboardInterrupt):
    """The time of the cell is over, or a person stopped it."""

    def __init__(self):
        super().__init__("the cell was interrupted")


ToolError.__module__ = ToolTimeout.__module__ = CellInterrupted.__module__ = "builtins"  # as the code sees them
CellInterrupted.__qualname__ = CellInterrupted.__name__ = "KeyboardInterrupt"


# ------------------------------------------------------------------------------------------------------------- channel


class Channel:
    """Lines of JSON to and from the host. May be used from any thread and any event loop."""

    def __init__(self, descriptor, rest):
        moved = os.dup(descriptor)
        os.close(descriptor)
        os.set_inheritable(moved, False)
        self.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, moved)
        self.pid = os.getpid()
        self._rest = rest
        self._reading = _thread.allocate_lock()
        self._writing = _thread.allocate_lock()
        self.critical = 0
        """Above 0: a line is being written, which an interrupt must not tear."""
        self.interrupted = False

    def send(self, message):
        if os.getpid() != self.pid:
            raise RuntimeError("tools can be called only by the session's own process, not by a forked child")
        line = _encode(message).encode("ascii") + b"\n"
        if message["t"] == "call" and len(line) > _MAX_CALL_BYTES:
            raise ValueError(f"the arguments take {len(line)} bytes; a call may take {_MAX_CALL_BYTES}")
        self.critical += 1
        try:
            with self._writing:
                self.socket.sendall(line)
        finally:
            self.critical -= 1
        if self.interrupted and not self.critical:
            self.interrupted = False
            raise CellInterrupted from None

    def wait(self, seconds):
        """Wait for bytes. False: none came."""
        self.socket.settimeout(seconds)
        try:
            return bool(self._rest) or bool(self.socket.recv(1, _socket.MSG_PEEK))
        except OSError:  # its time is over
            return False
        finally:
            self.socket.settimeout(None)

    def receive(self, wait):
        """The messages that have come. With `wait`, at least one. None: the host has closed the channel."""
        with self._reading:
            while True:
                lines = self._rest.split(b"\n")
                self._rest = lines.pop()
                found = [message for message in map(_parsed, lines) if message is not None]
                if found:
                    return found
                try:
                    data = self.socket.recv(65536, 0 if wait else _socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return []
                if not data:
                    return None
                self._rest += data


def _parsed(line):
    try:
        message = json.loads(line) if line else None
    except ValueError:  # the line of a host that ended while it wrote
        return None
    return message if isinstance(message, dict) else None


# --------------------------------------------------------------------------------------------------------------- tools


class AwaitableCall:
    """A call that waits for its result: the coroutine that a stub returns."""

    def __init__(self, calls, stub, arguments, where):
        self._calls, self._stub, self._arguments, self._where = calls, stub, arguments, where
        self._steps = None

    def _started(self):
        if self._steps is None:
            self._steps = self._calls.make(self._stub, self._arguments)
        return self._steps

    def __await__(self):
        return self._started().__await__()

    def send(self, value):
        return self._started().send(value)

    def throw(self, *error):
        return self._started().throw(*error)

    def close(self):
        if self._steps is not None:
            self._steps.close()
        else:
            self._steps = _closed()
            self._steps.close()

    def __del__(self):
        if self._steps is None:
            self._calls.not_awaited.append((self._stub.__name__, self._where))

    def _hint(self):
        return f"{self._stub.__name__}(...) was not awaited: write `await {self._stub.__name__}(...)`"

    def __repr__(self):
        return f"<{self._hint()}>"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"there is no attribute {name!r}: {self._hint()}")

    def _refuse(self, *_):
        raise TypeError(self._hint())

    __iter__ = __len__ = __getitem__ = __contains__ = __add__ = __radd__ = __bool__ = _refuse


async def _closed():
    pass


class Stub:
    """A tool of the host as a function of the code."""

    def __init__(self, calls, spec):
        self._calls = calls
        self._names = [name for name, _ in spec["params"]]
        self._required = [name for name, required in spec["params"] if required]
        self._any_name = bool(spec.get("var"))
        self._one_dict = spec.get("mode") == "anthropic"
        self.returns = spec.get("returns", "any")
        self.__name__ = self.__qualname__ = spec["name"]
        self.__doc__ = spec.get("doc", "")

    def __call__(self, *args, **kwargs):
        return AwaitableCall(self._calls, self, self._bound(args, kwargs), _line_of_cell(sys._getframe(1)))

    def _bound(self, args, kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], dict) and self._takes_dict(args[0]):
            return dict(args[0])
        if len(args) > len(self._names):
            taken = f"{len(self._names)} at most" if self._names else "none"
            raise TypeError(f"{self.__name__}() got {len(args)} positional arguments; it takes {taken}")
        arguments = dict(zip(self._names, args))
        for name, value in kwargs.items():
            if name in arguments:
                raise TypeError(f"{self.__name__}() got two values for {name!r}")
            if name not in self._names and not self._any_name:
                raise TypeError(f"{self.__name__}() has no argument {name!r}; it takes {self._taken()}")
            arguments[name] = value
        missing = [name for name in self._required if name not in arguments]
        if missing:
            raise TypeError("{}() lacks {}; it takes {}".format(self.__name__, ", ".join(missing), self._taken()))
        return arguments

    def _takes_dict(self, given):
        """Whether one dict is all arguments by name, rather than the value of the first one."""
        if self._one_dict:
            return True
        return all(name in given for name in self._required) and all(name in self._names for name in given)

    def _taken(self):
        return ", ".join(self._names) or "no arguments"

    def __repr__(self):
        return "<tool {}({})>".format(self.__name__, ", ".join(self._names))


class Calls:
    """The calls that wait for results, and what stands for tools and their models."""

    def __init__(self, channel):
        self._channel = channel
        self._next = 0
        self.pending = {}
        """Number of the call → (the message, its event loop, its future)."""
        self.not_awaited = []
        self.stubs = {}
        self._models = {}
        self.cell = 0

    def define(self, stubs, models):
        """Replace all stubs. They are builtins: what the code calls by the same name hides one, and `del` shows it."""
        for name in self.stubs:
            if getattr(builtins, name, None) is self.stubs[name]:
                delattr(builtins, name)
        for name, (cls, _) in self._models.items():
            if getattr(builtins, name, None) is cls:
                delattr(builtins, name)
        self._models = {name: _model(name, spec["fields"]) for name, spec in models.items()}
        self.stubs = {spec["name"]: Stub(self, spec) for spec in stubs}
        for name, stub in self.stubs.items():
            setattr(builtins, name, stub)
        for name, (cls, _) in self._models.items():
            if not hasattr(builtins, name):
                setattr(builtins, name, cls)

    async def make(self, stub, arguments):
        import asyncio

        loop = asyncio.get_running_loop()
        self._next += 1
        number, future = self._next, loop.create_future()
        try:
            args = _plain(arguments)
        except (ValueError, TypeError, RecursionError) as error:
            raise TypeError(f"{stub.__name__}() cannot be called so: {error}") from None
        message = {"t": "call", "call": number, "cell": self.cell, "tool": stub.__name__, "args": args}
        self.pending[number] = (message, loop, future)
        reader = _reader_of(loop, self._channel)
        try:
            self._channel.send(message)
            value = await future
        except asyncio.CancelledError:
            if self.pending.pop(number, None) is not None:
                self._channel.send({"t": "cancel", "call": number})
            raise
        except ValueError as error:  # it is too long, or not a number
            raise TypeError(f"{stub.__name__}() cannot be called so: {error}") from None
        finally:
            self.pending.pop(number, None)
            reader()
        if "error" in value:
            kind = value["error"].get("type", "ToolError")
            raise (ToolTimeout if kind == "TimeoutError" else ToolError)(value["error"].get("message", ""), kind)
        return self.convert(value.get("value"), stub.returns)

    def take(self, message):
        """A result has come, in whatever thread: the loop that waits for it goes on."""
        waiting = self.pending.pop(message.get("call"), None)
        if waiting is None:
            return
        _, loop, future = waiting

        def finish():
            if not future.done():
                future.set_result(message)

        if _running_loop() is loop:
            finish()
        else:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:  # the loop was closed meanwhile
                pass

    def convert(self, value, type):
        """A value of JSON as the type that the tool declares."""
        if type == "any" or value is None:
            return value
        kind = type[0]
        if kind == "optional":
            return self.convert(value, type[1])
        if kind == "list" and isinstance(value, list):
            return [self.convert(each, type[1]) for each in value]
        if kind == "set" and isinstance(value, list):
            return {self.convert(each, type[1]) for each in value}
        if kind == "tuple" and isinstance(value, list) and len(value) == len(type[1]):
            return tuple(self.convert(each, one) for each, one in zip(value, type[1]))
        if kind == "dict" and isinstance(value, dict):
            return {key: self.convert(each, type[1]) for key, each in value.items()}
        if kind == "union":
            return self.convert(value, self._chosen(value, type[1]))
        if kind == "model" and isinstance(value, dict) and type[1] in self._models:
            cls, fields = self._models[type[1]]
            return cls(**{name: self.convert(value.get(name), one) for name, one in fields})
        return _scalar(kind, value)

    def _chosen(self, value, types):
        """Of the types of a union, the model that has just the fields of `value`."""
        if not isinstance(value, dict):
            return "any"
        for one in types:
            if one[0] == "model" and one[1] in self._models:
                fields = self._models[one[1]][1]
                required = {name for name, type in fields if type == "any" or type[0] != "optional"}
                if required <= value.keys() <= {name for name, _ in fields}:
                    return one
        return "any"


def _scalar(kind, value):
    if kind == "datetime":
        from datetime import datetime

        return datetime.fromisoformat(value[:-1] + "+00:00" if value.endswith("Z") else value)
    if kind == "date":
        from datetime import date

        return date.fromisoformat(value)
    if kind == "decimal":
        from decimal import Decimal

        return Decimal(value)
    if kind == "bytes":
        from base64 import b64decode

        return b64decode(value)
    return value


def _model(name, fields):
    from dataclasses import field, make_dataclass

    def value_of(self, key):
        try:
            return self.__dict__[key]
        except KeyError:
            raise KeyError(key) from None

    methods = {
        "__getitem__": value_of,
        "get": lambda self, key, default=None: self.__dict__.get(key, default),
        "keys": lambda self: self.__dict__.keys(),
        "items": lambda self: self.__dict__.items(),
        "__contains__": lambda self, key: key in self.__dict__,
    }
    methods = {method: function for method, function in methods.items() if method not in {one for one, _ in fields}}
    made = make_dataclass(name, [(one, object, field(default=None)) for one, _ in fields], namespace=methods)
    made.__module__ = "builtins"
    return made, fields


def _plain(value, depth=0):
    """`value` as JSON: what the host gets of arguments. Sets, tuples, dates, dataclasses and numpy's numbers too."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()  # without surrogates
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        if value.bit_length() > 4096:
            raise ValueError(f"a number has {value.bit_length()} bits; it may have 4096")
        return value
    if depth == _MAX_DEPTH:
        raise ValueError(f"the arguments are nested deeper than {_MAX_DEPTH}")
    depth += 1
    if isinstance(value, dict):
        return {
            _plain(key, depth) if isinstance(key, str) else _key(key): _plain(each, depth)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each, depth) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        from base64 import b64encode

        return b64encode(value).decode("ascii")
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name), depth) for name in value.__dataclass_fields__}
    for method in ("model_dump", "isoformat", "tolist", "to_dict", "item"):
        function = getattr(value, method, None)
        if callable(function):
            return _plain(function(), depth)
    if type(value).__module__ in ("decimal", "uuid", "pathlib"):
        return str(value)
    if hasattr(value, "value") and hasattr(value, "name"):  # an enum
        return _plain(value.value, depth)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _key(key):
    if isinstance(key, (int, float, bool)) or key is None:
        return json.dumps(key)
    return str(key)


def _running_loop():
    asyncio = sys.modules.get("asyncio")
    return asyncio._get_running_loop() if asyncio is not None else None


_readers = {}


def _reader_of(loop, channel):
    """Have `loop` read the channel while it waits for a call. Returns what ends that."""
    if loop is kernel.loop:
        return lambda: None  # it always reads
    _readers[loop] = _readers.get(loop, 0) + 1

    def read():
        for message in channel.receive(False) or ():
            kernel.route(message)

    if _readers[loop] == 1:
        loop.add_reader(channel.socket.fileno(), read)
        read()

    def done():
        _readers[loop] -= 1
        if not _readers[loop]:
            del _readers[loop]
            loop.remove_reader(channel.socket.fileno())

    return done


class LoopShown:
    """While a cell without `await` runs, its event loop counts as running: `asyncio.create_task` works, and the task
    goes on when the cell has ended."""

    now = None

    def __init__(self, loop):
        self._loop = loop

    def __enter__(self):
        LoopShown.now = self._loop
        sys.modules["asyncio"]._set_running_loop(self._loop)

    def __exit__(self, *_):
        LoopShown.now = None
        sys.modules["asyncio"]._set_running_loop(None)
        sys.modules["asyncio"].set_event_loop(self._loop)  # `asyncio.run` leaves none


def _let_loops_nest(asyncio):
    """Let `asyncio.run` and its kin work in a cell whose loop is only shown as running."""

    def hidden(function):
        def call(*args, **kwargs):
            shown = LoopShown.now
            if shown is None or asyncio._get_running_loop() is not shown:
                return function(*args, **kwargs)
            asyncio._set_running_loop(None)
            try:
                return function(*args, **kwargs)
            finally:
                asyncio._set_running_loop(shown)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        return call

    base = asyncio.base_events.BaseEventLoop
    base.run_until_complete, base.run_forever = hidden(base.run_until_complete), hidden(base.run_forever)
    asyncio.run = asyncio.runners.run = hidden(asyncio.run)
    if hasattr(asyncio, "Runner"):
        asyncio.Runner.run = hidden(asyncio.Runner.run)


def _line_of_cell(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<cell "):
            return frame.f_lineno
        frame = frame.f_back
    return None


# --------------------------------------------------------------------------------------------------------------- cells


class Kernel:
    """One namespace, and the loop that executes cells in it."""

    def __init__(self, channel, rich_source):
        self.channel = channel
        self.calls = Calls(channel)
        self.loop = None
        """The event loop of the cells, once one of them has needed it."""
        self.namespace = sys.modules["__main__"].__dict__
        self.namespace.clear()
        self.namespace.update({"__name__": "__main__", "__builtins__": builtins, "__doc__": None})
        self._rich_source, self._rich = rich_source, None
        self._inbox = []
        self._wakeup = None
        self._prepared = False
        self._task = None
        self._running = None
        self._last = None
        self._parts = []
        self._parts_bytes = 0
        self._outbox_seen = {}
        self._out, self._err = os.dup(1), os.dup(2)
        for descriptor in (self._out, self._err):
            os.set_inheritable(descriptor, False)

    # ---- messages

    def serve(self):
        while True:
            message = self._next_message()
            if message is None:
                return
            self._handle(message)

    def _next_message(self):
        while not self._inbox:
            if self.loop is None:
                if not self._prepared and not self.channel.wait(_PREPARE_S):
                    self._prepared = True
                    self._need_loop()  # no cell waits now: importing asyncio takes as long as starting Python
                    continue
                messages = self.channel.receive(True)
                if messages is None:
                    return None
                for message in messages:
                    self.route(message)
            else:
                self._wakeup = self.loop.create_future()
                try:
                    self.loop.run_until_complete(self._wakeup)  # background tasks go on meanwhile
                except KeyboardInterrupt:
                    pass  # of a background task
                except BaseException:
                    pass
        return self._inbox.pop(0)

    def route(self, message):
        """Results go to who waits for them, everything else to the main loop."""
        if message.get("t") == "result":
            self.calls.take(message)
            return
        if message.get("t") == "hello" and (self._running is not None):
            self._answer_hello(message)  # a host that came back while a cell waits
            return
        if message.get("t") == "tools" and (self._running is not None):
            self.calls.define(message["tools"], message["models"])
            return
        self._inbox.append(message)
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _handle(self, message):
        kind = message.get("t")
        if kind == "run":
            self._run(message)
        elif kind == "tools":
            self.calls.define(message["tools"], message["models"])
        elif kind == "hello":
            self._answer_hello(message)
        elif kind == "complete":
            self._complete(message)

    def _answer_hello(self, message):
        self.channel.send(
            {
                "t": "ready",
                "nonce": message.get("nonce"),
                "version": ".".join(map(str, sys.version_info[:3])),
                "running": self._running,
                "calls": [each[0] for each in self.calls.pending.values()],
                "parts": self._parts,
                "last": self._last,
            }
        )

    def _on_readable(self):
        messages = self.channel.receive(False)
        if messages is None:
            os._exit(0)
        for message in messages:
            self.route(message)

    def _need_loop(self):
        if self.loop is None:
            import asyncio

            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
            _let_loops_nest(asyncio)
            self.loop.add_reader(self.channel.socket.fileno(), self._on_readable)
        return self.loop

    # ---- one cell

    def _run(self, message):
        number, marker = message["cell"], message["marker"]
        self._running = {"cell": number, "marker": marker, "code": message["code"]}
        self._last, self._parts, self._parts_bytes = None, [], 0
        self.calls.cell = number
        self.calls.not_awaited.clear()
        self._restore_streams()
        name = f"<cell {number}>"
        done = {"t": "done", "cell": number, "error": None}
        try:
            value = self._execute(message["code"], name)
            if value is not None:
                self._show_value(value)
            del value
        except SystemExit as error:
            if error.code not in (None, 0):
                done["error"] = {"type": "SystemExit", "message": str(error.code), "traceback": "", "line": None}
        except BaseException as error:
            done["error"] = self._describe(error)
        try:
            self._show_figures()
        except BaseException as error:
            done["error"] = done["error"] or self._describe(error)
        done["warnings"] = [
            f"{tool}(...){f' on line {line}' if line else ''} was not awaited, so it was not called: "
            f"write `await {tool}(...)`"
            for tool, line in dict.fromkeys(self.calls.not_awaited)
        ]
        self.channel.interrupted = False
        self._running = None
        done["outbox"] = self._outbox()
        done["streams"] = self._end_streams(marker)
        self._last = done
        self.channel.send(done)

    def _execute(self, code, name):
        tree, code = self._parse(code, name)
        self._remember_lines(name, code)
        if tree.body and isinstance(tree.body[-1], _ast.Expr) and not code.rstrip().endswith(";"):
            last = tree.body[-1]
            target = _ast.Name(_VALUE, _ast.Store())
            assign = _ast.Assign([target], last.value)
            for node in (target, assign):
                for field in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
                    setattr(node, field, getattr(last, field))
            tree.body[-1] = assign
        compiled = compile(tree, name, "exec", _AWAIT, True)
        try:
            if compiled.co_flags & _COROUTINE:
                self._run_coroutine(eval(compiled, self.namespace))
            elif "asyncio" in sys.modules or "asyncio" in code:
                with LoopShown(self._need_loop()):
                    exec(compiled, self.namespace)
            else:
                exec(compiled, self.namespace)
        finally:
            value = self.namespace.pop(_VALUE, None)
        return value

    def _parse(self, code, name):
        try:
            return compile(code, name, "exec", _ONLY_AST | _AWAIT, True), code
        except IndentationError as error:
            changed = self.rich.without_indent(code) if error.msg == "unexpected indent" else code
            if changed == code:
                raise
            return self._parse(changed, name)
        except SyntaxError as error:
            changed = self.rich.without_magics(code, error) if any(mark in code for mark in "%!?") else None
            if changed is None:
                raise
            return compile(changed, name, "exec", _ONLY_AST | _AWAIT, True), changed

    def _run_coroutine(self, coroutine):
        loop = self._need_loop()
        self._task = loop.create_task(coroutine)
        try:
            loop.run_until_complete(self._task)
        except CellInterrupted:
            if not self._task.done():  # it was raised in another task
                self._task.cancel()
                try:
                    loop.run_until_complete(self._task)
                except BaseException as error:
                    raise CellInterrupted().with_traceback(error.__traceback__) from None
            raise
        except sys.modules["asyncio"].CancelledError as error:
            if self.channel.interrupted:
                self.channel.interrupted = False
                raise CellInterrupted().with_traceback(error.__traceback__) from None
            raise
        finally:
            self._task = None

    def interrupt(self, _signal_number, frame):
        """SIGINT. Code that runs is interrupted where it is; a cell that awaits is cancelled."""
        if self._running is None and self._task is None:
            return
        if self.channel.critical:
            self.channel.interrupted = True
            return
        while frame is not None:
            if frame.f_code.co_filename.startswith("<cell "):
                raise CellInterrupted
            frame = frame.f_back
        if self._task is not None:
            self.channel.interrupted = True
            self.loop.call_soon_threadsafe(self._task.cancel)

    # ---- what is shown

    @property
    def rich(self):
        if self._rich is None:
            module = type(sys)("atoll_rich")
            exec(compile(self._rich_source, "<atoll rich>", "exec"), module.__dict__)
            module.kernel = self
            self._rich = module
        return self._rich

    def _show_value(self, value):
        if isinstance(value, AwaitableCall):
            return  # its warning says what to do
        builtins._ = value
        self.display(value, "value")

    def show(self, *values, **options):
        """`display` of the code."""
        self.rich.show(*values, **options)

    def display(self, value, role="display"):
        """Send a value to the host in all forms that it has."""
        if type(value) in (str, int, float, bool, list, dict, tuple, set, bytes):
            data = {"text/plain": _cut(repr(value))}
        else:
            data = self.rich.bundle(value)
        self.publish(data, role)

    def publish(self, data, role="display"):
        part = {"role": role, "data": data}
        size = len(json.dumps(part))
        if self._parts_bytes + size > _MAX_PARTS_BYTES:
            part = {
                "role": role,
                "data": {"text/plain": f"[left out: {size} bytes; a cell may show {_MAX_PARTS_BYTES}]"},
            }
            size = len(json.dumps(part))
        self._parts_bytes += size
        self._parts.append(part)
        self.channel.send({"t": "display", "cell": self.calls.cell, "part": part})

    def _show_figures(self):
        if "matplotlib.pyplot" in sys.modules:
            self.rich.show_figures()

    def _describe(self, error):
        import traceback

        shown = traceback.TracebackException(type(error), error, error.__traceback__, limit=None)
        line = None
        seen = set()
        queue = [shown]
        while queue:
            each = queue.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            own = [one for one in each.stack if one.filename not in (KERNEL, "<atoll rich>", "<string>")]
            first = next((i for i, one in enumerate(own) if one.filename.startswith("<cell ")), 0)
            each.stack[:] = own[first:]
            queue += [one for one in (each.__cause__, each.__context__) if one is not None]
            queue += getattr(each, "exceptions", None) or []
        for one in shown.stack:
            if one.filename.startswith("<cell "):
                line = one.lineno
        if isinstance(error, SyntaxError) and str(error.filename).startswith("<cell "):
            line = error.lineno
        text = "".join(shown.format())
        return {
            "type": type(error).__name__,
            "message": _cut(_words(error), 4000),
            "traceback": _cut(text, 20_000),
            "line": line,
        }

    def _remember_lines(self, name, code):
        import linecache

        # With a last line that does not end, `traceback` would put its carets one column too far.
        linecache.cache[name] = (len(code), None, (code + "\n").splitlines(True), name)

    def _outbox(self):
        """The files in the outbox that are new or changed since the last cell."""
        changed, now = [], {}
        try:
            for directory, _, names in os.walk(OUTBOX):
                for name in names:
                    path = os.path.join(directory, name)
                    stat = os.lstat(path)
                    if stat.st_mode & 0o170000 != 0o100000 or len(now) >= 1000:
                        continue
                    now[path] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
                    if self._outbox_seen.get(path) != now[path]:
                        changed.append({"path": os.path.relpath(path, OUTBOX), "size": stat.st_size})
        except (OSError, ValueError):
            pass
        self._outbox_seen = now
        return changed

    # ---- streams

    def _restore_streams(self):
        """What an earlier cell did to descriptors 1 and 2, or to `sys.stdout`, does not outlive it."""
        for descriptor, kept in ((1, self._out), (2, self._err)):
            try:
                if not os.path.samestat(os.fstat(descriptor), os.fstat(kept)):
                    os.dup2(kept, descriptor)
            except OSError:
                os.dup2(kept, descriptor)
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name, None)
            if stream is None or getattr(stream, "closed", False):
                setattr(
                    sys,
                    name,
                    open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False),
                )

    def _end_streams(self, marker):
        ended = []
        for name, descriptor in (("stdout", self._out), ("stderr", self._err)):
            try:
                getattr(sys, name).flush()
            except (OSError, ValueError, AttributeError):
                pass
            try:
                os.write(descriptor, marker.encode("ascii"))
                ended.append(name)
            except OSError:
                pass
        return ended

    # ---- for a prompt

    def _complete(self, message):
        import rlcompleter

        code = str(message.get("code", ""))
        word = ""
        for character in reversed(code):
            if not (character.isalnum() or character in "._"):
                break
            word = character + word
        completer, found = rlcompleter.Completer(self.namespace), []
        try:
            while len(found) < 200:
                one = completer.complete(word, len(found))
                if one is None:
                    break
                found.append(one)
        except Exception:
            pass
        self.channel.send({"t": "completions", "word": word, "found": found})


def _cut(text, most=_MAX_REPR_CHARS):
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _words(error):
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} has no text>"


# -------------------------------------------------------------------------------------------------------------- inside


class _NoInput:
    """Standard input: there is none, and reading it says so instead of waiting."""

    encoding, closed, errors = "utf-8", False, "strict"

    def _refuse(self, *_):
        raise EOFError(_NO_INPUT)

    read = readline = readlines = __iter__ = __next__ = _refuse

    def fileno(self):
        return 0

    def isatty(self):
        return False

    def readable(self):
        return True

    def close(self):
        pass


_NO_INPUT = (
    "there is no standard input here, and no person to answer. Assign the value to a variable, or get it with a tool"
)


def _input(_prompt=""):
    raise EOFError(_NO_INPUT)


def _help(*about):
    if about and isinstance(about[0], Stub):
        print(about[0].__doc__)
        return None
    import pydoc

    return pydoc.help(*about) if about else print("help(object) shows how to use it")


class HookedImports:
    """Lets `rich.py` have a module that shows things when the code imports it, and not before."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return kernel.rich.hooked(name, path, target) if name in _HOOKED else None


_HOOKED = ("matplotlib.pyplot", "IPython.core.display_functions", "IPython.core.display", "PIL.Image")


def _no_kernel_here():
    """In a forked child: the channel is the parent's."""
    try:
        kernel.channel.socket.close()
    except OSError:
        pass
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)


kernel = None


def main(rest, rich_source):
    global kernel
    import faulthandler

    channel = Channel(3, rest)
    kernel = Kernel(channel, rich_source)
    faulthandler.register(
        _signal.SIGUSR2, file=kernel._err, all_threads=True
    )  # also while C code holds the interpreter
    _signal.signal(_signal.SIGINT, kernel.interrupt)
    os.register_at_fork(after_in_child=_no_kernel_here)
    sys.stdin = _NoInput()
    builtins.input = _input
    builtins.help = _help
    builtins.display = kernel.show
    sys.meta_path.insert(0, HookedImports)
    builtins.ToolError = ToolError
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    import linecache  # noqa: F401 - now, while no cell waits

    kernel.serve()
