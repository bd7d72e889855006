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

A monitor and its call are forked ahead, so that they wait for the next request: on runsc, each fork takes 10 ms.

What is not needed by every call is imported where it is used, and of what is, only the part that is written in C: with
runsc, each file that a module is read from takes a millisecond. `json`, `selectors`, `signal` and `socket`, with the
25 modules that they import, took 25 ms of the first call of a workspace.

A module that has started threads cannot be forked with them: then monitors are forked by the dispatcher, and each call
imports its module anew.
"""

import os
import select
import sys
import time

try:
    import _signal as signal
    import _socket as socket
except ImportError:  # another interpreter than CPython
    import signal
    import socket

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
    text = to_json(message)
    if "\\ud" in text:
        text = to_readable_json(message)
    return text.encode("utf-8", "replace") + b"\n"


def codec():
    """`json.loads`, `json.dumps`, and `json.dumps` for people (without escapes, and only what JSON has), by the parts
    of `json` that are written in C alone. If those are not what they were since Python 3.8, by `json` itself."""
    try:
        import _json

        class Settings:
            strict, object_hook, object_pairs_hook = True, None, None
            parse_float, parse_int, parse_constant = float, int, float

        scan = _json.make_scanner(Settings)

        def not_json(value):
            raise TypeError("Object of type {} is not JSON serializable".format(type(value).__name__))

        def writer(escape, allow_nan):
            separators = (": ", ", ")
            return lambda value: "".join(
                _json.make_encoder({}, not_json, escape, None, *separators, False, False, allow_nan)(value, 0)
            )

        def read(line):
            text = bytes(line).decode("utf-8").strip()
            try:
                value, end = scan(text, 0)
            except StopIteration:
                raise ValueError("it is no JSON") from None
            if end != len(text):
                raise ValueError("something follows the JSON")
            return value

        found = read, writer(_json.encode_basestring_ascii, True), writer(_json.encode_basestring, False)
        if (
            found[0](b'{"a": [1, "\\u00e9", NaN]}')["a"][:2] != [1, "\u00e9"]
            or found[1]({"a": "\u00e9"}) != '{"a": "\\u00e9"}'
        ):
            raise ValueError
        return found
    except Exception:
        import json

        return json.loads, json.dumps, lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False)


from_json, to_json, to_readable_json = codec()


class Poller:
    """Which sockets have something to read or room to write, and what is to be called then."""

    def __init__(self):
        self.poll = select.poll()
        self.callbacks = {}

    def watch(self, connection, events, callback):
        self.poll.register(connection, events)
        self.callbacks[connection.fileno()] = callback

    def forget(self, connection):
        self.poll.unregister(connection)
        del self.callbacks[connection.fileno()]

    def wait(self):
        for descriptor, events in self.poll.poll():
            callback = self.callbacks.get(descriptor)
            if callback is not None:  # it was forgotten in the same round
                callback(events)


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
        return {"ok": value["ok"], "text": to_readable_json(content)}
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
    """Run one call in a process below this one, which is forked before its request is there. The request comes from
    `connection`, and its answer goes there."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    become_subreaper()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    request_read, request_write = os.pipe()
    result_read, result_write = os.pipe()
    child = os.fork()
    if child == 0:
        closed = (connection.fileno(), wake_read, wake_write, request_write, result_read)
        run_child(request_read, cwd, result_bytes, result_write, closed)
    os.close(request_read)
    os.close(result_write)
    buffer = bytearray()
    while b"\n" not in buffer:
        if connection not in select.select([connection, wake_read], [], [])[0]:
            return  # the call died before it began; who holds the other end takes another
        data = connection.recv(1 << 20)
        if not data:
            kill_tree()
            return
        buffer += data
    line = lines_of(buffer)[0]
    timeout_s = from_json(line)["timeout_s"]
    try:
        send_all(request_write, line + b"\n")
        os.close(request_write)
    except OSError:  # it has just died; `watch` says of what
        pass
    answer = watch(child, timeout_s, connection, result_read, wake_read, result_bytes)
    if answer is not None:
        connection.sendall(encoded(answer))
    connection.close()
    end_child(child)


def send_all(descriptor, data):
    while data:
        data = data[os.write(descriptor, data) :]


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


def run_child(request_read, cwd, result_bytes, result_write, closed):
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in closed:
            os.close(descriptor)
        os.setsid()
        line = bytearray()
        while not line.endswith(b"\n"):
            data = os.read(request_read, 1 << 20)
            if not data:
                return
            line += data
        os.close(request_read)
        request = from_json(line)
        os.chdir(cwd)
        answer = encoded(make_call(request, result_bytes))
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        send_all(result_write, answer)
        os.close(result_write)
        import atexit

        atexit._run_exitfuncs()
        status = 0
    finally:
        os._exit(status)


def watch(child, timeout_s, connection, result_read, wake_read, result_bytes):
    """Wait for the answer of a call, its end or the end of its time. None: the host cancelled it, and it is gone."""
    deadline = time.monotonic() + timeout_s
    buffer, sources = bytearray(), [connection, wake_read, result_read]
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            kill_tree()
            message = "it did not end within {:g} s, and was killed with all that it had started"
            return {"kind": "timeout", "message": message.format(timeout_s)}
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
        answer = from_json(line)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"kind": "crashed", "message": "its process sent no result"}


def ending(status):
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        import signal as named

        try:
            name = named.Signals(number).name
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
    """Import all tools, then fork a monitor for each byte that comes on `control`, and send a connection to it."""
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
        if not control.recv(1):
            return
        ours, theirs = socket.socketpair()
        try:
            fork(lambda made=theirs: monitor(made, cwd, result_bytes), [control, ours])
        except OSError as error:
            control.sendall(encoded({"monitor": str(error)}))
            continue
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ours.fileno().to_bytes(4, sys.byteorder))]
        control.sendmsg([encoded({"monitor": None})], rights)
        ours.close()
        theirs.close()


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
        self.events = Poller()
        self.events.watch(channel, select.POLLIN, self.hear)
        self.calls = {}
        self.waiting = []
        """Calls that wait until the tools are imported, or until there is a monitor for them."""
        self.spare = None
        """The connection to a monitor that has no call yet."""
        self.is_asked = False
        """Whether the template forks one."""
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
        self.events.watch(self.control, select.POLLIN, self.hear_template)

    def end_template(self):
        self.events.forget(self.control)
        self.control.close()
        self.control, self.is_asked = None, False
        self.drop_spare()

    def drop_spare(self):
        """Let go of the monitor that has no call, which ends it."""
        if self.spare is not None:
            self.events.forget(self.spare)
            self.spare.close()
            self.spare = None

    def keep_spare(self):
        """Have a monitor forked if a call waits for one, or if none is there for the next call and none runs, which it
        would slow down."""
        is_wanted = self.waiting or not (self.spare or self.calls)
        if not is_wanted or self.is_asked or self.threads or self.control is None:
            return
        self.is_asked = True
        try:
            self.control.send(b"m")
        except OSError:  # the template has just died, which `hear_template` sees
            pass

    def hear_template(self, _events):
        try:
            data, ancillary, _, _ = self.control.recvmsg(1 << 16, socket.CMSG_SPACE(4))
        except OSError:
            data, ancillary = b"", []
        for _level, _kind, content in ancillary:
            made = socket.socket(fileno=int.from_bytes(content[:4], sys.byteorder))
            os.set_inheritable(made.fileno(), False)
            made.setblocking(False)
            self.take_monitor(made)
        if not data:
            self.end_template()
            if self.ready:
                self.fail_waiting("crashed", "the process that starts calls has ended")
            else:
                try:
                    self.endings[self.template] = os.waitpid(self.template, 0)[1]
                except OSError:  # it was waited for before
                    pass
                why = "while it was imported, " + ending(self.endings.get(self.template, 0))
                self.errors.append({"tool": self.importing or "", "message": why})
                self.fail_waiting("import", why)
                self.became_ready()
            return
        self.said += data
        for line in lines_of(self.said):
            message = from_json(line)
            if "importing" in message:
                self.importing = message["importing"]
            elif "ready" in message:
                self.threads = message["threads"]
                self.became_ready()
            elif "monitor" in message:
                self.is_asked = False
                if message["monitor"] is not None:
                    self.fail_waiting("crashed", "no process could be started for it: " + message["monitor"])
                else:
                    self.keep_spare()
            else:
                self.errors.append(message)

    def fail_waiting(self, kind, why):
        failed, self.waiting = self.waiting, []
        for message in failed:
            self.send({"t": "failed", "call": message["call"], "kind": kind, "message": why})

    def became_ready(self):
        self.ready = True
        self.keep_spare()
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
            message = from_json(line)
            if message["t"] == "call":
                self.begin(message)
            elif message["t"] == "cancel":
                self.end(message["call"])
                self.keep_spare()

    def begin(self, message):
        if message["tool"] not in self.tools:
            self.send({"t": "failed", "call": message["call"], "kind": "unknown", "message": "there is no such tool"})
            return
        if self.control is not None and self.read_sources() != self.sources:
            self.end_template()  # its monitors go on
        if self.control is None:
            self.start_template()
        if not self.ready:
            self.waiting.append(message)
            return
        if self.threads:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            kept = [self.channel, self.control, ours, *(each.connection for each in self.calls.values())]
            fork(lambda: monitor(theirs, self.cwd, self.result_bytes), kept)
            theirs.close()
            self.begin_with(ours, message)
            return
        if self.spare is not None and select.select([self.spare], [], [], 0)[0]:  # it has ended
            self.drop_spare()
        ours, self.spare = self.spare, None
        if ours is None:
            self.waiting.append(message)
        else:
            self.events.forget(ours)
            self.begin_with(ours, message)
        self.keep_spare()

    def take_monitor(self, made):
        if self.waiting:
            self.begin_with(made, self.waiting.pop(0))
        else:
            self.spare = made
            self.events.watch(made, select.POLLIN, self.lose_spare)

    def lose_spare(self, _events):
        """It has ended before it had a call, perhaps because the workspace has no memory."""
        self.drop_spare()

    def begin_with(self, ours, message):
        entrypoint, number = self.tools[message["tool"]], message["call"]
        request = {"entrypoint": entrypoint, "args": message["args"], "timeout_s": message["timeout_s"]}
        made = self.calls[number] = StartedCall(number, ours, encoded(request))
        self.events.watch(ours, select.POLLIN | select.POLLOUT, lambda events: self.go_on(made, events))

    def go_on(self, made, events):
        if self.calls.get(made.number) is not made:  # it was ended in the same round of events
            return
        try:
            if events & select.POLLOUT and made.unsent:
                del made.unsent[: made.connection.send(made.unsent)]
                if not made.unsent:
                    self.events.watch(made.connection, select.POLLIN, lambda events: self.go_on(made, events))
            data = made.connection.recv(1 << 20) if events & ~select.POLLOUT else None
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
        self.keep_spare()

    def end(self, number):
        """Forget a call. If it runs, its monitor sees the end of the connection, and kills it."""
        self.waiting = [message for message in self.waiting if message["call"] != number]
        made = self.calls.pop(number, None)
        if made is not None:
            self.events.forget(made.connection)
            made.connection.close()

    def serve(self):
        self.start_template()
        self.take_lines()
        while True:
            self.events.wait()
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
    hello = from_json(line)
    if sys.path[0] == "":
        del sys.path[0]
    sys.path.insert(0, hello["root"])
    os.environ.update(hello["env"])
    os.environ["PATH"] = os.pathsep.join([*hello["path"], os.environ.get("PATH", os.defpath)])
    sys.dont_write_bytecode = True  # a source that is edited within a second, to the same length, would be taken for it
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    DispatchLoop(channel, rest, hello).serve()
