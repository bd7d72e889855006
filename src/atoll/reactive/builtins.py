"""Operations of a graph: `exec` (a command in a sandbox), `fetch_data` (a URL) and `generate_text` (a model).

Owns their inputs, their results and what of them is kept. Inputs are plain values or nodes. Not here: when they run
(`operations.py`), sandboxes that last (`sandboxes.py`), HTTP (`fetching.py`), kept results (`cache.py`), and the agent
loop (`agents/loop.py`). Used by programs, and by `sandboxes.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from atoll.contract.errors import CallerError, InvalidRequest, PathNotFound, install_extra
from atoll.contract.model import ExecResult
from atoll.contract.network import NetworkPolicy
from atoll.reactive.cache import ResultCache, cache_key
from atoll.reactive.fetching import MAX_BODY_BYTES, TIMEOUT_S, PolicyFetcher
from atoll.reactive.graph import Graph, current_graph, value_of
from atoll.reactive.nodes import Node
from atoll.reactive.operations import Operation
from atoll.reactive.prepared import PreparedSandboxes, SandboxKind

if TYPE_CHECKING:
    from pydantic_ai.models import Model

    from atoll.runtime.sandbox import Sandbox
    from atoll.tools.tool import ToolSet

T = TypeVar("T")

Given: TypeAlias = T | Node[T]
"""An input: a plain value, or a node whose result is the value."""

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Of one file that comes back from a run."""
MAX_FILES = 100
"""That come back from a run."""
CACHE_DIRECTORY = "reactive"
"""Below the state directory."""
_SHOWN_CHARS = 64 * 1024
"""Of the output while a command runs: the last part."""


class CommandResult(ExecResult):
    """How a command ended, or a sequence of them: the output of all, and how the last one ended."""

    encoded_files: dict[str, str] = {}  # noqa: RUF012 - a field, whose values are immutable
    """The files that were asked for, in base64, by path. Those that do not exist are missing."""

    @cached_property
    def file_bytes(self) -> Mapping[str, bytes]:
        """The files that were asked for and exist, by path."""
        return {path: base64.b64decode(content) for path, content in self.encoded_files.items()}

    @cached_property
    def files(self) -> Mapping[str, str]:
        """The same as text: UTF-8, with U+FFFD for an invalid byte."""
        return {path: content.decode("utf-8", "replace") for path, content in self.file_bytes.items()}


class CommandInputs(NamedTuple):
    """The inputs of one run."""

    commands: tuple[str, ...]
    image: str | None
    files: tuple[str, ...]
    stdin: str | None
    env: Mapping[str, str]
    sandbox: Sandbox | None
    """The one to run in. Unset: one of its own."""


def exec(
    command: Given[str] | Sequence[Given[str]] | Node[Any],
    image: Given[str] | None = None,
    files: Sequence[Given[str]] | Node[Any] = (),
    *,
    stdin: Given[str] | None = None,
    env: Mapping[str, Given[str]] | None = None,
    timeout_s: float | None = None,
    network: NetworkPolicy | None = None,
    cache: bool = False,
    name: str | None = None,
) -> Operation[CommandResult]:
    """Run a command, or a sequence of commands, in a sandbox, and again when an input changes.

    Each is a line for the shell. A sequence runs in one sandbox and stops at the first that fails; an exit code other
    than 0 is a result, not an error. Each run has a sandbox of its own, from a warm pool if there is one
    (`Engine.warm`), which is destroyed when it has ended; after a second run, the next one's is prepared ahead.
    Afterwards `files` are read, where they exist. `stdin` is for the last command. `image` unset: the engine's default;
    `network` unset: the graph's. While it runs, `output` is what was printed so far.

    A newer input kills the command with all that it started before another run begins. With `cache`, a result with exit
    code 0 is kept in the state directory, and used in place of a run with the same commands, image digest and other
    inputs, by every process of this machine.

    Raises, as the `error` of the node:
        ExecTimeout: a command did not end within `timeout_s`.
        InvalidRequest: an input is wrong, or a file is too large to be returned.
        AtollError: the sandbox could not be created, or failed.
    """
    graph = current_graph()
    runner = _CommandRunner(graph, timeout_s, network or graph.network, cache=cache)
    return _command(graph, runner, command, image, files, stdin, env, name=name)


def _command(
    graph: Graph,
    runner: _CommandRunner,
    command: Any,
    image: Any = None,
    files: Any = (),
    stdin: Any = None,
    env: Mapping[str, Any] | None = None,
    sandbox: Callable[[], Sandbox] | None = None,
    *,
    name: str | None = None,
) -> Operation[CommandResult]:
    def collect() -> CommandInputs:
        given = value_of(command)
        commands = tuple(given) if isinstance(given, list) else (given,)
        if not commands or not all(isinstance(line, str) for line in commands):
            raise InvalidRequest("exec needs a command, or a list of commands, each a line for the shell")
        return CommandInputs(
            commands=commands,
            image=value_of(image),
            files=_paths(value_of(files)),
            stdin=value_of(stdin),
            env={key: value_of(value) for key, value in (env or {}).items()},
            sandbox=None if sandbox is None else sandbox(),
        )

    return Operation(graph, runner.run, collect, kind="exec", name=name, once=graph.in_handler())


def command_in(
    graph: Graph,
    sandbox: Callable[[], Sandbox],
    command: Any,
    files: Any,
    *,
    stdin: Any = None,
    env: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    name: str | None = None,
) -> Operation[CommandResult]:
    """`exec`, in a sandbox that lasts."""
    runner = _CommandRunner(graph, timeout_s, None, cache=False)
    return _command(graph, runner, command, None, files, stdin, env, sandbox, name=name)


def _paths(files: Any) -> tuple[str, ...]:
    if isinstance(files, str) or not all(isinstance(path, str) and path for path in files):
        raise InvalidRequest("files is a list of paths in the sandbox")
    if len(files) > MAX_FILES:
        raise InvalidRequest(f"files has {len(files)} paths; it may have {MAX_FILES}")
    return tuple(files)


class _CommandRunner:
    """Runs the commands of one `exec` node."""

    def __init__(self, graph: Graph, timeout_s: float | None, network: NetworkPolicy | None, *, cache: bool) -> None:
        self._graph = graph
        self._timeout_s = timeout_s
        self._network = network
        self._cache = ResultCache(graph.engine.state_dir / CACHE_DIRECTORY) if cache else None

    async def run(self, given: CommandInputs, operation: Operation[CommandResult]) -> CommandResult:
        if given.sandbox is not None:
            return await self._run_in(given.sandbox, given, operation)
        key = None
        if self._cache is not None:
            key = await self._key(given)
            if (kept := self._cache.get(key, CommandResult)) is not None:
                return kept
        prepared, kind = PreparedSandboxes.of(self._graph), SandboxKind(given.image, self._network)
        box = await prepared.take(kind)
        try:
            result = await self._run_in(box, given, operation)
        finally:
            # What ran in it has ended. The next run need not wait until its files are removed.
            self._graph.in_background(box.destroy)
            if operation.runs > 1:
                prepared.prepare(kind)
        if key is not None and self._cache is not None and result.exit_code == 0:
            self._cache.put(key, result)
        return result

    async def _key(self, given: CommandInputs) -> str:
        engine = self._graph.engine
        image = await engine.images.resolve(given.image or engine.default_image)
        allowed = list(self._network.allow) if self._network is not None else None
        return cache_key(given.commands, image.digest, given.files, given.stdin, dict(given.env), allowed)

    async def _run_in(self, box: Sandbox, given: CommandInputs, operation: Operation[CommandResult]) -> CommandResult:
        shown = ""

        def show(text: str) -> None:
            nonlocal shown
            shown = (shown + text)[-_SHOWN_CHARS:]
            operation.show_output(shown)

        results: list[ExecResult] = []
        for command in given.commands:
            result = await box.exec(
                command,
                stdin=given.stdin if len(results) + 1 == len(given.commands) else None,
                env=given.env,
                timeout_s=self._timeout_s,
                on_stdout=show,
                on_stderr=show,
            )
            results.append(result)
            if not result.ok:
                break
        encoded = {}
        for path in given.files:
            try:
                content = await box.files.read_bytes(path, limit=MAX_FILE_BYTES + 1)
            except PathNotFound:
                continue
            if len(content) > MAX_FILE_BYTES:
                raise InvalidRequest(f"{path} is larger than {MAX_FILE_BYTES} bytes, and cannot be returned")
            encoded[path] = base64.b64encode(content).decode()
        last = results[-1].model_dump()
        last["stdout"] = "".join(result.stdout for result in results)
        last["stderr"] = "".join(result.stderr for result in results)
        last["duration_s"] = sum(result.duration_s for result in results)
        return CommandResult(**last, encoded_files=encoded)


class _FetchInputs(NamedTuple):
    url: str
    mode: str


def fetch_data(
    url: Given[str],
    mode: Literal["text", "json"] | Node[str] = "text",
    *,
    network: NetworkPolicy | None = None,
    limit_bytes: int = MAX_BODY_BYTES,
    timeout_s: float = TIMEOUT_S,
    name: str | None = None,
) -> Operation[Any]:
    """The content at a URL, as text or as what its JSON says, and again when an input changes.

    `network` says what may be connected to, as for a sandbox: names, addresses and ports; private addresses only by a
    rule for them. Unset: the graph's; without one, nothing. Redirects are followed where it allows them.

    Raises, as the `error` of the node:
        InvalidRequest: it is not an http or https URL, or the mode is unknown.
        FetchFailed: it is not allowed, or failed, or is larger than `limit_bytes`, or took longer than `timeout_s`.
    """
    graph = current_graph()
    policy = network or graph.network

    def collect() -> _FetchInputs:
        given = _FetchInputs(value_of(url), value_of(mode))
        if given.mode not in ("text", "json"):
            raise InvalidRequest(f"the mode of fetch_data is {given.mode!r}; it may be 'text' or 'json'")
        if not isinstance(given.url, str):
            raise InvalidRequest(f"the URL of fetch_data is {given.url!r}; it has to be text")
        return given

    async def run(given: _FetchInputs, _operation: Operation[Any]) -> Any:
        fetched = await PolicyFetcher(policy, connector=graph.connector).fetch(
            given.url, limit_bytes=limit_bytes, timeout_s=timeout_s
        )
        return fetched.json() if given.mode == "json" else fetched.text()

    return Operation(graph, run, collect, kind="fetch_data", name=name, once=graph.in_handler())


class _TextInputs(NamedTuple):
    prompt: str
    tools: ToolSet | None
    model: Any
    instructions: str


def generate_text(
    prompt: Given[str],
    tools: Given[ToolSet] | None = None,
    model: Given[str] | Model | None = None,
    *,
    instructions: Given[str] = "",
    steps: int | None = None,
    name: str | None = None,
) -> Operation[str]:
    """The final text of a model that may call `tools`, and again when an input changes.

    `model` unset: that of the settings. While it runs, `output` is the text so far. A newer input ends the run, and the
    commands that its tools run.

    Raises, as the `error` of the node:
        what `Agent` and `Agent.run` raise.
    """
    graph = current_graph()

    def collect() -> _TextInputs:
        return _TextInputs(value_of(prompt), value_of(tools), value_of(model), value_of(instructions))

    async def run(given: _TextInputs, operation: Operation[str]) -> str:
        return await _generate(given, steps, operation.show_output)

    return Operation(graph, run, collect, kind="generate_text", name=name, once=graph.in_handler())


async def _generate(given: _TextInputs, steps: int | None, show: Callable[[str], None]) -> str:
    try:
        from atoll.agents.events import RetryEvent, TextEvent, ToolCallEvent
        from atoll.agents.loop import DEFAULT_STEPS, Agent
    except ModuleNotFoundError as error:
        raise CallerError(f"generate_text needs {error.name}; {install_extra('agents')}") from error
    from atoll.settings import Settings

    chosen = Settings.from_environment().model if given.model is None else given.model
    agent = Agent(chosen, given.tools, given.instructions, steps=DEFAULT_STEPS if steps is None else steps)
    shown = ""
    async with agent.stream(given.prompt) as stream:
        async for event in stream:
            if isinstance(event, TextEvent):
                shown += event.text
            elif isinstance(event, ToolCallEvent):
                shown += f"\n[{event.tool}]\n"
            elif isinstance(event, RetryEvent):
                shown = ""
            show(shown[-_SHOWN_CHARS:])
    return stream.answer.text
