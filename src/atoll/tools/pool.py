"""The vocabulary `agent`: eight tools over the named sandboxes of a session, or five bound to one sandbox.

Their names, arguments, defaults and results (the data) are fixed: programs are written against them. More is in the
vocabulary `workspace` (`workspace.py`), which has these eight too.

Owns what each tool does with a `SandboxPool` or a `Sandbox`. Not here: paths, text and output (`view.py`), schemas and
calls (`tool.py`). Used by `SandboxPool.tools` and `Sandbox.tools`, and through `vocabularies.py` by the surfaces.

With a pool, the sandbox `default` is created when it is first used. `shell`, `write_file` and the target of `transfer`
create a sandbox of any other name too; tools that only read fail if the sandbox does not exist.
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
    SandboxDied,
    SandboxExists,
    SandboxShutdown,
)
from atoll.contract.model import FileStat
from atoll.runtime.images.reference import ImageReference
from atoll.runtime.sandbox import Sandbox
from atoll.runtime.sandbox_pool import DEFAULT, NAME_RULE, SandboxPool
from atoll.tools.image_files import binary_content, image_type
from atoll.tools.tool import Hints, Input, OnOutput, Result, ResultLink, Tool, ToolContext, ToolResult, ToolSet
from atoll.tools.view import (
    HOME,
    MAX_SEARCH_S,
    MAX_SHOWN_BYTES,
    SHELL_FACTS,
    PoolContext,
    View,
    as_text,
    complete_characters,
    last_name,
    media_type,
    run,
    searching,
    with_note,
)
from atoll.tools.vocabularies import Vocabulary

MAX_READ_BYTES = 256 * 1024
MAX_GLOB_FILES = 2000
DEFAULT_TIMEOUT_MS = 30_000
MAX_TRANSFER_BYTES = 16 * 1024**3
MAX_LISTEN_WAIT_S = 10.0
_SLEEPING = frozenset({"paused", "sleeping", "shutdown"})


# ---------------------------------------------------------------------------------------------------------- contexts


class ViewContext(ToolContext, Protocol):
    """A tool context that finds the sandbox of a call."""

    async def view(self, args: Input, *, make: bool = False) -> View:
        """The view of the sandbox that a call is about. With `make`, the sandbox is created if it does not exist."""

    def name(self, args: Input) -> str:
        """The name by which the model knows that sandbox."""


class SandboxContext:
    """One sandbox: the tools have no argument for its name."""

    abilities = frozenset({"sandbox"})

    def __init__(self, sandbox: Sandbox) -> None:
        self._view = View.whole(sandbox)

    async def view(self, args: Input, *, make: bool = False) -> View:  # noqa: ARG002 - as with a pool
        return self._view

    def name(self, args: Input) -> str:  # noqa: ARG002 - as with a pool
        return self._view.sandbox.name

    def explain(self, error: AtollError) -> str:
        return error.message


class SessionContext(PoolContext):
    """The sandboxes of a pool: tools name the one that they use."""

    async def view(self, args: Input, *, make: bool = False) -> View:
        return await self.at(self.name(args), make=make)

    async def at(self, name: str, *, make: bool = False) -> View:
        """The view of the sandbox of this name. With `make`, and always for `default`, it is created if it does not
        exist."""
        return View.whole(await (self.pool.get(name) if make or name == DEFAULT else self.pool.find(name)))

    def name(self, args: Input) -> str:
        return str(getattr(args, "sandbox", DEFAULT))

    def explain(self, error: AtollError) -> str:
        message = super().explain(error)
        if isinstance(error, SandboxDied | SandboxShutdown):
            message += ". If it does not restart by itself, sandbox_create with its name starts it with its files"
        return message


# ------------------------------------------------------------------------------------------------------------- inputs


def _check_sleep(sleep_after_ms: float) -> float:
    # A sandbox that sleeps at once would end the command that is just starting in it.
    if 0 < sleep_after_ms < 1000:
        raise ValueError("it should be 0 or at least 1000")
    return sleep_after_ms


class Shell(Input):
    command: str = Field(min_length=1)
    """A command line for the shell."""
    timeout_ms: float = Field(default=DEFAULT_TIMEOUT_MS, gt=0, le=3_600_000)
    """Milliseconds until it is killed, with all that it started. Raise it for installs, builds and tests, for instance
    to 600000."""
    working_dir: str = HOME
    """Where it runs; relative paths begin at the default. Unset, in an image with a working directory of its own:
    there."""


class ShellResult(Result):
    stdout: str
    stderr: str
    exit_code: int
    """124: it timed out."""


class ReadFile(Input):
    path: str = Field(min_length=1)
    """Relative paths begin where commands do."""
    offset: int = Field(default=0, ge=0, le=2**62)
    """Byte offset to begin at."""
    limit: int = Field(default=MAX_SHOWN_BYTES, ge=1, le=MAX_READ_BYTES)
    """How many bytes to read at most."""


class ReadFileResult(Result):
    content: str
    """Empty for a binary file."""
    size: int
    """Bytes of the whole file."""
    next_offset: int | None = None
    """Where to continue. Unset: the end was reached."""
    binary: str | None = None
    """The media type of a binary file. Unset: it is text."""


class WriteFile(Input):
    path: str = Field(min_length=1)
    """Relative paths begin where commands do. Missing directories are made."""
    content: str
    append: bool = False
    """Add to the end of the file instead of replacing it."""


class WriteFileResult(Result):
    ok: Literal[True] = True
    size: int
    """Bytes of the file now."""


class SandboxGlob(Input):
    pattern: str = Field(min_length=1)
    """`*`, `?` and `[…]` within a name, `**` for any number of directories, `{a,b}` for either."""
    cwd: str = HOME
    """The directory to look in; files are named relative to it. Unset: as for relative paths."""


class SandboxGlobResult(Result):
    files: list[str]
    truncated: bool | None = None
    """True: there may be more. Unset: these are all."""


class Browse(Input):
    port: int = Field(ge=1, le=65535)
    """The port that the server in the sandbox listens on, on 127.0.0.1 or all addresses."""


class BrowseResult(Result):
    url: str


class SandboxCreate(Input):
    sandbox: str = Field(min_length=1, description=f"Its name: {NAME_RULE}.")
    image: str = Field(default="host", min_length=1)
    """What it is made from: 'host', which has the programs of the machine that sandboxes run on, or an image of a
    registry, such as 'python:3.12' or 'node:22'."""
    sleep_after_ms: Annotated[float, AfterValidator(_check_sleep)] = Field(default=600_000, ge=0, le=1e10)
    """Milliseconds that it may be unused before it sleeps, at least 1000; 0 is for ever. Using it wakes it."""


class SandboxCreateResult(Result):
    sandbox: str
    created: bool
    """False: it existed already."""


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
    """Relative paths begin where commands do, here and in to_path."""
    to_sandbox: str = Field(min_length=1)
    """It is created if it does not exist."""
    to_path: str = Field(min_length=1)
    """The path of the copy. If a directory exists there, a file is copied into it under its own name, and a directory
    is merged with it."""
    recursive: bool = False
    """Needed for a directory."""


class TransferResult(Result):
    ok: Literal[True] = True
    bytes: int
    """Of files."""


# ----------------------------------------------------------------------------------------------------------- handlers


async def _shell(args: Shell, context: ViewContext, *, on_output: OnOutput | None) -> ToolResult:
    view = await context.view(args, make=True)
    cwd = view.path(args.working_dir if "working_dir" in args.model_fields_set else ".")
    async with view.suggesting(cwd):
        ran = await run(
            view.sandbox,
            args.command,
            cwd=cwd,
            timeout_s=args.timeout_ms / 1000,
            timeout_name="timeout_ms",
            user=getattr(args, "user", None) if "user" in args.model_fields_set else None,
            on_output=on_output,
        )
    data = ShellResult(stdout=ran.stdout, stderr=with_note(ran.stderr, ran.note), exit_code=ran.exit_code)
    return data.result(ran.text)


async def _read_file(args: ReadFile, context: ViewContext) -> ToolResult:
    view = await context.view(args)
    path = view.path(args.path)
    async with view.suggesting(path):
        data = await view.sandbox.files.read_bytes(path, offset=args.offset, limit=args.limit)
        end = args.offset + len(data)
        # A short read means the end of the file.
        size = end if data and len(data) < args.limit else (await view.sandbox.files.stat(path)).size
        content = as_text(data, head=args.offset == 0, tail=end >= size)
        if content is None:
            head = data if args.offset == 0 else b""
            kind = image_type(head) or media_type(head, path)
            shown = await binary_content(view, path, head, args.path)
            return ReadFileResult(content="", size=size, binary=kind).result(shown)
    next_offset = None
    if end < size:
        next_offset = args.offset + len(complete_characters(data, tail=False))
        if next_offset == args.offset:
            raise InvalidRequest(
                f"limit is {args.limit}, and the character at {args.offset} is longer; read at least 4 bytes"
            )
    note = "" if content else f"[nothing from byte {args.offset} on]" if args.offset else "[empty file]"
    if next_offset is not None:
        note = f"[stopped before byte {next_offset} of {size}; continue with offset {next_offset}]"
    data_result = ReadFileResult(content=content, size=size, next_offset=next_offset)
    return data_result.result(with_note(content, note))


async def _write_file(args: WriteFile, context: ViewContext) -> ToolResult:
    view = await context.view(args, make=True)
    size = await view.sandbox.files.write_text(view.path(args.path), args.content, append=args.append)
    did = "appended to" if args.append else "wrote"
    return WriteFileResult(size=size).result(f"{did} {args.path}, which has {size} bytes now")


async def _glob(args: SandboxGlob, context: ViewContext) -> ToolResult:
    view = await context.view(args)
    cwd = view.path(args.cwd if "cwd" in args.model_fields_set else ".")
    async with view.suggesting(cwd):
        with searching():
            found = await view.sandbox.files.glob(args.pattern, cwd=cwd, limit=MAX_GLOB_FILES)
    files, room = [], MAX_SHOWN_BYTES
    for entry in found:
        room -= len(entry.name.encode("utf-8", "surrogateescape")) + 1
        if room < 0:
            break
        files.append(entry.name)
    truncated = len(files) < len(found) or len(found) == MAX_GLOB_FILES
    note = f"[stopped after {len(files)} files; there may be more: narrow the pattern]" if truncated else ""
    text = with_note("\n".join(files), note) or "[no files]"
    return SandboxGlobResult(files=files, truncated=truncated or None).result(text)


async def _browse(args: Browse, context: ViewContext) -> ToolResult:
    view = await context.view(args)
    try:
        preview = await view.sandbox.expose(args.port, wait_s=MAX_LISTEN_WAIT_S)
    except PortRefused:
        raise PortRefused(
            f"no server listened on port {args.port} in the sandbox within {MAX_LISTEN_WAIT_S:g} s; start the server "
            "in the background, on 127.0.0.1 or all addresses, and call browse again"
        ) from None
    link = ResultLink(url=preview.url, name=f"port {args.port} of {context.name(args)}")
    text = f"{preview.url}\nGive this URL to the user, who can open it in a browser. You cannot: to see the page, run "
    text += f"curl http://127.0.0.1:{args.port}/ in the sandbox."
    if preview.path_url != preview.url:
        text += f" For programs of the user that cannot resolve names below .localhost: {preview.path_url}"
    return BrowseResult(url=preview.url).result(text, links=(link,))


async def _sandbox_create(args: SandboxCreate, context: SessionContext) -> ToolResult:
    _check_image(args.image, context.pool.image)
    created = True
    try:
        await context.pool.create(args.sandbox, image=args.image)
    except SandboxExists:
        created = False
        found = await context.pool.find(args.sandbox)
        if "image" in args.model_fields_set and not _is_same(found.info.image, args.image):
            raise InvalidRequest(
                f"the sandbox {args.sandbox!r} exists already, and was made from {found.info.image!r}, not from "
                f"{args.image!r}; use it as it is, or create one with another name"
            ) from None
        statuses = {each.id: each.status for each in await context.pool.list()}
        if statuses.get(found.id) in {"error", "shutdown"}:  # using it does not wake it
            await found.wake()
    if created or "sleep_after_ms" in args.model_fields_set:
        context.pool.sleep_after(args.sandbox, args.sleep_after_ms / 1000 or None)
    made = f"created the sandbox {args.sandbox!r}" if created else f"the sandbox {args.sandbox!r} existed already"
    return SandboxCreateResult(sandbox=args.sandbox, created=created).result(made)


def _check_image(image: str, own: str) -> None:
    """A model may choose images of registries. It may not choose paths of this machine or addresses in its network.

    Raises:
        InvalidRequest: the image is a path or has such an address.
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


async def _sandbox_list(_args: SandboxList, context: SessionContext) -> ToolResult:
    listed = [
        ListedSandbox(
            name=each.name,
            image=each.image,
            status="sleeping" if each.status in _SLEEPING else each.status,  # type: ignore[arg-type]
        )
        for each in await context.pool.list()
    ]
    text = "\n".join(f"{each.name}: {each.status}, image {each.image}" for each in listed)
    return SandboxListResult(sandboxes=listed).result(text or "[no sandboxes]")


async def _transfer(args: Transfer, context: SessionContext) -> ToolResult:
    source = await context.at(args.from_sandbox)
    path = source.path(args.from_path)
    source.path(args.to_path)  # what is wrong with it is said before a sandbox is made
    async with source.suggesting(path):
        status = await source.sandbox.files.stat(path)
    if status.kind not in {"file", "directory"}:
        raise InvalidRequest(f"{args.from_path}: a {status.kind}; only files and directories can be copied")
    if status.kind == "directory" and not args.recursive:
        raise PathIsDirectory(f"{args.from_path}: a directory; set recursive to true to copy it", number=21)
    view = await context.at(args.to_sandbox, make=True)
    target = view.path(args.to_path)
    if status.kind == "directory":
        if source.sandbox.id == view.sandbox.id and _is_below(target, path):
            raise InvalidRequest(
                f"{args.to_path}: inside of {args.from_path}; a directory cannot be copied into itself"
            )
        copied = await _copy_tree(source, path, view, target)
    else:
        copied = await _copy_file(source, path, status, view, target)
    return TransferResult(bytes=copied).result(f"copied {copied} bytes to {args.to_path} in {args.to_sandbox}")


async def _copy_tree(source: View, path: str, view: View, target: str) -> int:
    # The archive is streamed from guest to guest. The guest that unpacks it writes nothing outside of `target`.
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
    """Pass on at most `MAX_TRANSFER_BYTES`: files of a sandbox can have any size.

    Raises:
        InvalidRequest: there are more.
    """
    total = 0
    async for piece in pieces:
        total += len(piece)
        if total > MAX_TRANSFER_BYTES:
            raise InvalidRequest(f"the transfer has more than {MAX_TRANSFER_BYTES} bytes; copy it in parts")
        yield piece


def _is_below(path: str, directory: str) -> bool:
    path, directory = posixpath.normpath(path), posixpath.normpath(directory)
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _file_key(args: ReadFile | WriteFile, context: ViewContext) -> Hashable:
    return context.name(args), last_name(args.path)


def _target_key(args: Transfer, _context: ViewContext) -> Hashable:
    return args.to_sandbox, last_name(args.to_path)


# --------------------------------------------------------------------------------------------------------- vocabulary


_NEEDS_POOL = frozenset({"pool"})
_READ_ONLY = Hints(read_only=True, idempotent=True)

SHELL = Tool(
    "shell",
    "Run a command in a shell of the sandbox (bash, or sh where there is none), as its user, who is not root unless "
    "the operator chose so, and wait for its end. "
    + SHELL_FACTS.format(timeout="timeout_ms", seconds=f"{DEFAULT_TIMEOUT_MS // 1000} s"),
    Shell,
    ShellResult,
    _shell,
    hints=Hints(destructive=True, open_world=True),
    streams_output=True,
    title="Run command",
    vocabulary="agent",
)
READ_FILE = Tool(
    "read_file",
    f"Read a text file, {MAX_SHOWN_BYTES // 1000} KB unless limit says otherwise, {MAX_READ_BYTES // 1024} KiB at "
    "most, and learn where to continue; or see an image (PNG, JPEG, GIF, WebP). Of another binary file you get its "
    "size and type.",
    ReadFile,
    ReadFileResult,
    _read_file,
    hints=_READ_ONLY,
    serialize_by=_file_key,
    title="Read file",
    vocabulary="agent",
)
WRITE_FILE = Tool(
    "write_file",
    "Write a text file, whole or not at all, or append to one.",
    WriteFile,
    WriteFileResult,
    _write_file,
    hints=Hints(destructive=True),
    serialize_by=_file_key,
    title="Write file",
    vocabulary="agent",
)
GLOB = Tool(
    "glob",
    f"Find files by a pattern of their names, {MAX_GLOB_FILES} at most. Names that begin with a dot match only "
    f"patterns that do. May take {MAX_SEARCH_S:g} s.",
    SandboxGlob,
    SandboxGlobResult,
    _glob,
    hints=_READ_ONLY,
    title="Find files",
    vocabulary="agent",
)
BROWSE = Tool(
    "browse",
    "Get a preview URL, for the user, of a web server that you have started in the sandbox. It is an address of the "
    "machine that sandboxes run on, and anyone who has it can use it there. You cannot open it: to look at a page "
    f"yourself, run curl http://127.0.0.1:PORT/ in the sandbox. Waits up to {MAX_LISTEN_WAIT_S:g} s for the server.",
    Browse,
    BrowseResult,
    _browse,
    hints=Hints(idempotent=True, open_world=True),
    title="Preview a port",
    vocabulary="agent",
)
TRANSFER = Tool(
    "transfer",
    "Copy a file, or with recursive a directory, from one sandbox to another. Keeps modes and symlinks; sockets, pipes "
    f"and devices are left out. {MAX_TRANSFER_BYTES >> 30} GiB at most.",
    Transfer,
    TransferResult,
    _transfer,
    needs=_NEEDS_POOL,
    hints=Hints(destructive=True, idempotent=True),
    serialize_by=_target_key,
    title="Copy between sandboxes",
    vocabulary="agent",
)
SANDBOX_CREATE = Tool(
    "sandbox_create",
    "Create a named sandbox, with its own files and processes: for another image, or to keep work apart. One that "
    "exists already stays as it is; one that has died is started again.",
    SandboxCreate,
    SandboxCreateResult,
    _sandbox_create,
    needs=_NEEDS_POOL,
    hints=Hints(idempotent=True),
    title="Create sandbox",
    vocabulary="agent",
)
SANDBOX_LIST = Tool(
    "sandbox_list",
    "List the sandboxes of this session, each with its image and status. One that is sleeping wakes when it is used.",
    SandboxList,
    SandboxListResult,
    _sandbox_list,
    needs=_NEEDS_POOL,
    hints=_READ_ONLY,
    title="List sandboxes",
    vocabulary="agent",
)


def with_fields(tool: Tool, **fields: Any) -> Tool:
    """A copy of a tool, with fields added to its input or replaced in it."""
    model: type[Input] = create_model(tool.input.__name__, __base__=tool.input, **fields)
    return replace(tool, input=model)


SANDBOX_TOOLS = (SHELL, READ_FILE, WRITE_FILE, GLOB, BROWSE)
SANDBOX_FIELD: Any = (str, Field(default=DEFAULT, min_length=1, description="The name of the sandbox."))
_NAMING = tuple(with_fields(tool, sandbox=SANDBOX_FIELD) for tool in SANDBOX_TOOLS)
POOL_TOOLS = (*_NAMING, SANDBOX_CREATE, SANDBOX_LIST, TRANSFER)


def sandbox_tools(sandbox: Sandbox) -> ToolSet:
    """`shell`, `read_file`, `write_file`, `glob` and `browse` for one sandbox, without an argument for its name."""
    return ToolSet(SANDBOX_TOOLS, SandboxContext(sandbox))


def pool_tools(pool: SandboxPool) -> ToolSet:
    """All eight tools for the sandboxes of a session. The schemas show the pool's defaults."""
    return ToolSet(session_wide_tools(pool), SessionContext(pool))


def session_wide_tools(pool: SandboxPool) -> tuple[Tool, ...]:
    """The eight tools, with the pool's defaults in their schemas."""
    sleep_after_ms = 0 if pool.sleep_after_s is None else pool.sleep_after_s * 1000
    create = with_fields(
        SANDBOX_CREATE,
        image=_with_default("image", pool.image),
        sleep_after_ms=_with_default(
            "sleep_after_ms", int(sleep_after_ms) if sleep_after_ms % 1 == 0 else sleep_after_ms
        ),
    )
    naming = {tool.name: tool for tool in _NAMING}
    if pool.cwd is not None:
        for name, field in (("shell", "working_dir"), ("glob", "cwd")):
            naming[name] = with_fields(naming[name], **{field: _with_default(field, pool.cwd, naming[name].input)})
    return (*naming.values(), create, SANDBOX_LIST, TRANSFER)


def _with_default(field: str, default: object, model: type[Input] = SandboxCreate) -> tuple[Any, Any]:
    about = copy(model.model_fields[field])
    about.default = default
    return about.annotation, about


VOCABULARY = Vocabulary(
    tools=lambda pool, _grants: pool_tools(pool),
    instructions="Without a name, tools use the sandbox 'default', which is created when it is first used. Relative "
    "paths begin where commands do.",
    transcripts={
        "shell": "$ {command}",
        "glob": "{pattern}",
        "browse": ":{port}",
        "sandbox_create": "{image}",
        "transfer": "{from_sandbox}:{from_path} → {to_sandbox}:{to_path}",
    },
)
