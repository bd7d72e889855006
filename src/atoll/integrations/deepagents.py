"""`deepagents` of LangChain: the backend of an agent's file tools and of its tool `execute`.

    with AtollBackend(image="python:3.12") as backend:
        agent = create_deep_agent(model, backend=backend)

Owns what the backend protocol says of files and commands: its words for errors, pages of lines, which files a pattern
matches. Files are read, written and searched by Atoll's own operations, so an image needs neither Python nor a shell
for them. Both versions of the protocol are implemented: since deepagents 0.7, writing replaces a file, patterns match
at any depth, and what is found has absolute paths. Not here: sandboxes (`atoll`). Used by programs.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import io
import os
import posixpath
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

import anyio

import atoll
from atoll import CreateOptions, FileEntry
from atoll.contract.errors import install_extra

try:
    from deepagents.backends import protocol, utils
    from deepagents.backends.protocol import (
        EditResult,
        ExecuteResponse,
        FileDownloadResponse,
        FileInfo,
        FileUploadResponse,
        GlobResult,
        GrepResult,
        LsResult,
        ReadResult,
        SandboxBackendProtocol,
        WriteResult,
    )
    from deepagents.backends.sandbox import MAX_BINARY_BYTES, MAX_OUTPUT_BYTES, TRUNCATION_MSG
except ModuleNotFoundError as error:
    missing = f"{__name__} needs {error.name}, which is not installed; {install_extra('deepagents')}"
    raise ImportError(missing) from error

T = TypeVar("T")

SINCE_0_7: Final = hasattr(protocol, "DeleteResult")
"""Which version of the protocol the installed deepagents has."""

TIMEOUT_S = 1800
"""How long a command may run that names no limit."""
SEARCH_S = 30
"""How long a search may take."""
MAX_FOUND = 10_000
"""How many files or lines a search gives."""
_COUNTED_BYTES = 1024 * 1024
"""A file larger than this is not read to its end only to count its lines."""
_CANCEL_S = 30
"""How long the end of a call that was cancelled is waited for. Killing a process tree takes milliseconds."""
_OFFLOADED = ("/blobs", "/conversation_history", "/large_tool_results")
"""Where deepagents itself writes what is too long for a model. The sandbox's user could not make them."""
_VIRTUAL = ("/dev/", "/proc/", "/sys/")
"""What a search from the root does not give."""
_EMPTY = "System reminder: File exists but has empty contents"
_TOO_LONG = f"Error: {{}} timed out after {SEARCH_S} s. Try a more specific pattern or a narrower path."


class AtollBackend(SandboxBackendProtocol):
    """A sandbox, as deepagents sees one.

    Without a `name`, a new one, which is gone after `close` or when this program ends, however it ends. With a name,
    the sandbox of this name: created if there is none, and kept. It is of the server that the settings name
    (`ATOLL_URL`), else of this machine. `options` are those of `Engine.create`; the settings say what is not given.

    Any thread and any event loop may call, many at once. A call that is cancelled, or interrupted by Ctrl-C, kills its
    command with all that it started. Output beyond `output_limit_bytes` is left out, and marked as truncated. A sandbox
    that has died raises `SandboxDied`: it never looks like a command's output.

    Raises:
        what `Engine.create` and, with `ATOLL_URL`, `atoll.connect` raise.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        settings: atoll.Settings | None = None,
        timeout_s: float = TIMEOUT_S,
        output_limit_bytes: int = MAX_OUTPUT_BYTES * 2,
        **options: Unpack[CreateOptions],
    ) -> None:
        self._timeout_s = timeout_s
        self._output_limit_bytes = output_limit_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="atoll deepagents", daemon=True)
        self._thread.start()
        try:
            self._wait(self._open(name, settings or atoll.Settings.from_environment(), options))
        except BaseException:
            self._stop()
            raise

    async def _open(self, name: str | None, settings: atoll.Settings, options: CreateOptions) -> None:
        self._engine = await (atoll.connect(settings=settings) if settings.url else atoll.open(settings=settings))
        self._owned = name is None
        self._editing = anyio.Lock()
        try:
            if name is None:
                options.setdefault("ephemeral", True)
                self._box = await self._engine.create(**options)
            else:
                self._box = await self._engine.get_or_create(name, **options)
            self._files = self._box.files
            for directory in _OFFLOADED:
                await self._files.mkdir(directory, mode=0o777, user="root")
        except BaseException:
            await self._engine.__aexit__(None, None, None)
            raise

    async def _end(self) -> None:
        try:
            if self._owned:
                await self._box.destroy()
        finally:
            await self._engine.__aexit__(None, None, None)

    def close(self) -> None:
        """Destroy the sandbox, if it was not named, and disconnect. Closing twice does nothing."""
        if self._thread.is_alive():
            try:
                self._wait(self._end())
            finally:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The sandbox's name."""
        return self._box.name

    # ------------------------------------------------------------------------------------------ the two faces of it

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return self._wait(self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return await self._await(self._execute(command, timeout))

    def ls(self, path: str) -> LsResult:
        return self._wait(self._ls(path))

    async def als(self, path: str) -> LsResult:
        return await self._await(self._ls(path))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return self._wait(self._read(file_path, offset, limit))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return await self._await(self._read(file_path, offset, limit))

    def write(self, file_path: str, content: str) -> WriteResult:
        return self._wait(self._write(file_path, content))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await self._await(self._write(file_path, content))

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return self._wait(self._edit(file_path, old_string, new_string, replace_all))

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return await self._await(self._edit(file_path, old_string, new_string, replace_all))

    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        return self._wait(self._grep(pattern, path, glob, max_count))

    async def agrep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        return await self._await(self._grep(pattern, path, glob, max_count))

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        return self._wait(self._glob(pattern, path))

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        return await self._await(self._glob(pattern, path))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return self._wait(self._upload(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await self._await(self._upload(files))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return self._wait(self._download(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await self._await(self._download(paths))

    if SINCE_0_7:

        def delete(self, file_path: str) -> protocol.DeleteResult:
            return self._wait(self._delete(file_path))

        async def adelete(self, file_path: str) -> protocol.DeleteResult:
            return await self._await(self._delete(file_path))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        """What the call gives, made in the backend's own loop."""
        started = _Started(call, self._loop)
        try:
            return started.future.result()
        except BaseException:
            if not started.future.done():  # Ctrl-C
                started.future.cancel()
                started.ended.wait(_CANCEL_S)
            raise

    async def _await(self, call: Coroutine[Any, Any, T]) -> T:
        """`_wait`, for a caller in an event loop, which is not blocked."""
        started = _Started(call, self._loop)
        try:
            return await asyncio.wrap_future(started.future)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.to_thread(started.ended.wait, _CANCEL_S))
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------------------------------------------ commands

    async def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        timeout_s = self._timeout_s if timeout is None else timeout or None
        try:
            ran = await self._box.exec(
                command, merge_stderr=True, timeout_s=timeout_s, output_limit_bytes=self._output_limit_bytes
            )
        except atoll.ExecTimeout as error:
            ran = error.result
            said = f"Error: the command timed out after {timeout_s} s; all that it started was killed"
            output = f"{ran.stdout.rstrip()}\n{said}".lstrip()
            return ExecuteResponse(output, exit_code=124, truncated=ran.stdout_truncation is not None)
        except (atoll.CallerError, atoll.FileError, atoll.TooManyProcesses) as error:
            return ExecuteResponse(f"Error: {error}", exit_code=126)
        return ExecuteResponse(ran.stdout, ran.exit_code, truncated=ran.stdout_truncation is not None)

    # ------------------------------------------------------------------------------------------------------ contents

    async def _read(self, path: str, offset: int, limit: int) -> ReadResult:
        offset, limit = max(int(offset), 0), max(int(limit), 0)
        try:
            found = await self._files.stat(path)
            if found.kind != "file":
                return ReadResult(error=f"File '{path}': not_a_file")
            if not found.size:
                return ReadResult(file_data={"content": _EMPTY, "encoding": "utf-8"})
            if _is_text_name(path) and _is_text(await self._files.read_bytes(path, limit=8192)):
                return await self._read_lines(path, offset, limit, found.size)
            if found.size > MAX_BINARY_BYTES:
                said = f"Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes"
                return ReadResult(error=f"File '{path}': {said}")
            data = await self._files.read_bytes(path, limit=MAX_BINARY_BYTES)
        except (atoll.FileError, atoll.CallerError) as error:
            return ReadResult(error=f"File '{path}': {_reason(error)}")
        return ReadResult(file_data={"content": base64.b64encode(data).decode(), "encoding": "base64"})

    async def _read_lines(self, path: str, offset: int, limit: int, size: int) -> ReadResult:
        if not limit:
            nothing = {"no_lines_requested": True} if SINCE_0_7 else {}
            return ReadResult(file_data={"content": "", "encoding": "utf-8"}, **nothing)
        page = _Page(offset, limit)
        async with aclosing(self._files.stream(path)) as chunks:
            async for chunk in chunks:
                if page.is_full and size > _COUNTED_BYTES:
                    break
                page.add(chunk)
            else:
                page.finish()
        if page.content is None:
            return ReadResult(error=f"File '{path}': Line offset {offset} exceeds file length ({page.line} lines)")
        return ReadResult(file_data={"content": page.content, "encoding": "utf-8"}, **page.window)

    async def _write(self, path: str, content: str) -> WriteResult:
        try:
            await self._files.write_bytes(path, _encoded(content), exclusive=not SINCE_0_7)
        except atoll.PathExists:
            return WriteResult(error=f"Error: File already exists: '{path}'")
        except (atoll.FileError, atoll.CallerError) as error:
            return WriteResult(error=f"Failed to write file '{path}': {_reason(error)}")
        return WriteResult(path=path)

    async def _edit(self, path: str, old: str, new: str, replace_all: bool) -> EditResult:
        if not old:
            return EditResult(error="Error: old_string cannot be empty. Provide the exact text to replace.")
        try:
            async with self._editing:  # two edits of one file, asked for at once, both take place
                text = (await self._files.read_bytes(path)).decode()
                # Pages are shown with LF alone: a file with CRLF is edited as what it has.
                forms = (str, _with_crlf, _with_lf)
                form = next((form for form in forms if form(old) in text), None)
                if form is None:
                    return EditResult(error=f"Error: String not found in file: '{old}'")
                count = text.count(form(old))
                if count > 1 and not replace_all:
                    said = "appears multiple times. Use replace_all=True to replace all occurrences."
                    return EditResult(error=f"Error: String '{old}' {said}")
                await self._files.write_bytes(path, _encoded(text.replace(form(old), form(new))))
        except UnicodeDecodeError:
            return EditResult(error=f"Error: File '{path}' is not a text file")
        except atoll.PathNotFound:
            return EditResult(error=f"Error: File '{path}' not found")
        except (atoll.FileError, atoll.CallerError) as error:
            return EditResult(error=f"Error editing file '{path}': {_reason(error)}")
        return EditResult(path=path, occurrences=count)

    async def _delete(self, path: str) -> protocol.DeleteResult:
        try:
            await self._files.remove(path, recursive=True)
        except atoll.PathNotFound:
            return protocol.DeleteResult(error=f"Error: '{path}' not found")
        except (atoll.FileError, atoll.CallerError) as error:
            return protocol.DeleteResult(error=f"Error deleting file '{path}': {_reason(error)}")
        return protocol.DeleteResult(path=path)

    async def _upload(self, files: Sequence[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path, error=await self._upload_one(path, data)) for path, data in files]

    async def _upload_one(self, path: str, data: bytes) -> str | None:
        try:
            await self._files.write_bytes(_absolute(path), data)
        except (atoll.FileError, atoll.CallerError) as error:
            return _code(error)
        return None

    async def _download(self, paths: Sequence[str]) -> list[FileDownloadResponse]:
        answers = []
        for path in paths:
            try:
                answers.append(FileDownloadResponse(path, content=await self._files.read_bytes(_absolute(path))))
            except (atoll.FileError, atoll.CallerError) as error:
                answers.append(FileDownloadResponse(path, error=_code(error)))
        return answers

    # ------------------------------------------------------------------------------------------------------- finding

    async def _ls(self, path: str) -> LsResult:
        try:
            entries = await self._files.list(path)
        except (atoll.FileError, atoll.CallerError) as error:
            return LsResult(error=f"Path '{path}': {_reason(error, 'path_not_found')}")
        return LsResult(entries=[_info(entry, posixpath.join(path, _shown(entry.name))) for entry in entries])

    async def _glob(self, pattern: str, path: str | None) -> GlobResult:
        root = posixpath.join("/", path or "/")
        try:
            matches = utils.compile_grep_include_glob(pattern) if SINCE_0_7 else bool
            with anyio.fail_after(SEARCH_S):
                return await self._find(pattern, root, matches)
        except (atoll.FileError, atoll.CallerError) as error:
            return GlobResult(error=f"Path '{root}': {_reason(error, 'path_not_found')}")
        except TimeoutError:
            return GlobResult(error=_TOO_LONG.format("glob"))
        except ValueError as error:
            return GlobResult(error=f"Path '{root}': {error}")

    async def _find(self, pattern: str, root: str, matches: Callable[[str], bool]) -> GlobResult:
        wanted = pattern
        if SINCE_0_7:
            # A pattern without a slash finds names below hidden directories too, one with a slash does not: Atoll's
            # finds more in both cases, and `matches` decides.
            wanted = pattern.lstrip("/") or "*" if "/" in pattern else f"**/{pattern}"
        entries = await self._files.glob(wanted, cwd=root, hidden=SINCE_0_7, limit=MAX_FOUND)
        found: list[FileInfo] = []
        for entry in entries:
            path, shown = posixpath.join(root, entry.name), _shown(entry.name)
            if not matches(shown) or path.startswith(_VIRTUAL):
                continue
            kind = await self._kind(entry, path)
            if SINCE_0_7 and kind == "file":
                found.append(_info(entry, _shown(path)))
            elif not SINCE_0_7 and kind is not None:
                found.append({**_info(entry, shown), "is_dir": kind == "directory"})
        found.sort(key=lambda info: info["path"])
        if SINCE_0_7 and len(entries) == MAX_FOUND:
            return GlobResult(matches=found, truncated=True, truncation_reason="budget")
        return GlobResult(matches=found)

    async def _kind(self, entry: FileEntry, path: str) -> str | None:
        """What an entry is, or what it links to. None: it links to nothing."""
        if entry.kind != "symlink":
            return entry.kind
        try:
            return (await self._files.stat(path)).kind
        except atoll.FileError:
            return None

    async def _grep(self, pattern: str, path: str | None, glob: str | None, max_count: int | None) -> GrepResult:
        root = path or self._box.info.cwd or "/"
        limit = MAX_FOUND if max_count is None else min(max_count, MAX_FOUND)
        try:
            included = utils.compile_grep_include_glob(glob) if glob and SINCE_0_7 else bool
        except ValueError as error:
            return GrepResult(error=f"Path '{root}': {error}")
        try:
            with anyio.fail_after(SEARCH_S):
                matches = await self._files.grep(
                    pattern, root, literal=True, include=glob and glob.lstrip("/"), hidden=True, limit=MAX_FOUND
                )
        except (atoll.FileError, atoll.CallerError) as error:
            return GrepResult(error=f"Path '{root}': {_reason(error, 'path_not_found')}")
        except TimeoutError:
            return GrepResult(error=_TOO_LONG.format("grep"))
        found = [
            {"path": _shown(posixpath.join(root, match.path)), "line": match.line, "text": match.text}
            for match in matches
            if match.path == root or (included(_shown(match.path)) and ".git" not in match.path.split("/")[:-1])
        ]
        cut = len(found) > limit or len(matches) == MAX_FOUND
        return GrepResult(matches=found[:limit], **({"truncated": cut} if SINCE_0_7 else {}))


class _Started:
    """A call in a loop of another thread: what it will give, and when nothing of it runs any more."""

    def __init__(self, call: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.ended = threading.Event()
        self.future = asyncio.run_coroutine_threadsafe(self._run(call), loop)

    async def _run(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return await call
        finally:
            self.ended.set()


class _Page:
    """Lines `offset` to `offset + limit` of a text that comes in pieces. It keeps MAX_OUTPUT_BYTES of them at most."""

    def __init__(self, offset: int, limit: int) -> None:
        self._offset = offset
        self._end = offset + limit
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        self._kept: list[str] = []
        self._room_bytes = MAX_OUTPUT_BYTES - len(TRUNCATION_MSG)
        self._cut_in: int | None = None
        """The line for which there was no room."""
        self._is_open = False
        """Whether the line `line` has begun."""
        self._total: int | None = None
        self.line = 0

    @property
    def is_full(self) -> bool:
        return self.line >= self._end or self._cut_in is not None

    def add(self, data: bytes, *, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        if not text:
            return
        self._is_open = not text.endswith("\n")
        newlines = text.count("\n")
        if self.is_full or self.line + newlines < self._offset:
            self.line += newlines
            return
        for piece in re.findall("[^\n]*\n|[^\n]+", text):
            if self.line >= self._offset and not self.is_full:
                self._keep(piece)
            self.line += piece.endswith("\n")

    def _keep(self, text: str) -> None:
        data = text.encode()
        if len(data) > self._room_bytes:
            self._cut_in = self.line
            text = data[: self._room_bytes].decode(errors="ignore")
        self._room_bytes -= len(data)
        self._kept.append(text)

    def finish(self) -> None:
        """Nothing follows."""
        self.add(b"", final=True)
        self.line += self._is_open
        self._total = self.line

    @property
    def content(self) -> str | None:
        """The lines, without the newline of the last. None: the text ended before them."""
        if self._total is not None and self._offset >= self._total:
            return None
        if self._cut_in is not None:
            return "".join(self._kept) + TRUNCATION_MSG
        return "".join(self._kept).removesuffix("\n")

    @property
    def window(self) -> dict[str, int | None]:
        """Which lines these are, as `ReadResult` says it since 0.7."""
        if not SINCE_0_7:
            return {}
        end = self._end if self._total is None else min(self._end, self._total)
        if self._cut_in is not None:
            end = max(self._cut_in, self._offset + 1)  # past a line that no page has room for
        following = end if self._total is None or end < self._total else None
        return {"start_line": self._offset + 1, "end_line": end, "total_lines": self._total, "next_offset": following}


def _is_text_name(path: str) -> bool:
    kind = getattr(utils, "_get_backend_read_file_type", utils._get_file_type)  # noqa: SLF001 - the table is not public
    return bool(kind(path) == "text")


def _is_text(beginning: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return True


def _with_lf(text: str) -> str:
    return text.replace("\r\n", "\n")


def _with_crlf(text: str) -> str:
    return _with_lf(text).replace("\n", "\r\n")


def _encoded(text: str) -> bytes:
    """The text in UTF-8. A lone surrogate, which a model's JSON may have, becomes a question mark."""
    return text.encode(errors="replace")


def _shown(path: str) -> str:
    """A path as text that a model can be sent: names in a sandbox may be any bytes."""
    return os.fsencode(path).decode(errors="replace")


def _absolute(path: str) -> str:
    """The path.

    Raises:
        InvalidRequest: it is relative.
    """
    if not path.startswith("/"):
        raise atoll.InvalidRequest(f"{path}: not an absolute path")
    return path


def _info(entry: FileEntry, path: str) -> FileInfo:
    return {
        "path": path,
        "is_dir": entry.kind == "directory",
        "size": entry.size,
        "modified_at": entry.mtime.isoformat(),
    }


def _code(error: atoll.AtollError) -> str:
    """The protocol's word for an error of a file, or the error's message."""
    words: dict[type[Exception], str] = {
        atoll.PathNotFound: "file_not_found",
        atoll.PermissionDenied: "permission_denied",
        atoll.PathIsDirectory: "is_directory",
        atoll.PathNotDirectory: "invalid_path",
        atoll.InvalidRequest: "invalid_path",
    }
    return next((word for kind, word in words.items() if isinstance(error, kind)), str(error))


def _reason(error: atoll.AtollError, not_found: str = "file_not_found") -> str:
    """An error of a file in the words that `BaseSandbox` has for it, or its message."""
    if isinstance(error, atoll.PathNotFound):
        return not_found
    if isinstance(error, atoll.PathNotDirectory):
        return "not_a_directory"
    return "permission_denied" if isinstance(error, atoll.PermissionDenied) else str(error)
