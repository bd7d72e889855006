"""Sandboxes in a graph that last: `sandbox`, and files of sandboxes that are read and written reactively.

Owns how such a sandbox is made, moved to another image, and destroyed with its graph. Not here: commands with a
sandbox of their own (`builtins.py`). Used by programs.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import anyio

from atoll.contract.errors import InvalidRequest, SandboxError
from atoll.contract.network import NetworkPolicy
from atoll.reactive.builtins import CommandResult, Given, command_in
from atoll.reactive.graph import Graph, computed, current_graph, value_of
from atoll.reactive.nodes import Computed, Node
from atoll.reactive.operations import Operation
from atoll.reactive.prepared import PreparedSandboxes, SandboxKind
from atoll.runtime.sandbox import Sandbox
from atoll.tools.tool import ToolSet

MAX_READ_BYTES = 16 * 1024 * 1024
"""Of a file that `read_sandbox_file` reads."""

ReadMode = Literal["text", "json", "bytes"]
HandleStatus = Literal["starting", "running", "sleeping", "failed", "destroyed"]


class SandboxHandle:
    """A sandbox that lasts as long as its graph. Get one from `sandbox`.

    It is not a node, but has one: `pending`, `result`, `error` and `await` are those of making the sandbox. What its
    methods return are nodes: they run again when an input changes, and when the sandbox moves.
    """

    def __init__(self, graph: Graph, image: Given[str] | None, network: NetworkPolicy | None, name: str | None) -> None:
        self._graph = graph
        self._network = network
        self._box: Sandbox | None = None
        self.node: Operation[Sandbox] = Operation(
            graph, self._move, lambda: value_of(image), kind="sandbox", name=name, release=self._destroy
        )
        self._tools: Computed[ToolSet] | None = None

    def __repr__(self) -> str:
        return f"<sandbox {self.node.name}: {self.status}>"

    @property
    def pending(self) -> bool:
        return self.node.pending

    @property
    def result(self) -> Sandbox:
        """As `Node.result`: the sandbox itself."""
        return self.node.get()

    @property
    def error(self) -> Exception | None:
        return self.node.error

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self.node.__await__()

    @property
    def name(self) -> str:
        """The name of the sandbox. It is another after a move. Who reads it before it is there waits with it."""
        return self.node.get().name

    @property
    def status(self) -> HandleStatus:
        """What is known of it here: `sleeping` when it was put to sleep and has not been used since."""
        if self.node.disposed:
            return "destroyed"
        pending, _, error, _ = self.node.state
        if pending:
            return "starting"
        if error is not None or self._box is None:
            return "failed"
        return "running" if self._box.info.status == "running" else "sleeping"

    def exec(
        self,
        command: Given[str] | Sequence[Given[str]] | Node[Any],
        files: Sequence[Given[str]] | Node[Any] = (),
        *,
        stdin: Given[str] | None = None,
        env: Mapping[str, Given[str]] | None = None,
        timeout_s: float | None = None,
        name: str | None = None,
    ) -> Operation[CommandResult]:
        """As `reactive.exec`, in this sandbox. In a handler it runs once."""
        return command_in(
            self._graph, self.node.get, command, files, stdin=stdin, env=env, timeout_s=timeout_s, name=name
        )

    def read_file(
        self, path: Given[str], mode: ReadMode | Node[str] = "text", *, name: str | None = None
    ) -> Operation[Any]:
        """As `read_sandbox_file`, in this sandbox."""
        return _read_node(self._graph, self, path, mode, name)

    def write_file(
        self, path: Given[str], content: str | bytes | Node[Any], *, name: str | None = None
    ) -> Operation[dict[str, bool]]:
        """As `write_sandbox_file`, in this sandbox."""
        return _write_node(self._graph, self, path, content, name)

    def tools(self) -> Computed[ToolSet]:
        """The agent's tools bound to this sandbox (`shell`, `read_file`, `write_file`, `glob`, `browse`), for
        `generate_text`."""
        if self._tools is None:
            self._tools = computed(lambda: self.node.get().tools(), name=f"{self.node.name}.tools")
        return self._tools

    def dispose(self) -> None:
        """Take it out of the graph, and destroy it. What runs in it ends."""
        self.node.dispose()

    # -------------------------------------------------------------------------------------------------- its sandbox

    async def _move(self, image: str | None, _operation: Operation[Sandbox]) -> Sandbox:
        """A sandbox with this image. The files of an earlier one's home come with it; when this fails, that one stays.

        Raises:
            What `Engine.create` raises, and what copying raises.
        """
        engine = self._graph.engine
        before = self._box
        if before is not None and before.info.image == (image or engine.default_image):
            return before
        box = await PreparedSandboxes.of(self._graph).take(SandboxKind(image, self._network))
        try:
            if before is not None:
                await _copy_home(before, box)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await box.destroy()
            raise
        self._box = box
        if before is not None:
            self._graph.in_background(before.destroy)
        return box

    async def _destroy(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.destroy()


async def _copy_home(source: Sandbox, target: Sandbox) -> None:
    """Copy what is in the directory where commands start. A sandbox that has died has nothing to copy."""
    try:
        await source.connect()
    except SandboxError:
        return
    await target.files.tar_in(".", source.files.tar_out(".", inside=True))


def sandbox(
    image: Given[str] | None = None, *, network: NetworkPolicy | None = None, name: str | None = None
) -> SandboxHandle:
    """A sandbox that lasts as long as the graph, for many commands.

    When `image` changes it moves: another sandbox is made with that image, gets the files of the directory where
    commands start, and takes its place. `image` unset: the engine's default; `network` unset: the graph's. `name` is
    that of its node.
    """
    graph = current_graph()
    return SandboxHandle(graph, image, network or graph.network, name)


# ---------------------------------------------------------------------------------------------------------------- files


class _ReadInputs(NamedTuple):
    sandbox: Sandbox | str
    path: str
    mode: str


class _WriteInputs(NamedTuple):
    sandbox: Sandbox | str
    path: str
    content: Any


def read_sandbox_file(
    sandbox: Given[str] | SandboxHandle,
    path: Given[str],
    mode: ReadMode | Node[str] = "text",
    *,
    name: str | None = None,
) -> Operation[Any]:
    """A file of a sandbox as text, as what its JSON says, or as bytes; again when an input changes, or by `rerun`.

    `sandbox` is a name, or what `reactive.sandbox` gives.

    Raises, as the `error` of the node:
        SandboxNotFound, PathNotFound, FileError: there is no such sandbox or file, or it cannot be read.
        InvalidRequest: it is not text or not JSON, or is larger than `MAX_READ_BYTES`.
    """
    return _read_node(current_graph(), sandbox, path, mode, name)


def write_sandbox_file(
    sandbox: Given[str] | SandboxHandle,
    path: Given[str],
    content: str | bytes | Node[Any],
    *,
    name: str | None = None,
) -> Operation[dict[str, bool]]:
    """Write a file of a sandbox, and again when an input changes. Its directory is made if it is missing.

    The result is `{"ok": True}`. `sandbox` is a name, or what `reactive.sandbox` gives.

    Raises, as the `error` of the node:
        SandboxNotFound, FileError: there is no such sandbox, or the file cannot be written.
    """
    return _write_node(current_graph(), sandbox, path, content, name)


def _read_node(
    graph: Graph, sandbox: Given[str] | SandboxHandle, path: Given[str], mode: ReadMode | Node[str], name: str | None
) -> Operation[Any]:
    def collect() -> _ReadInputs:
        given = _ReadInputs(_sandbox_of(sandbox), value_of(path), value_of(mode))
        if given.mode not in ("text", "json", "bytes"):
            raise InvalidRequest(
                f"the mode of read_sandbox_file is {given.mode!r}; it may be 'text', 'json' or 'bytes'"
            )
        return given

    async def run(given: _ReadInputs, _operation: Operation[Any]) -> Any:
        box = await _opened(graph, given.sandbox)
        content = await box.files.read_bytes(given.path, limit=MAX_READ_BYTES + 1)
        if len(content) > MAX_READ_BYTES:
            raise InvalidRequest(f"{given.path} is larger than {MAX_READ_BYTES} bytes")
        if given.mode == "bytes":
            return content
        try:
            text = content.decode()
            return json.loads(text) if given.mode == "json" else text
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{given.path} is not {given.mode}: {error}") from None

    return Operation(graph, run, collect, kind="read_sandbox_file", name=name, once=graph.in_handler())


def _write_node(
    graph: Graph,
    sandbox: Given[str] | SandboxHandle,
    path: Given[str],
    content: str | bytes | Node[Any],
    name: str | None,
) -> Operation[dict[str, bool]]:
    def collect() -> _WriteInputs:
        given = _WriteInputs(_sandbox_of(sandbox), value_of(path), value_of(content))
        if not isinstance(given.content, str | bytes):
            raise InvalidRequest(f"the content of {path} is {given.content!r:.40}, which is neither text nor bytes")
        return given

    async def run(given: _WriteInputs, _operation: Operation[Any]) -> dict[str, bool]:
        box = await _opened(graph, given.sandbox)
        data = given.content.encode() if isinstance(given.content, str) else given.content
        await box.files.write_bytes(given.path, data, parents=True)
        return {"ok": True}

    return Operation(graph, run, collect, kind="write_sandbox_file", name=name, once=graph.in_handler())


def _sandbox_of(sandbox: Given[str] | SandboxHandle) -> Sandbox | str:
    if isinstance(sandbox, SandboxHandle):
        return sandbox.node.get()
    return str(value_of(sandbox))


async def _opened(graph: Graph, sandbox: Sandbox | str) -> Sandbox:
    return await graph.engine.get(sandbox) if isinstance(sandbox, str) else sandbox
