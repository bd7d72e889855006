"""`filesystem.Filesystem` of E2B's daemon: names and attributes.

Owns the translation. Not here: watches (`watches.py`), contents of files (`transfer.py`), and the protocol
(`connect.py`).
"""

from __future__ import annotations

import posixpath
import stat
from functools import partial

from pydantic import Field

from atoll.contract.errors import FileError, PathNotDirectory, PathNotFound
from atoll.contract.model import FileEntry, FileStat
from atoll.runtime.sandbox import Sandbox
from atoll.surfaces.e2b.accounts import ROOT, Accounts, SandboxAccounts, as_user
from atoll.surfaces.e2b.connect import RpcCall, RpcError, RpcMessage, RpcMethods, parse
from atoll.surfaces.e2b.control import E2bBody
from atoll.surfaces.e2b.file_metadata import METADATA_PREFIX, decode_metadata
from atoll.tools.tool import readable

SERVICE = "/filesystem.Filesystem"
MAX_ENTRIES = 100_000
"""Of one listing."""
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}


class PathRequest(E2bBody):
    path: str = ""


class ListRequest(PathRequest):
    depth: int = Field(default=1, ge=0, le=1000)


class MoveRequest(E2bBody):
    source: str = ""
    destination: str = ""


class FilesystemService:
    """Its calls about names, for all sandboxes."""

    def __init__(self, accounts: SandboxAccounts) -> None:
        self._accounts = accounts

    def methods(self) -> RpcMethods:
        return RpcMethods(
            {
                f"{SERVICE}/Stat": self._stat,
                f"{SERVICE}/MakeDir": self._make_dir,
                f"{SERVICE}/Move": self._move,
                f"{SERVICE}/ListDir": self._list_dir,
                f"{SERVICE}/Remove": self._remove,
            },
            {},
            {},
        )

    # ---------------------------------------------------------------------------------------------------- names

    async def _stat(self, call: RpcCall, body: bytes) -> RpcMessage:
        path = await self._accounts.resolve(call.sandbox, parse(PathRequest, body).path, call.user)
        return {"entry": await self.entry(call.sandbox, path, call.user)}

    async def _make_dir(self, call: RpcCall, body: bytes) -> RpcMessage:
        files = call.sandbox.files
        path = await self._accounts.resolve(call.sandbox, parse(PathRequest, body).path, call.user)
        try:
            found = await as_user(call.user, lambda user: files.stat(path, user=user))
        except (PathNotFound, PathNotDirectory):
            found = None
        if found is not None and found.kind == "directory":
            raise RpcError("already_exists", f"directory already exists: {path}")
        if found is not None:
            raise RpcError("invalid_argument", f"path already exists but it is not a directory: {path}")
        await self.make_parents(call.sandbox, posixpath.join(path, "."), call.user)
        return {"entry": await self.entry(call.sandbox, path, call.user)}

    async def make_parents(self, sandbox: Sandbox, path: str, user: str | None) -> None:
        """Make the directories above a path. They are the user's, also where only root may make them."""
        files, owner = sandbox.files, user or sandbox.info.user
        missing: list[str] = []

        async def make(who: str | None) -> None:
            directory = posixpath.dirname(path)
            missing.clear()
            while directory not in ("", "/") and not await files.exists(directory, user=who):
                missing.append(directory)
                directory = posixpath.dirname(directory)
            if missing:
                await files.mkdir(missing[0], user=who)
                if who == ROOT and owner != ROOT:
                    for each in missing:
                        await files.chown(each, owner, user=ROOT)

        await as_user(user, make)

    async def _move(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(MoveRequest, body)
        source, target = [
            await self._accounts.resolve(call.sandbox, each, call.user) for each in (wanted.source, wanted.destination)
        ]
        files = call.sandbox.files
        await as_user(call.user, lambda user: files.stat(source, follow=False, user=user))
        await self.make_parents(call.sandbox, target, call.user)
        await as_user(call.user, lambda user: files.rename(source, target, user=user))
        return {"entry": await self.entry(call.sandbox, target, call.user)}

    async def _remove(self, call: RpcCall, body: bytes) -> RpcMessage:
        path = await self._accounts.resolve(call.sandbox, parse(PathRequest, body).path, call.user)
        files = call.sandbox.files
        await as_user(call.user, lambda user: files.remove(path, recursive=True, missing_ok=True, user=user))
        return {}

    async def _list_dir(self, call: RpcCall, body: bytes) -> RpcMessage:
        wanted = parse(ListRequest, body)
        path = await self._accounts.resolve(call.sandbox, wanted.path, call.user)
        accounts = await self._accounts.of(call.sandbox)
        shown: list[RpcMessage] = []
        ahead = [(path, 1)]
        while ahead:
            directory, depth = ahead.pop()
            try:
                found = await as_user(call.user, partial(self._list_one, call.sandbox, directory))
            except PathNotDirectory:
                raise RpcError("invalid_argument", f"path is not a directory: {directory}") from None
            if len(shown) + len(found) > MAX_ENTRIES:
                raise RpcError("resource_exhausted", f"the listing has more than {MAX_ENTRIES} entries")
            for each in found:
                below = posixpath.join(directory, each.name)
                shown.append(await self._shown(call.sandbox, below, each, call.user, accounts))
                if each.kind == "directory" and depth < max(1, wanted.depth):
                    ahead.append((below, depth + 1))
        shown.sort(key=lambda each: each["path"])
        return {"entries": shown}

    async def _list_one(self, sandbox: Sandbox, directory: str, user: str | None) -> list[FileEntry]:
        return await sandbox.files.list(directory, xattr_prefix=METADATA_PREFIX, user=user)

    # ------------------------------------------------------------------------------------------------ attributes

    async def entry(self, sandbox: Sandbox, path: str, user: str | None) -> RpcMessage:
        """What is at a path.

        Raises:
            PathNotFound: nothing is.
        """
        found = await self._stat_file(sandbox, path, user, follow=False)
        return await self._shown(sandbox, path, found, user, await self._accounts.of(sandbox))

    async def _stat_file(self, sandbox: Sandbox, path: str, user: str | None, *, follow: bool) -> FileStat:
        files = sandbox.files
        return await as_user(user, lambda who: files.stat(path, follow=follow, xattr_prefix=METADATA_PREFIX, user=who))

    async def _shown(
        self, sandbox: Sandbox, path: str, found: FileStat, user: str | None, accounts: Accounts
    ) -> RpcMessage:
        """A symlink has the type and the metadata of what it leads to, if that is there."""
        kind, xattrs = found.kind, found.xattrs
        extra: RpcMessage = {}
        if found.kind == "symlink":
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found.target or ""))
            extra = {"symlinkTarget": readable(target), "isSymlink": True}
            try:
                leads_to = await self._stat_file(sandbox, path, user, follow=True)
                kind, xattrs = leads_to.kind, leads_to.xattrs
            except FileError:
                kind = "symlink"
        if metadata := decode_metadata(xattrs):
            extra["metadata"] = metadata
        bits = {"directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}.get(found.kind, stat.S_IFREG)
        return {
            "name": readable(posixpath.basename(path) or "/"),
            "type": _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED"),
            "path": readable(path),
            "size": str(found.size),
            "mode": found.mode,
            "permissions": stat.filemode(bits | found.mode),
            "owner": accounts.users.get(found.uid, str(found.uid)),
            "group": accounts.groups.get(found.gid, str(found.gid)),
            "modifiedTime": found.mtime.isoformat().replace("+00:00", "Z"),
            **extra,
        }
