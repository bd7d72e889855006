"""The request for a command: its options, their limits, and how they are encoded for the guest.

Owns `ExecRequest`, the one object from the public methods to the guest, and the environment that every command of a
sandbox gets. Not here: running it (`process.py`). Used by `sandbox.py` and `process.py`.
"""

# Without `from __future__ import annotations`: the fields of a `NamedTuple` would be text that has to be compiled, and
# the first time that takes 1 ms.

import math
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from atoll.contract.errors import InvalidRequest
from atoll.contract.inside import DEFAULT_PATH, USER_PATH
from atoll.contract.names import check_env
from atoll.contract.protocol import FIRST_CHANNEL, MAX_CHANNELS, Tag, encode_fields, encode_text
from atoll.runtime.guest.frames import name_user

DEFAULT_TERM = "xterm-256color"
OUTPUT_LIMIT_BYTES = 16 * 1024 * 1024
"""Output that is kept of each stream, unless the request says otherwise."""
MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""The longest argument that Linux takes (MAX_ARG_STRLEN, less the NUL)."""
MAX_COMMAND_BYTES = 2 * 1024 * 1024
"""A shell line, or all arguments together; Linux takes no more arguments either."""

_MAX_REQUEST_BYTES = 192 * 1024  # arguments that fit into one frame, with room for the environment and paths
_COMMAND_END = b"#atoll-end"
_SHOWN = 200
_LAST_SCRIPT_DESCRIPTOR = 9  # a POSIX shell redirects descriptors of one digit

# Reads the line from an extra channel, in full or not at all, and leaves nothing of that to it but a variable less.
_FROM_CHANNEL = (
    "_atoll_line=$(cat <&{fd}); exec {fd}<&-; case $_atoll_line in *'{end}') ;; "
    "*) echo 'the command did not arrive in full' >&2; exit 126;; esac; "
    "eval \"unset _atoll_line; ${{_atoll_line%'{end}'}}\""
)


def shell_line(arguments: str) -> str:
    """A shell line that becomes bash with these arguments, or sh where the image has no bash."""
    return f"if command -v bash >/dev/null 2>&1; then exec bash {arguments}; else exec sh {arguments}; fi"


def start_directory(start: str | None, cwd: str | None) -> str | None:
    """Where a command that asks for `cwd` begins, in a sandbox with the directory `start`. None: the user's home."""
    return cwd if start is None else posixpath.join(start, cwd or "")


def sudo_user(user: str) -> str:
    """Who may use `sudo` in a sandbox that has it, and whose commands run as `user`."""
    return "user" if user in ("root", "0") else user


class Environment:
    """The environment that every command of a sandbox gets, encoded once.

    With `sudo`, processes of that user may have commands started as another one. It is here because it is of the
    sandbox, not of a request: a server adds it to the requests of its clients, as it adds variables.
    """

    def __init__(self, env: Mapping[str, str], *, sudo: str | None = None) -> None:
        self._sudo = b"" if sudo is None else encode_fields(((Tag.SUDO, name_user(sudo)),))
        own = {"LANG": "C.UTF-8"} | check_env(dict(env))
        self._env = {"PATH": DEFAULT_PATH} | own
        self._user_env = {"PATH": USER_PATH} | own
        self._encoded = self._sudo + _encode_env(self._env)
        self._user_encoded = self._sudo + _encode_env(self._user_env)

    def encode(self, env: Mapping[str, str] | None, *, user: str, terminal: bool) -> bytes:
        """The fields for a command of `user` with its own `env` on top; with `terminal`, TERM is set.

        Raises:
            InvalidRequest: a name or a value of `env` cannot be given to a process.
        """
        if not env and not terminal:
            return self._user_encoded if user == "user" else self._encoded
        merged = (self._user_env if user == "user" else self._env) | check_env(dict(env or {}))
        if terminal:
            merged.setdefault("TERM", DEFAULT_TERM)
        return self._sudo + _encode_env(merged)


class OwnVariables(Environment):
    """The environment that commands get where a server adds the sandbox's: their own variables."""

    def __init__(self) -> None:
        super().__init__({})

    def encode(self, env: Mapping[str, str] | None, *, user: str, terminal: bool) -> bytes:  # noqa: ARG002 - the server's
        return _encode_env(check_env(dict(env or {})))


def _encode_env(env: Mapping[str, str]) -> bytes:
    return encode_fields((Tag.ENV, f"{key}={value}") for key, value in env.items())


class ExecRequest(NamedTuple):
    """A command to be run or started: the one object from the public methods of `Sandbox` to the guest.

    A new option is a field here with its tag in `encode`, and a keyword of the public methods that offer it; nothing in
    between names options one by one. `docs/architecture.md`, section 6, lists every place. Not a model: it is
    made for every command, whose overhead is counted in microseconds, and `encode` checks it.
    """

    command: str | Sequence[str]
    """A string is a line for the shell, a sequence a program and its arguments."""
    user: str
    """The user that it runs as. The public methods put the sandbox's own user here where none is given."""
    env: Mapping[str, str] | None = None
    """Variables on top of the sandbox's environment. Unset or empty: none."""
    cwd: str | None = None
    """The working directory. Unset: the user's home."""
    stdin: bytes | bool = False
    """Bytes: these, then end of file. True: what is sent through `Process.stdin`. False: stdin is empty."""
    pty: tuple[int, int] | None = None
    """Rows and columns of a terminal; stdin is then open. Unset: no terminal."""
    keep: bool = False
    """True: it outlives the stream, the connection and the program that started it. False: it is killed with them."""
    merge_stderr: bool = False
    """True: stderr is written to stdout, in the order of writing. False: they are two streams."""
    channels: int = 0
    """Two-way byte streams at descriptors 3 and up. 0: none."""
    timeout_s: float | None = None
    """`run` kills its process tree after so long. Unset: no limit."""
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES
    """What `run` keeps of each of stdout and stderr, head and tail."""
    on_stdout: Callable[[bytes], None] | None = None
    """Called by `run` with each chunk of stdout. Unset: it is only collected."""
    on_stderr: Callable[[bytes], None] | None = None
    """The same for stderr."""

    def encode(self, environment: Environment, *, no_started_event: bool = False) -> bytes:
        """The fields of SPAWN. With `no_started_event`, the guest does not report that it has started.

        Raises:
            InvalidRequest: there is no command, it holds a NUL or is too long, or a number is out of range.
        """
        if not 0 <= self.channels <= MAX_CHANNELS:
            raise InvalidRequest(f"channels is {self.channels}; a process may have 0 to {MAX_CHANNELS}")
        check_timeout(self.timeout_s)
        if self.output_limit_bytes < 0:
            raise InvalidRequest(f"output_limit_bytes is {self.output_limit_bytes}; it must not be negative")
        is_long = self.is_long
        fields: list[tuple[Tag, int | str | None]] = [
            (Tag.USER, name_user(self.user)),
            (Tag.CWD, self.cwd),
            (Tag.STDIN, None if self.stdin is False else 1),
            (Tag.KEEP, 1 if self.keep else None),
            (Tag.MERGE, 1 if self.merge_stderr else None),
            (Tag.QUIET, 1 if no_started_event else None),
            (Tag.CHANNELS, (self.channels + is_long) or None),
        ]
        if self.pty is not None:
            rows, cols = check_size(*self.pty)
            fields += [(Tag.PTY_ROWS, rows), (Tag.PTY_COLS, cols)]
        if isinstance(self.command, str):
            if not self.command.strip():
                raise InvalidRequest("the command is empty; give a line for the shell, or a list of arguments")
        elif not self.command or not self.command[0]:
            raise InvalidRequest("the command is empty; its first argument must name a program")
        if is_long:
            fields.append((Tag.SHELL, self._reader()))
        elif isinstance(self.command, str):
            fields.append((Tag.SHELL, self.command))
        else:
            fields += [(Tag.ARGV, argument) for argument in self.command]
        return encode_fields(fields) + environment.encode(self.env, user=self.user, terminal=self.pty is not None)

    @property
    def is_long(self) -> bool:
        """Whether the command is sent as `script` on the channel after the requested ones: a shell line that is longer
        than an argument may be, or arguments that do not fit into one frame. A shell of the image reads it."""
        command = self.command
        if isinstance(command, str):
            return len(command) * 4 > MAX_ARGUMENT_BYTES and len(encode_text(command, "shell")) > MAX_ARGUMENT_BYTES
        size = sum(map(len, command)) + 6 * len(command)
        return size * 4 > MAX_ARGUMENT_BYTES and _arguments_bytes(command) > _MAX_REQUEST_BYTES

    def script(self) -> bytes:
        """What is sent on that channel, of a command that is long.

        Raises:
            InvalidRequest: it is longer than `MAX_COMMAND_BYTES`, or holds a NUL.
        """
        import shlex

        line = self.command if isinstance(self.command, str) else "exec " + shlex.join(self.command)
        raw = encode_text(line, "command")
        size = len(raw) if isinstance(self.command, str) else _arguments_bytes(self.command)
        if size > MAX_COMMAND_BYTES:
            raise InvalidRequest(
                f"the command takes {size} bytes; it may take {MAX_COMMAND_BYTES}. Write what is long to a file first, "
                "or send it through stdin"
            )
        if b"\0" in raw:
            raise InvalidRequest("the command holds a NUL character, which no argument can")
        return raw + _COMMAND_END

    def _reader(self) -> str:
        """The shell line that reads the script. Begins with a comment that shows the command in lists of processes."""
        descriptor = FIRST_CHANNEL + self.channels
        if descriptor > _LAST_SCRIPT_DESCRIPTOR:
            raise InvalidRequest(
                f"channels is {self.channels}; a command of more than {MAX_ARGUMENT_BYTES} bytes may have "
                f"{_LAST_SCRIPT_DESCRIPTOR - FIRST_CHANNEL}"
            )
        shown = self.command[:_SHOWN] if isinstance(self.command, str) else " ".join(self.command[:8])[:_SHOWN]
        line = _FROM_CHANNEL.format(fd=descriptor, end=_COMMAND_END.decode())
        return f"# {' '.join(shown.split())} ...\n{line}"


def _arguments_bytes(arguments: Sequence[str]) -> int:
    """What they take in a frame.

    Raises:
        InvalidRequest: one of them is longer than Linux takes.
    """
    sizes = [len(encode_text(argument, "argument")) for argument in arguments]
    if (longest := max(sizes, default=0)) > MAX_ARGUMENT_BYTES:
        raise InvalidRequest(
            f"argument {sizes.index(longest)} takes {longest} bytes; Linux takes {MAX_ARGUMENT_BYTES} in one argument. "
            "Write it to a file first, or send it through stdin"
        )
    return sum(sizes) + 6 * len(sizes)


def check_timeout(timeout_s: float | None) -> float | None:
    """Return the time-out if it is allowed.

    Raises:
        InvalidRequest: it is not above 0.
    """
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise InvalidRequest(f"timeout_s is {timeout_s}; it must be above 0, or None for no limit")
    return timeout_s


def check_size(rows: int, cols: int) -> tuple[int, int]:
    """Return the size of a terminal if it is allowed.

    Raises:
        InvalidRequest: it is not.
    """
    if not (1 <= rows <= 65535 and 1 <= cols <= 65535):
        raise InvalidRequest(f"a terminal has {rows} rows and {cols} columns; both may be 1 to 65535")
    return rows, cols


def check_signal(signal: int) -> int:
    """Return `signal` if the kernel has it.

    Raises:
        InvalidRequest: it does not.
    """
    if not 1 <= signal <= 64:
        raise InvalidRequest(f"signal {signal} does not exist; signals are numbered 1 to 64")
    return signal
