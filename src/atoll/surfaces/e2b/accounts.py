"""Users of a sandbox as E2B's files have them: homes, and names of owners.

Owns reading /etc/passwd and /etc/group of a sandbox, which are hostile, and what a relative path means. Used by
`filesystem.py` and `transfer.py`.

E2B's daemon works as root and gives what it makes to the user. So does this surface where the user alone is refused
(`as_user`): a template's user has password-less sudo there, and no boundary is crossed that the sandbox has.
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, TypeVar

from atoll.contract.errors import FileError, PermissionDenied, UserNotFound
from atoll.runtime.sandbox import Sandbox

ROOT = "root"
_MAX_BYTES = 256 * 1024
_MAX_LINES = 4096
_KEPT_S = 5.0
_MAX_KEPT = 1024
_ID = re.compile(r"[0-9]{1,10}")
Result = TypeVar("Result")


class Accounts(NamedTuple):
    """The users and groups of one sandbox."""

    homes: dict[str, str]
    users: dict[int, str]
    groups: dict[int, str]


class SandboxAccounts:
    """The accounts of all sandboxes, each read again after a while."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Accounts]] = {}

    async def of(self, sandbox: Sandbox) -> Accounts:
        read_at, found = self._kept.get(sandbox.id, (0.0, None))
        if found is not None and time.monotonic() - read_at < _KEPT_S:
            return found
        passwd, group = [await _lines(sandbox, path) for path in ("/etc/passwd", "/etc/group")]
        found = Accounts(
            {line[0]: line[5] for line in passwd if len(line) >= 6 and line[5].startswith("/")},
            _by_id(passwd),
            _by_id(group),
        )
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        self._kept[sandbox.id] = time.monotonic(), found
        return found

    def forget_gone(self, sandboxes: Collection[str]) -> None:
        """Forget what is kept of all other sandboxes."""
        self._kept = {id: kept for id, kept in self._kept.items() if id in sandboxes}

    async def resolve(self, sandbox: Sandbox, path: str, user: str | None) -> str:
        """The absolute path that a client means: `~` is the user's home, and what is relative begins there.

        Raises:
            UserNotFound: the sandbox has no such user.
        """
        if path.startswith("/"):
            return posixpath.normpath(path).replace("//", "/")
        name = user or sandbox.info.user
        home = (await self.of(sandbox)).homes.get(name)
        if home is None:
            raise UserNotFound(name)
        if path == "~" or path.startswith("~/"):
            path = path[2:]
        return posixpath.normpath(posixpath.join(home, path))


async def as_user(user: str | None, work: Callable[[str | None], Awaitable[Result]]) -> Result:
    """Do it as the user, and, where the user may not, as root.

    Raises:
        What `work` raises.
    """
    try:
        return await work(user)
    except PermissionDenied:
        return await work(ROOT)


async def _lines(sandbox: Sandbox, path: str) -> list[list[str]]:
    try:
        data = await sandbox.files.read_bytes(path, limit=_MAX_BYTES, user=ROOT)
    except FileError:
        return []
    return [line.split(":", 7) for line in data.decode("utf-8", "replace").splitlines()[:_MAX_LINES]]


def _by_id(lines: list[list[str]]) -> dict[int, str]:
    return {int(line[2]): line[0] for line in lines if len(line) >= 3 and _ID.fullmatch(line[2])}
