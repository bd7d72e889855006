"""The agent's vocabulary: eight tools over the named sandboxes of a session, or five bound to one sandbox.

Knows what each of them does with a `SandboxPool` or a `Sandbox`. Refuses to know how they are called and by whom.

With a pool, `default` comes to life when it is first used. So does any other name that something is done to with
`shell`, `write_file` or `transfer`; what only looks at a sandbox that nobody has made says so instead.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import AsyncIterator, Hashable
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field, create_model

from atoll.contract.errors import (
    AtollError,
    InvalidRequest,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    PortRefused,
    SandboxAsleep,
    SandboxDied,
    SandboxExists,
)
from atoll.contract.model import FileStat
from atoll.runtime.images.reference import ImageReference
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.sandbox_pool import DEFAULT, SandboxPool
from atoll.tools.tool import Context, Hints, Input, Link, Result, Tool, ToolResult, ToolSet
from atoll.tools.view import (
    HOME,
    OUTPUT_LIMIT_BYTES,
    SEARCH_S,
    Session,
    View,
    as_text,
    media_type,
    run,
    searching,
    whole,
)

READ_BYTES = 256 * 1024
READ_LIMIT_BYTES = 4 * 1024 * 1024
GLOB_LIMIT = 2000
TRANSFER_LIMIT_BYTES = 16 * 1024**3
LISTEN_WAIT_S = 10.0
_SLEEPING = frozenset({"paused", "sleeping", "shutdown"})


# ---------------------------------------------------------------------------------------------------------- contexts


class Place(Context, Protocol):
    """Where the tools work."""

    async def view(self, ask: Input, *, make: bool = False) -> View:
        """The sandbox that a call is about; with `make`, made if it is not there."""

    def name(self, ask: Input) -> str:
        """What the model calls it."""


class SandboxContext:
    """A sandbox: no tool has to say which."""

    abilities = frozenset({"sandbox"})

    def __init__(self, sandbox: Sandbox) -> None:
        self._view = View(sandbox)

    async def view(self, ask: Input, *, make: bool = False) -> View:  # noqa: ARG002 - as with a pool
        return self._view

    def name(self, ask: Input) -> str:  # noqa: ARG002 - as with a pool
        return self._view.sandbox.name

    def explain(self, error: AtollError) -> str:
        return error.message


class Named(Session):
    """A pool: tools name the sandboxes of its session."""

    async def view(self, ask: Input, *, make: bool = False) -> View:
        return await self.at(self.name(ask), make=make)

    async def at(self, name: str, *, make: bool = False) -> View:
        """The sandbox of this name; with `make`, made if it is not there, as `default` is in any case."""
        return View(await (self.pool.get(name) if make or name == DEFAULT else self.pool.find(name)))

    def name(self, ask: Input) -> str:
        return str(getattr(ask, "sandbox", DEFAULT))

    def explain(self, error: AtollError) -> str:
        message = super().explain(error)
        if isinstance(error, SandboxDied | SandboxAsleep):
            message += ". If it does not come back by itself, sandbox_create with its name starts it with its files"
        return message


# ------------------------------------------------------------------------------------------------------------- inputs


def _check_sleep(sleep_after_ms: float) -> float:
    # A sandbox that sleeps at once ends what somebody is just beginning in it.
    if 0 < sleep_after_ms < 1000:
        raise ValueError("it should be 0 or at least 1000")
    return sleep_after_ms


class Shell(Input):
    command: str = Field(min_length=1)
    """A line for the shell."""
    timeout_ms: float = Field(default=30000, gt=0, le=3_600_000)
    """When it is killed, with all that it started."""
    working_dir: str = HOME
    """Where it runs."""


class ShellResult(Result):
    stdout: str
    stderr: str
    exit_code: int
    """124: it ran into its time limit."""


class ReadFile(Input):
    path: str = Field(min_length=1)
    """Relative paths begin at /home/user."""
    offset: int = Field(default=0, ge=0, le=2**62)
    """Byte offset to begin at."""
    limit: int = Field(default=READ_BYTES, ge=1, le=READ_LIMIT_BYTES)
    """Most bytes to read."""


class ReadFileResult(Result):
    content: str
    """Empty for a file that is no text."""
    size: int
    """Bytes of the whole file."""
    next_offset: int | None = None
    """Where to go on. Unset: the end was reached."""
    binary: str | None = None
    """The type of a file that is no text. Unset: it is text."""


class WriteFile(Input):
    path: str = Field(min_length=1)
    """Relative paths begin at /home/user. Missing directories are made."""
    content: str
    append: bool = False
    """Add to the end of the file instead of replacing it."""


class WriteFileResult(Result):
    ok: Literal[True] = True
    size: int
    """Bytes of the file now."""


class Glob(Input):
    pattern: str = Field(min_length=1)
    """`*`, `?` and `[…]` within a name, `**` for any number of directories, `{a,b}` for either."""
    cwd: str = HOME
    """Where to look; the files are named relative to it."""


class GlobResult(Result):
    files: list[str]
    truncated: bool | None = None
    """True: there may be more. Unset: these are all."""


class Browse(Input):
    port: int = Field(ge=1, le=65535)
    """The port that the server listens on."""


class BrowseResult(Result):
    url: str


class SandboxCreate(Input):
    sandbox: str = Field(min_length=1)
    """Its name: lower-case letters, digits, '-', '_' and '.', at most 30."""
    image: str = Field(default="host", min_length=1)
    """What it is made from: 'host', or an image of a registry, such as 'python:3.12'."""
    sleep_after_ms: Annotated[float, AfterValidator(_check_sleep)] = Field(default=600_000, ge=0, le=1e10)
    """How long it may be unused before it sleeps, at least 1000; 0 is for ever. Using it wakes it."""


class SandboxCreateResult(Result):
    sandbox: str
    created: bool
    """False: it was there already."""


class SandboxList(Input):
    pass


class ListedSandbox(Result):
    name: str
    image: str
    status: Literal["running", "sleeping", "provisioning", "error"]


class SandboxListResult(Result):
    sandboxes: list[ListedSandbox]


class Transfer(Input):
    from_sandbox: str = Field(min_length=1)
    from_path: str = Field(min_length=1)
    to_sandbox: str = Field(min_length=1)
    to_path: str = Field(min_length=1)
    """What the copy is called. A file goes into a directory that is there under its own name; a directory is merged
    with one that is there."""
    recursive: bool = False
    """Needed for a directory."""


class TransferResult(Result):
    ok: Literal[True] = True
    bytes: int
    """Of files."""


# ----------------------------------------------------------------------------------------------------------- handlers


async def _shell(ask: Shell, place: Place) -> ShellResult:
    view = await place.view(ask, make=True)
    cwd = view.path(ask.working_dir)
    async with view.suggesting(cwd):
        ran = await run(view.sandbox, ask.command, cwd=cwd, timeout_s=ask.timeout_ms / 1000)
    return ShellResult(stdout=ran.stdout, stderr=ran.stderr, exit_code=ran.exit_code)


async def _read_file(ask: ReadFile, place: Place) -> ReadFileResult:
    view = await place.view(ask)
    path = view.path(ask.path)
    async with view.suggesting(path):
        data = await view.sandbox.files.read_bytes(path, offset=ask.offset, limit=ask.limit)
        end = ask.offset + len(data)
        # Fewer bytes than there might have been were the last ones.
        size = end if data and len(data) < ask.limit else (await view.sandbox.files.stat(path)).size
    content = as_text(data, head=ask.offset == 0, tail=end >= size)
    if content is None:
        return ReadFileResult(content="", size=size, binary=media_type(data if ask.offset == 0 else b"", path))
    next_offset = None
    if end < size:
        next_offset = ask.offset + len(whole(data, tail=False))
        if next_offset == ask.offset:
            raise InvalidRequest(
                f"limit is {ask.limit}, and the character at {ask.offset} is longer; read at least 4 bytes"
            )
    return ReadFileResult(content=content, size=size, next_offset=next_offset)


async def _write_file(ask: WriteFile, place: Place) -> WriteFileResult:
    view = await place.view(ask, make=True)
    return WriteFileResult(
        size=await view.sandbox.files.write_text(view.path(ask.path), ask.content, append=ask.append)
    )


async def _glob(ask: Glob, place: Place) -> GlobResult:
    view = await place.view(ask)
    cwd = view.path(ask.cwd)
    async with view.suggesting(cwd):
        with searching():
            found = await view.sandbox.files.glob(ask.pattern, cwd=cwd, limit=GLOB_LIMIT)
    return GlobResult(files=[entry.name for entry in found], truncated=len(found) == GLOB_LIMIT or None)


async def _browse(ask: Browse, place: Place) -> ToolResult:
    view = await place.view(ask)
    try:
        preview = await view.sandbox.expose(ask.port, wait_s=LISTEN_WAIT_S)
    except PortRefused:
        raise PortRefused(
            f"nothing listens on port {ask.port} in the sandbox, and nothing began to within {LISTEN_WAIT_S:g} s; "
            "start the server in the background, on 127.0.0.1 or all addresses, and ask again"
        ) from None
    link = Link(url=preview.url, name=f"port {ask.port} of {place.name(ask)}")
    return BrowseResult(url=preview.url).result().model_copy(update={"links": (link,)})


async def _sandbox_create(ask: SandboxCreate, session: Named) -> SandboxCreateResult:
    _check_image(ask.image, session.pool.image)
    created = True
    try:
        await session.pool.create(ask.sandbox, image=ask.image)
    except SandboxExists:
        created = False
        found = await session.pool.find(ask.sandbox)
        if "image" in ask.model_fields_set and not _is_same(found.info.image, ask.image):
            raise InvalidRequest(
                f"the sandbox {ask.sandbox!r} is there already, and made from {found.info.image!r}, not from "
                f"{ask.image!r}; use it as it is, or make one with another name"
            ) from None
        statuses = {each.id: each.status for each in await session.pool.list()}
        if statuses.get(found.id) in {"error", "shutdown"}:  # using it does not wake it
            await found.wake()
    if created or "sleep_after_ms" in ask.model_fields_set:
        session.pool.sleep_after(ask.sandbox, ask.sleep_after_ms / 1000 or None)
    return SandboxCreateResult(sandbox=ask.sandbox, created=created)


def _check_image(image: str, own: str) -> None:
    """A model may name what is in a registry. Which paths and neighbours of this machine are used, is not its choice.

    Raises:
        InvalidRequest: it names one of those.
    """
    if image == own:
        return
    reference = ImageReference.parse(image)
    registry = reference.repository.partition("/")[0]
    address = re.fullmatch(r"localhost(:\d+)?|[0-9.]+(:\d+)?|\[.*", registry)
    if reference.is_local or address:
        raise InvalidRequest(
            f"the image {image!r} cannot be chosen from here: it names a path or an address of the machine that "
            f"sandboxes run on; allowed are {own!r}, 'host' and images of registries, such as 'python:3.12'"
        )


def _is_same(image: str, other: str) -> bool:
    return ImageReference.parse(image) == ImageReference.parse(other)


async def _sandbox_list(_ask: SandboxList, session: Named) -> SandboxListResult:
    return SandboxListResult(
        sandboxes=[
            ListedSandbox(
                name=each.name,
                image=each.image,
                status="sleeping" if each.status in _SLEEPING else each.status,  # type: ignore[arg-type]
            )
            for each in await session.pool.list()
        ]
    )


async def _transfer(ask: Transfer, session: Named) -> TransferResult:
    source = await session.at(ask.from_sandbox)
    path, target = source.path(ask.from_path), source.path(ask.to_path)
    async with source.suggesting(path):
        status = await source.sandbox.files.stat(path)
    if status.kind not in {"file", "directory"}:
        raise InvalidRequest(f"{ask.from_path}: a {status.kind}; files and directories can be copied")
    if status.kind == "directory" and not ask.recursive:
        raise PathIsDirectory(f"{ask.from_path}: a directory; set recursive to true to copy it", number=21)
    view = await session.at(ask.to_sandbox, make=True)
    if status.kind == "directory":
        if source.sandbox.id == view.sandbox.id and _is_below(target, path):
            raise InvalidRequest(f"{ask.to_path}: inside of {ask.from_path}; a directory cannot be copied into itself")
        return TransferResult(bytes=await _copy_tree(source, path, view, target))
    return TransferResult(bytes=await _copy_file(source, path, status, view, target))


async def _copy_tree(source: View, path: str, view: View, target: str) -> int:
    # The archive goes from guest to guest as it is made. The one that unpacks it writes nothing outside of `target`.
    async with aclosing(source.sandbox.files.tar_out(path, inside=True)) as archive:
        return await view.sandbox.files.tar_in(target, _bounded(archive))


async def _copy_file(source: View, path: str, status: FileStat, view: View, target: str) -> int:
    into = target.endswith("/")
    with contextlib.suppress(PathNotFound, PathNotDirectory):
        into = (await view.sandbox.files.stat(target)).kind == "directory"
    if into:
        target = posixpath.join(target, posixpath.basename(posixpath.normpath(path)))
    if (source.sandbox.id, posixpath.normpath(path)) == (view.sandbox.id, posixpath.normpath(target)):
        raise InvalidRequest(f"{path}: from and to are the same file")
    async with aclosing(source.sandbox.files.stream(path)) as pieces:
        return await view.sandbox.files.write_bytes(target, _bounded(pieces), mode=status.mode & 0o777)


async def _bounded(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, up to what one transfer may be: a sandbox has files as large as it likes."""
    total = 0
    async for piece in pieces:
        total += len(piece)
        if total > TRANSFER_LIMIT_BYTES:
            raise InvalidRequest(f"more than {TRANSFER_LIMIT_BYTES} bytes; copy it in parts")
        yield piece


def _is_below(path: str, directory: str) -> bool:
    path, directory = posixpath.normpath(path), posixpath.normpath(directory)
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _file(ask: ReadFile | WriteFile, place: Place) -> Hashable:
    return place.name(ask), posixpath.normpath(posixpath.join(HOME, ask.path))


def _target(ask: Transfer, _place: Place) -> Hashable:
    return ask.to_sandbox, posixpath.normpath(posixpath.join(HOME, ask.to_path))


# --------------------------------------------------------------------------------------------------------- vocabulary


_POOL = frozenset({"pool"})
_LOOKS = Hints(read_only=True, idempotent=True)

SHELL = Tool(
    "shell",
    f"Run a shell command and wait for its end. Gives stdout, stderr (up to {OUTPUT_LIMIT_BYTES // 1024} KiB of each, "
    "head and tail) and the exit code. What it leaves running in the background stays.",
    Shell,
    ShellResult,
    _shell,
    hints=Hints(destructive=True, open_world=True),
    vocabulary="agent",
)
READ_FILE = Tool(
    "read_file",
    f"Read a text file, {READ_BYTES // 1024} KiB unless limit says otherwise, {READ_LIMIT_BYTES >> 20} MiB at most; "
    "next_offset says where to go on. Of a file that is no text you get its size and type.",
    ReadFile,
    ReadFileResult,
    _read_file,
    hints=_LOOKS,
    turn=_file,
    vocabulary="agent",
)
WRITE_FILE = Tool(
    "write_file",
    "Write a text file, whole or not at all, or append to one.",
    WriteFile,
    WriteFileResult,
    _write_file,
    hints=Hints(destructive=True),
    turn=_file,
    vocabulary="agent",
)
GLOB = Tool(
    "glob",
    f"Find files by pattern, {GLOB_LIMIT} at most. Names that begin with a dot need a pattern that does. "
    f"May take {SEARCH_S:g} s.",
    Glob,
    GlobResult,
    _glob,
    hints=_LOOKS,
    vocabulary="agent",
)
BROWSE = Tool(
    "browse",
    "Get a URL for a server that listens on a port in the sandbox. Whoever has the URL can use it. Waits up to "
    f"{LISTEN_WAIT_S:g} s for the server.",
    Browse,
    BrowseResult,
    _browse,
    hints=Hints(idempotent=True, open_world=True),
    vocabulary="agent",
)
TRANSFER = Tool(
    "transfer",
    "Copy a file, or with recursive a directory, from one sandbox to another. Keeps modes and symlinks; sockets, pipes "
    f"and devices are left out. {TRANSFER_LIMIT_BYTES >> 30} GiB at most.",
    Transfer,
    TransferResult,
    _transfer,
    needs=_POOL,
    hints=Hints(destructive=True, idempotent=True),
    turn=_target,
    vocabulary="agent",
)
SANDBOX_CREATE = Tool(
    "sandbox_create",
    "Make a named sandbox, with files and processes of its own. One that is there already stays as it is; one that has "
    "died is started again.",
    SandboxCreate,
    SandboxCreateResult,
    _sandbox_create,
    needs=_POOL,
    hints=Hints(idempotent=True),
    vocabulary="agent",
)
SANDBOX_LIST = Tool(
    "sandbox_list",
    "List the sandboxes of this session.",
    SandboxList,
    SandboxListResult,
    _sandbox_list,
    needs=_POOL,
    hints=_LOOKS,
    vocabulary="agent",
)


def _with(tool: Tool, **fields: Any) -> Tool:
    """The same tool, with more or other fields in its input."""
    model: type[Input] = create_model(tool.input.__name__, __base__=tool.input, **fields)
    return replace(tool, input=model)


_HERE = (SHELL, READ_FILE, WRITE_FILE, GLOB, BROWSE)
_WHICH = (str, Field(default=DEFAULT, min_length=1, description="Which sandbox."))
NAMING = tuple(_with(tool, sandbox=_WHICH) for tool in _HERE)


def sandbox_tools(sandbox: Sandbox) -> ToolSet:
    """`shell`, `read_file`, `write_file`, `glob` and `browse` for one sandbox, which none of them has to name."""
    return ToolSet(_HERE, SandboxContext(sandbox))


def pool_tools(pool: SandboxPool) -> ToolSet:
    """All eight tools for the sandboxes of a session. The defaults that the schemas show are the pool's own."""
    sleep_after_ms = 0 if pool.sleep_after_s is None else pool.sleep_after_s * 1000
    create = _with(
        SANDBOX_CREATE,
        image=_defaulting("image", pool.image),
        sleep_after_ms=_defaulting(
            "sleep_after_ms", int(sleep_after_ms) if sleep_after_ms % 1 == 0 else sleep_after_ms
        ),
    )
    return ToolSet((*NAMING, create, SANDBOX_LIST, TRANSFER), Named(pool))


def _defaulting(field: str, default: object) -> tuple[Any, Any]:
    about = copy(SandboxCreate.model_fields[field])
    about.default = default
    return about.annotation, about
