"""Records on disk: how one is written in one step, and read only by an Atoll that understands its version.

Owns the version check and the atomic write. Not here: what the records say (`store.py`, `checkpoints.py`,
`loop_storage.py`, `lifecycle/warm_pool.py`, `images/store.py`), and locks (`drivers/locks.py`).

A record is one JSON object. Its field `version` is read before any other. A newer version is refused, since fields may
have been added whose meaning this Atoll would ignore. An older one is refused too: there is no conversion.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from atoll.contract.errors import SandboxError
from atoll.contract.frozen import Frozen

_R = TypeVar("_R", bound="StoredRecord")
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class StoredRecord(Frozen):
    """The base of what is written with `write_record`."""

    VERSION: ClassVar[int]
    """Raise it when a field is added, removed or renamed, or comes to mean something else."""


def write_record(path: Path, record: StoredRecord, *, durable: bool = False) -> None:
    """Write a record with `write_atomic`."""
    write_atomic(path, _encode(record), durable=durable)


def write_record_early(path: Path, record: StoredRecord) -> int:
    """Write a record in one step, which a power failure may undo or damage until the descriptor returned is synced.

    The caller syncs it (`os.fdatasync`) and closes it before anything relies on the record.
    """
    fd = _replace(path, _encode(record))
    try:
        os.rename(_temporary(path), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _encode(record: StoredRecord) -> bytes:
    return json.dumps({"version": record.VERSION, **record.model_dump(mode="json")}).encode()


def read_record(path: Path, model: type[_R], what: str) -> _R | None:
    """The record in the file `path`. None: there is no such file. `what` names in messages what the record describes.

    Raises:
        SandboxError: `details["reason"]` is `newer` or `older`, the version that it was written with, `malformed`, or
            `unreadable`: the file cannot be read. `details["problem"]` says in one line what is wrong.
        OSError: this process lacks descriptors or memory, which says nothing about the record.
    """
    try:
        content = _read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        problem = error.strerror or str(error)
        raise SandboxError(
            f"the record of {what} cannot be read", hint=f"{path}: {problem}", reason="unreadable", problem=problem
        ) from error
    try:
        fields = _parsed(content)
        version = _version_of(fields)
    except ValueError as error:
        raise _malformed(path, what, error) from error
    if version != model.VERSION:
        raise _other_version(path, what, version, model.VERSION)
    try:
        return model.model_validate(fields)
    except ValueError as error:
        raise _malformed(path, what, error) from error


def _parsed(content: bytes) -> object:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError):
        from pydantic_core import from_json  # its messages say where it is wrong

        return from_json(content)


def _read_file(path: Path) -> bytes:
    # What is not a regular file is not opened, or not waited for: a pipe would never end.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with open(fd, "rb", buffering=0, closefd=False) as file:
            return file.readall()
    finally:
        os.close(fd)


def remove_record(path: Path) -> None:
    """Remove a record, whatever is in its place."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        import shutil

        shutil.rmtree(path)


def _version_of(fields: object) -> int:
    """Take the version out of a record's fields."""
    version = fields.pop("version", None) if isinstance(fields, dict) else None
    if type(version) is not int:
        raise ValueError("it has no record version")
    return version


def _malformed(path: Path, what: str, error: ValueError) -> SandboxError:
    from pydantic import ValidationError

    problem = str(error)
    if isinstance(error, ValidationError):  # without the values, which its text has
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return SandboxError(
        f"the record of {what} cannot be read", hint=f"{path}: {error}", reason="malformed", problem=problem
    )


def _other_version(path: Path, what: str, found: int, known: int) -> SandboxError:
    reason: Literal["newer", "older"] = "newer" if found > known else "older"
    versions = f"record version {found}, this one reads "
    if reason == "newer":
        problem = f"was written by a newer Atoll ({versions}up to {known}); upgrade Atoll to use it"
    else:
        problem = (
            f"was written by an older Atoll ({versions}only {known}), and older records are not converted; "
            "use it with that Atoll, or start with a new state directory"
        )
    return SandboxError(
        f"{what} {problem}", hint=str(path), reason=reason, problem=f"it {problem}", version=found, known_version=known
    )


def unreadable(error: SandboxError) -> str:
    """Why a record cannot be read, for `SandboxInfo.reason` and the like. `error` is that of `read_record`."""
    return f"its record cannot be read: {error.details['problem']}"


def write_atomic(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file that at any moment holds what it held before or all of `content`, whatever is killed when.

    That holds across a power failure too, since the data is on disk before the rename. Which of the two is there after
    one is not promised: the directory is synced only if the write is to be `durable`. Syncing it always would cost each
    manifest 0.2 to 0.9 ms (ext4) and gain nothing: processes do not outlive a power failure, and a journal keeps the
    order of renames and removals, so that the old content cannot name what was removed after the write.

    The caller holds a lock: two writers at once would use one temporary file.
    """
    fd = _replace(path, content)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
    os.rename(_temporary(path), path)
    if durable:
        sync(path.parent)


def _temporary(path: Path) -> str:
    return f"{path.parent}/{path.stem}.new"


def _replace(path: Path, content: bytes) -> int:
    """Write what is to become the file `path`. The descriptor returned is to be closed."""
    fd = os.open(_temporary(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        with memoryview(content) as left:
            while left:
                left = left[os.write(fd, left) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def sync(path: Path) -> None:
    """Have a file's data, or a directory's entries, on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
