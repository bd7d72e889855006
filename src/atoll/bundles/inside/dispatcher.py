"""The program inside a workspace that makes the calls of its tools.

Owns how a tool is imported and called, what its result is turned into, and that no call harms another: each has a
process of its own. Not here: which calls are made, and whether what is sent about them is believed (it is not:
`bundles/dispatch.py` on the host, which sends this text to an interpreter of the workspace): Python 3.8 or later, the
standard library, and nothing else.

    host → inside   hello {nonce, root, cwd, env, path, tools: [{name, entrypoint}], result_bytes} ·
                    call {call, tool, args, timeout_s} · cancel {call}
    inside → host   ready {nonce, version, errors: [{tool, message}]} · done {call, ok, text | parts} ·
                    failed {call, kind, message}

Messages are lines of JSON on descriptor 3. stdout and stderr are the tools' own, and nothing printed is a message.

    dispatcher      holds the channel; imports no tool, so that none can harm it
    └─ template     imports all tools once, and forks for each call; replaced when a source has changed
       └─ monitor   one for each call: its time limit, and the end of all that the call has started
          └─ call   the tool

What is not needed by every call is imported where it is used: with runsc, importing `inspect`, `typing`, `traceback`
and `ctypes` takes half as long as all the rest of a start.

A module that has started threads cannot be forked with them: then monitors are forked by the dispatcher, and each call
imports its module anew.
"""

import json
import os
import select
import selectors
import signal
import socket
import sys
import time

KINDS = ("text", "image-url", "audio-url", "video-url", "document-url", "web-url", "api-url")
EXPECTED = (
    'a tool returns {"ok": true or false, "content": ...}, where content is a string, any JSON, or a list of parts '
    'such as {"kind": "text", "content": "..."} and {"kind": "image-url", "url": "data:image/png;base64,..."}'
)
MAX_MESSAGE_CHARS = 8000
MAX_PARTS = 64
MAX_SOURCES = 5000
PR_SET_CHILD_SUBREAPER = 36
CO_VARARGS, CO_VARKEYWORDS, CO_ITERABLE_COROUTINE = 0x4, 0x8, 0x100
KILL_S = 2.0


class WrongShape(Exception):
    """What a tool has returned is no result."""


class WrongArguments(Exception):
    """The function does not take these."""


def lines_of(buffer):
    """Take the complete lines out of a buffer."""
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    return [line for line in lines if line]


def encoded(message):
    """A line. Half of a surrogate pair, as in names of files that are not UTF-8, is "?": it has no form in JSON."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def words(error):
    try:
        text = str(error)
    except Exception:
        text = ""
    name = type(error).__name__
    return cut("{}: {}".format(name, text) if text else name)


def cut(text, most=MAX_MESSAGE_CHARS):
    return text if len(text) <= most else "{} … {}".format(text[: most // 2], text[-most // 2 :])


# ------------------------------------------------------------------------------------------------------------- a call


def load(entrypoint):
    module, _, function = entrypoint.partition(":")
    __import__(module)
    found = getattr(sys.modules[module], function, None)
    if not callable(found):
        raise ImportError("the module {} has no function {}".format(module, function))
    return found


def takes_one_dict(function):
    """Whether a function plainly takes all arguments as one dict, so that nothing has to be imported to know it."""
    if type(function) is not type(takes_one_dict) or hasattr(function, "__wrapped__"):
        return False
    code = function.__code__
    if code.co_argcount != 1 or code.co_kwonlyargcount or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        return False
    try:
        hint = function.__annotations__.get(code.co_varnames[0], dict)
    except Exception:  # a name that is only there for type checkers
        return False
    if isinstance(hint, str):
        return hint.partition("[")[0] == "dict"
    return (getattr(hint, "__origin__", None) or hint) is dict


def call(function, args):
    """Call a function with the arguments of a call: as one dict, as the one object that it takes, or by name. The same
    decision as in `schemas.py`."""
    if takes_one_dict(function):
        return function(args)
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function(args)
    kinds = inspect.Parameter
    parameters = list(signature.parameters.values())
    if len(parameters) == 1 and parameters[0].kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
        only = parameters[0]
        made = one_object(function, only, args)
        if made is not None:
            return function(made) if only.kind is not kinds.KEYWORD_ONLY else function(**{only.name: made})
    positional = [each.name for each in parameters if each.kind is kinds.POSITIONAL_ONLY]
    by_name = {name: value for name, value in args.items() if name not in positional}
    try:
        bound = signature.bind(*[args[name] for name in positional if name in args], **by_name)
    except TypeError as error:
        raise WrongArguments(str(error)) from None
    return function(*bound.args, **bound.kwargs)


def one_object(function, parameter, args):
    """All arguments as the one parameter takes them. None: it is one of them, by its name."""
    import typing

    try:
        hints = typing.get_type_hints(function)
    except Exception:  # a name that is only there for type checkers
        return args
    hint = hints.get(parameter.name, dict)
    origin = getattr(hint, "__origin__", None) or hint
    if origin in (dict, object, typing.Any) or hasattr(origin, "__total__"):
        return args
    if isinstance(origin, type):
        import collections.abc

        if origin in (collections.abc.Mapping, collections.abc.MutableMapping) or issubclass(origin, dict):
            return args
        try:
            if hasattr(origin, "model_validate"):
                return origin.model_validate(args)
            if hasattr(origin, "__dataclass_fields__") or hasattr(origin, "_fields"):
                return origin(**args)
        except (TypeError, ValueError) as error:
            raise WrongArguments(words(error)) from None
    return None


def shaped(value):
    """The result of a tool as it is sent."""
    if not isinstance(value, dict) or not isinstance(value.get("ok"), bool) or "content" not in value:
        shown = cut(repr(value), 200)
        raise WrongShape("the tool returned {}, which is no result: {}".format(shown, EXPECTED))
    content = value["content"]
    if isinstance(content, str):
        return {"ok": value["ok"], "text": content}
    if isinstance(content, list) and content and all(is_part(each) for each in content):
        if len(content) > MAX_PARTS:
            raise WrongShape("the tool returned {} parts; it may return {}".format(len(content), MAX_PARTS))
        return {"ok": value["ok"], "parts": [part(each) for each in content]}
    try:
        return {"ok": value["ok"], "text": json.dumps(content, ensure_ascii=False, allow_nan=False)}
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongShape("the content that the tool returned is not JSON: {}; {}".format(error, EXPECTED)) from None


def is_part(each):
    return isinstance(each, dict) and isinstance(each.get("kind"), str) and set(each) <= {"kind", "content", "url"}


def part(each):
    kind, field = each["kind"], "content" if each["kind"] == "text" else "url"
    if kind not in KINDS:
        raise WrongShape("there is no part of the kind {!r}; allowed are {}".format(kind[:80], ", ".join(KINDS)))
    value = each.get(field)
    if not isinstance(value, str) or len(each) != 2:
        raise WrongShape("a part of the kind {} has the fields kind and {}, a string".format(kind, field))
    if field == "url":
        head = value[:200].partition(",")[0].lower()
        if not head.startswith(("http://", "https://")) and not (head.startswith("data:") and head.endswith(";base64")):
            raise WrongShape("the URL of a part is {!r}; it must be http(s):// or data:…;base64,…".format(value[:80]))
    return {"kind": kind, field: value}


def make_call(request, result_bytes):
    """Call the tool and say what became of it."""
    try:
        function = load(request["entrypoint"])
    except BaseException as error:
        print_traceback()
        return {"kind": "import", "message": "its module cannot be imported: " + words(error)}
    try:
        value = call(function, request["args"])
        if is_awaitable(value):
            import asyncio

            value = asyncio.run(awaited(value))
        answer = shaped(value)
    except (WrongShape, WrongArguments) as error:
        kind = "arguments" if isinstance(error, WrongArguments) else "shape"
        return {"kind": kind, "message": str(error)}
    except BaseException as error:
        print_traceback()
        return {"kind": "raised", "message": words(error)}
    size = len(encoded(answer))
    if size > result_bytes:
        message = "the result takes {} bytes; it may take {}. Return less, or write it to a file and return its path"
        return {"kind": "too_large", "message": message.format(size, result_bytes)}
    return answer


def is_awaitable(value):
    """As `inspect.isawaitable`."""
    flags = getattr(getattr(value, "gi_code", None), "co_flags", 0)
    return hasattr(value, "__await__") or bool(flags & CO_ITERABLE_COROUTINE)


async def awaited(value):
    return await value


def print_traceback():
    import traceback

    traceback.print_exc()


# ---------------------------------------------------------------------------------------------------------- a monitor


def monitor(connection, cwd, result_bytes):
    """Run one call in a process below this one. Its request comes from `connection`, and its answer goes there."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become_subreaper()
    buffer = bytearray()
    while b"\n" not in buffer:
        data = connection.recv(1 << 20)
        if not data:
            return
        buffer += data
    request = json.loads(lines_of(buffer)[0])
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    result_read, result_write = os.pipe()
    child = os.fork()
    if child == 0:
        run_child(request, cwd, result_bytes, result_write, (connection.fileno(), wake_read, wake_write, result_read))
    os.close(result_write)
    answer = watch(child, request, connection, result_read, wake_read, result_bytes)
    if answer is not None:
        connection.sendall(encoded(answer))
    connection.close()
    end_child(child)


def become_subreaper():
    """Make orphans below this process its children. It is not inherited."""
    try:
        import _ctypes  # what `ctypes` adds to it takes as long again to import
    except ImportError:
        return
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
    _ctypes.call_function(prctl, (PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def end_child(child):
    """Let a call do what is registered for its end, for a while. What it has started goes on."""
    deadline = time.monotonic() + KILL_S
    try:
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
    except OSError:  # it was waited for before
        pass


def run_child(request, cwd, result_bytes, result_write, closed):
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in closed:
            os.close(descriptor)
        os.setsid()
        os.chdir(cwd)
        answer = encoded(make_call(request, result_bytes))
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        while answer:
            answer = answer[os.write(result_write, answer) :]
        os.close(result_write)
        import atexit

        atexit._run_exitfuncs()
        status = 0
    finally:
        os._exit(status)


def watch(child, request, connection, result_read, wake_read, result_bytes):
    """Wait for the answer of a call, its end or the end of its time. None: the host cancelled it, and it is gone."""
    deadline = time.monotonic() + request["timeout_s"]
    buffer, sources = bytearray(), [connection, wake_read, result_read]
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            kill_tree()
            message = "it did not end within {:g} s, and was killed with all that it had started"
            return {"kind": "timeout", "message": message.format(request["timeout_s"])}
        ready = select.select(sources, [], [], left)[0]
        if connection in ready:
            kill_tree()
            return None
        if wake_read in ready:
            os.read(wake_read, 4096)
        ended = os.waitpid(child, os.WNOHANG)
        while b"\n" not in buffer and result_read in sources and select.select([result_read], [], [], 0)[0]:
            data = os.read(result_read, 1 << 20)
            buffer += data
            if not data:
                sources.remove(result_read)
            if len(buffer) > 2 * result_bytes:
                kill_tree()
                return {"kind": "too_large", "message": "the result is too large"}
        if b"\n" in buffer:
            return parsed(lines_of(buffer)[0])
        if ended[0]:
            return {"kind": "crashed", "message": ending(ended[1])}


def parsed(line):
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"kind": "crashed", "message": "its process sent no result"}


def ending(status):
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = "signal {}".format(number)
        hint = ", probably because the workspace used up its memory" if number == signal.SIGKILL else ""
        return "its process died of {}{}".format(name, hint)
    return "its process ended itself, with exit code {}".format(os.WEXITSTATUS(status))


def kill_tree():
    """Kill all processes below this one, also those that left their session: orphans come to the monitor."""
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        below = descendants()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except OSError:
            return  # there are no children
        time.sleep(0.005)


def descendants():
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/{}/stat".format(name), "rb") as file:
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                pass
    found, level = [], {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found.extend(level)
    return found


# --------------------------------------------------------------------------------------------------------- a template


def template(control, tools, cwd, result_bytes):
    """Import all tools, then fork a monitor for each connection that comes on `control`."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for each in tools:
        control.sendall(encoded({"importing": each["name"]}))
        try:
            if not takes_one_dict(load(each["entrypoint"])):  # what its calls need, imported once for all of them
                import inspect  # noqa: F401
                import typing  # noqa: F401
        except BaseException:
            import traceback

            message = cut(traceback.format_exc())
            control.sendall(encoded({"tool": each["name"], "message": message}))
    try:
        import _ctypes  # noqa: F401 - as monitors need it
    except ImportError:
        pass
    threading = sys.modules.get("threading")
    has_threads = threading is not None and threading.active_count() > 1
    control.sendall(encoded({"ready": True, "threads": has_threads}))
    while True:
        data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(4))
        if not data:
            return
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                connection = socket.socket(fileno=int.from_bytes(content[:4], sys.byteorder))
                connection.set_inheritable(False)
                fork(lambda made=connection: monitor(made, cwd, result_bytes), [control])
                connection.close()


def fork(work, closed):
    """Do `work` in a child, which ends after it."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for each in closed:
            each.close()
        work()
        status = 0
    except BaseException:
        print_traceback()
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(status)


# ------------------------------------------------------------------------------------------------------- a dispatcher


class StartedCall:
    def __init__(self, number, connection, request):
        self.number, self.connection = number, connection
        self.unsent, self.received = bytearray(request), bytearray()


class DispatchLoop:
    def __init__(self, channel, rest, hello):
        self.channel, self.rest = channel, bytearray(rest)
        self.tools = {each["name"]: each["entrypoint"] for each in hello["tools"]}
        self.declared = hello["tools"]
        self.root, self.cwd, self.result_bytes = hello["root"], hello["cwd"], hello["result_bytes"]
        self.nonce = hello["nonce"]
        self.events = selectors.DefaultSelector()
        self.events.register(channel, selectors.EVENT_READ, self.hear)
        self.calls = {}
        self.waiting = []
        """Calls that came while tools are imported: whether they can be forked is not known yet."""
        self.control = self.template = None
        self.endings = {}

    def send(self, message):
        self.channel.sendall(encoded(message))

    # ---- the template ----

    def start_template(self):
        self.sources = self.read_sources()
        self.threads, self.ready = False, False
        self.errors, self.importing, self.said = [], None, bytearray()
        self.control, theirs = socket.socketpair()
        kept = [self.channel, self.control, *(each.connection for each in self.calls.values())]
        self.template = fork(lambda: template(theirs, self.declared, self.cwd, self.result_bytes), kept)
        theirs.close()
        self.events.register(self.control, selectors.EVENT_READ, self.hear_template)

    def end_template(self):
        self.events.unregister(self.control)
        self.control.close()
        self.control = None

    def hear_template(self, _events):
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.end_template()
            if not self.ready:
                try:
                    self.endings[self.template] = os.waitpid(self.template, 0)[1]
                except OSError:  # it was waited for before
                    pass
                why = "while it was imported, " + ending(self.endings.get(self.template, 0))
                self.errors.append({"tool": self.importing or "", "message": why})
                failed, self.waiting = self.waiting, []
                for message in failed:
                    self.send({"t": "failed", "call": message["call"], "kind": "import", "message": why})
                self.became_ready()
            return
        self.said += data
        for line in lines_of(self.said):
            message = json.loads(line)
            if "importing" in message:
                self.importing = message["importing"]
            elif "ready" in message:
                self.threads = message["threads"]
                self.became_ready()
            else:
                self.errors.append(message)

    def became_ready(self):
        self.ready = True
        if self.nonce is not None:
            nonce, self.nonce = self.nonce, None
            version = "{}.{}.{}".format(*sys.version_info[:3])
            self.send({"t": "ready", "nonce": nonce, "version": version, "errors": self.errors[:100]})
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.begin(message)

    def read_sources(self):
        """What tells an edited file from the one before: of all files of the tools, but not of caches."""
        found = []
        for above, directories, files in os.walk(os.path.join(self.root, "tools")):
            directories[:] = [name for name in directories if name != "__pycache__"]
            for name in files:
                try:
                    status = os.stat(os.path.join(above, name))
                except OSError:
                    continue
                found.append((above, name, status.st_mtime_ns, status.st_size, status.st_ino))
            if len(found) > MAX_SOURCES:
                break
        return sorted(found)

    # ---- calls ----

    def hear(self, _events):
        data = self.channel.recv(1 << 20)
        if not data:
            sys.exit(0)
        self.rest += data
        self.take_lines()

    def take_lines(self):
        for line in lines_of(self.rest):
            message = json.loads(line)
            if message["t"] == "call":
                self.begin(message)
            elif message["t"] == "cancel":
                self.end(message["call"])

    def begin(self, message):
        number, entrypoint = message["call"], self.tools.get(message["tool"])
        if entrypoint is None:
            self.send({"t": "failed", "call": number, "kind": "unknown", "message": "there is no such tool"})
            return
        if self.control is not None and self.read_sources() != self.sources:
            self.end_template()  # its monitors go on
        if self.control is None:
            self.start_template()
        if not self.ready:
            self.waiting.append(message)
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        if self.threads:
            kept = [self.channel, self.control, ours, *(each.connection for each in self.calls.values())]
            fork(lambda: monitor(theirs, self.cwd, self.result_bytes), kept)
        else:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, theirs.fileno().to_bytes(4, sys.byteorder))]
            try:
                self.control.sendmsg([b"c"], rights)
            except OSError:  # the template has just died; the call says so
                pass
        theirs.close()
        request = {"entrypoint": entrypoint, "args": message["args"], "timeout_s": message["timeout_s"]}
        made = self.calls[number] = StartedCall(number, ours, encoded(request))
        self.events.register(
            ours, selectors.EVENT_READ | selectors.EVENT_WRITE, lambda events: self.go_on(made, events)
        )

    def go_on(self, made, events):
        if self.calls.get(made.number) is not made:  # it was ended in the same round of events
            return
        try:
            if events & selectors.EVENT_WRITE and made.unsent:
                del made.unsent[: made.connection.send(made.unsent)]
                if not made.unsent:
                    self.events.modify(made.connection, selectors.EVENT_READ, lambda events: self.go_on(made, events))
            data = made.connection.recv(1 << 20) if events & selectors.EVENT_READ else None
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            made.received += data
        if b"\n" in made.received or data == b"":
            self.finish(made)

    def finish(self, made):
        answer = parsed((lines_of(made.received) or [b""])[0])
        self.end(made.number)
        self.send({"t": "failed" if "kind" in answer else "done", "call": made.number, **answer})

    def end(self, number):
        """Forget a call. If it runs, its monitor sees the end of the connection, and kills it."""
        self.waiting = [message for message in self.waiting if message["call"] != number]
        made = self.calls.pop(number, None)
        if made is not None:
            self.events.unregister(made.connection)
            made.connection.close()

    def serve(self):
        self.start_template()
        self.take_lines()
        while True:
            for key, events in self.events.select():
                key.data(events)
            self.reap()

    def reap(self):
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                self.endings = {pid: status} if pid == self.template else self.endings
                pid, status = os.waitpid(-1, os.WNOHANG)
        except OSError:  # there are no children
            pass


def main(rest):
    os.set_inheritable(3, False)
    channel = socket.socket(fileno=3)
    buffer = bytearray(rest)
    while b"\n" not in buffer:
        data = channel.recv(1 << 20)
        if not data:
            return
        buffer += data
    line, _, rest = bytes(buffer).partition(b"\n")
    hello = json.loads(line)
    if sys.path[0] == "":
        del sys.path[0]
    sys.path.insert(0, hello["root"])
    os.environ.update(hello["env"])
    os.environ["PATH"] = os.pathsep.join([*hello["path"], os.environ.get("PATH", os.defpath)])
    sys.dont_write_bytecode = True  # a source that is edited within a second, to the same length, would be taken for it
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    DispatchLoop(channel, rest, hello).serve()
