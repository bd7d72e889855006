"""The data of the runtime: what a caller hands in and what it gets back. No behaviour, no machine.

Every model is frozen and refuses unknown fields. The docstring under a field says what unset means.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from atoll.contract.errors import InvalidRequest
from atoll.contract.network import Indexes, NetworkPolicy

NAME_RULE = "1 to 63 characters: lower-case letters, digits, '-', '_' and '.', beginning with a letter or a digit"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Status = Literal["provisioning", "running", "paused", "sleeping", "shutdown", "error"]
RuntimeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
"""crun, runc, runsc, bwrap, or the name that a driver of another package registers (`drivers/registry.py`)."""
FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "char_device", "block_device"]


def check_name(name: str) -> str:
    """Return `name` if a sandbox may be called so.

    Raises:
        InvalidRequest: it may not; the message says what is allowed.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{name!r} is not a name for a sandbox; allowed are {NAME_RULE}", name=name)
    return name


def check_env(env: dict[str, str]) -> dict[str, str]:
    """Return `env` if a process can be given it.

    Raises:
        InvalidRequest: a name is not one that shells accept, or a value holds a NUL.
    """
    for key, value in env.items():
        if not _ENV_NAME.fullmatch(key):
            raise InvalidRequest(
                f"{key!r} is not a name for an environment variable; allowed are letters, digits and '_', "
                "not beginning with a digit"
            )
        if "\0" in value:
            raise InvalidRequest(f"the value of the environment variable {key} holds a NUL character")
    return env


Name = Annotated[str, AfterValidator(check_name)]
Env = Annotated[dict[str, str], AfterValidator(check_env)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Frozen):
    """What a sandbox may use. A limit that is set is enforced, or the create is refused."""

    memory_bytes: int | None = Field(default=None, ge=8 * 1024 * 1024)
    """Memory of all its processes together. Unset: 2 GiB where the machine can enforce it, else none."""
    cpus: float | None = Field(default=None, ge=0.01, le=1024)
    """Processor time per second of wall time, 1.5 being one and a half cores. Unset: no limit."""
    pids: int | None = Field(default=None, ge=4, le=4_000_000)
    """Processes and threads. Unset: 1024 where the machine can enforce it, else none."""
    open_files: int | None = Field(default=None, ge=16, le=1_048_576)
    """Open files per process. Unset: the machine's own."""
    disk_bytes: int | None = Field(default=None, ge=16 * 1024 * 1024)
    """What it writes on top of its image and of the checkpoint that it stands on. Beyond it, writing fails as on a full
    disk, for this sandbox alone. Unset: no limit but the room that there is."""


class SandboxSpec(Frozen):
    """What a sandbox is made from. Kept in its manifest for as long as it lives."""

    name: Name
    image: str = "host"
    """`host`, `dir:PATH`, `tar:PATH`, or an OCI reference such as `python:3.12`."""
    limits: Limits = Limits()
    env: Env = Field(default_factory=dict)
    """For every command in it. A command's own `env` goes on top."""
    user: str = "user"
    """Who commands run as when they do not say: `user` (uid 1000, home /home/user), `root`, or another of the image."""
    runtime: RuntimeName | None = None
    """Unset: the fastest that works on this machine."""
    ephemeral: bool = False
    """True: it ends when the last client that uses it leaves, however that one ends."""
    pause_after_s: float | None = Field(default=None, gt=0, le=1_000_000)
    """How long it may be unused before its processes stand still. Unset: for ever. Using it wakes it."""
    network: NetworkPolicy | None = None
    """What may leave it. Unset: nothing, and there is no proxy inside that could refuse it."""
    indexes: Indexes | None = None
    """What the preset `registries` stood for when `network` was set. Unset: it is not in there."""


class SandboxInfo(Frozen):
    """A sandbox as `list` shows it."""

    id: str
    name: str
    status: Status
    reason: str | None = None
    """Why it is in `error`. Unset in every other state."""
    image: str
    runtime: RuntimeName
    limits: Limits
    """The limits in force, with defaults filled in."""
    user: str
    created_at: datetime
    last_used_at: datetime | None = None
    """When something was last asked of it. Unset: it has not been used since it was made."""
    pid: int | None = None
    """The guest's process on the host. Unset when none runs."""
    network: NetworkPolicy | None = None
    """What may leave it. Unset: nothing."""


class WarmPool(Frozen):
    """Sandboxes of one kind that wait to be taken."""

    image: str
    runtime: RuntimeName
    limits: Limits
    """The limits in force, with defaults filled in."""
    count: int
    """How many are to wait."""
    ready: int
    """How many do."""


class Checkpoint(Frozen):
    """A sandbox as it once was, to go back to or to make others of."""

    id: str
    name: str | None = None
    """What it was called. Unset: nothing; it goes by its id."""
    sandbox: str
    """The name of the sandbox that it was made of."""
    created_at: datetime
    size_bytes: int | None = None
    """What was written since its parent. Unset where that has not been counted yet."""
    parent: str | None = None
    """The checkpoint that the sandbox was at before. Unset: none."""
    with_memory: bool
    """True: its running processes are part of it. False: its files are."""
    runtime: RuntimeName
    image: str


class StorageInfo(Frozen):
    """What the layers of a state directory stand on."""

    path: Path
    """Where they are."""
    filesystem: str
    total_bytes: int
    free_bytes: int
    reflinks: bool
    """Copies of files share their data."""
    snapshots: bool
    """A running sandbox is copied at once, whatever it has written."""
    disk_limit: bool
    """`Limits.disk_bytes` can be enforced."""
    lack: str | None = None
    """Why it cannot."""
    fix: str | None = None
    """The command that mends that."""
    image: Path | None = None
    """The file that holds it, made by `init`. Unset: it is a file system of the machine's."""


class ExportResult(Frozen):
    """What was written to a file."""

    sandbox: str
    checkpoint: str | None = None
    """The name of the checkpoint that it is. Unset: it has none, or it is the sandbox as it was at that moment."""
    image: str
    """What it stands on, which is not in the file."""
    image_digest: str
    layers: int
    entries: int
    """Files, directories and the like, those that were deleted from the image too."""
    size_bytes: int | None = None
    """Of the file. Unset where it was not given by its path."""
    without_processes: bool
    """True: it had processes that could have gone on, and they are not in the file: files travel, processes do not."""


class Preview(Frozen):
    """A port of a sandbox that clients of the host can reach. It belongs to the process that serves it."""

    sandbox: str
    port: int
    """Inside."""
    url: str
    """To be opened in a browser, or with any other client: `http://PORT-NAME.localhost:…/` with the token in its query.
    As `path_url` where that cannot be a host name."""
    path_url: str
    """The same for clients that do not resolve names below `.localhost`: `http://127.0.0.1:…/preview/PORT-NAME/`."""
    token: str
    """What lets a client in, in the query parameter `atoll_token` or the header `Atoll-Token`. Whoever has it may."""


class Truncation(Frozen):
    """What a limit on output left out: bytes `start` up to, not including, `end` of `total`."""

    start: int
    end: int
    total: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


class ExecOutcome(Frozen):
    """How a command ended."""

    exit_code: int
    """As a shell says it: 128+n after signal n."""
    signal: int | None = None
    """The signal that ended the main process. Unset: it exited by itself."""
    duration_s: float
    timed_out: bool = False
    out_of_memory: bool = False
    """True when the kernel ended the command because the sandbox's memory limit was reached."""
    stdout_cut: Truncation | None = None
    stderr_cut: Truncation | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class ExecResult(ExecOutcome):
    """A command's end and its output as text: UTF-8, a wrong byte becoming U+FFFD.

    Where `stdout_cut` is set, `stdout` is the head, one line that says what was left out, and the tail.
    """

    stdout: str
    stderr: str


class ExecBytes(ExecOutcome):
    """A command's end and its output as it came. Where `stdout_cut` is set, `stdout` is head and tail, joined."""

    stdout: bytes
    stderr: bytes


class FileStat(Frozen):
    kind: FileKind
    size: int
    mode: int
    """Permission bits, with set-id and sticky: `0o755`."""
    uid: int
    gid: int
    mtime: datetime
    target: str | None = None
    """Where a symlink points to. Unset for all else."""


class FileEntry(FileStat):
    name: str
    """Relative to what was listed or globbed. Bytes that are not UTF-8 are kept as surrogates."""


class Match(Frozen):
    """A line that `grep` found."""

    path: str
    line: int
    """From 1."""
    text: str
    """At most 4096 bytes of it, without its newline."""


class FileChange(Frozen):
    """Something that `watch` saw. `lost` means that the kernel dropped events: look at the tree again."""

    change: Literal["created", "modified", "deleted", "moved_from", "moved_to", "attributes", "lost"]
    path: str
    """Relative to what is watched."""
    kind: FileKind | None = None


class Output(Frozen):
    """Bytes that a process wrote. `offset` counts what the process wrote to this stream before."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    offset: int


class Gap(Frozen):
    """Output that is no longer kept: the stream goes on at `offset`."""

    stream: Literal["stdout", "stderr"]
    offset: int


class Exited(Frozen):
    """The main process has ended. The last event."""

    exit_code: int
    signal: int | None = None
    duration_s: float
    out_of_memory: bool = False
    stdout_total: int
    stderr_total: int


Event = Output | Gap | Exited


class ProcessInfo(Frozen):
    """A command that was started through the API, running or ended lately."""

    id: int
    """What `attach` and `atoll logs` take. Never used twice in one sandbox."""
    pid: int
    command: str
    uid: int
    started_at: datetime
    ended_at: datetime | None = None
    exit_code: int | None = None
    """Unset while the main process runs."""
    stdout_total: int
    stderr_total: int
    live: bool
    """True while any process of its tree lives."""


class SystemProcess(Frozen):
    """Any process in the sandbox."""

    pid: int
    ppid: int
    uid: int
    state: str
    command: str
    rss_bytes: int
    cpu_s: float
    started_at: datetime


class Usage(Frozen):
    """What a sandbox uses now. A number that the machine cannot tell is unset."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    cpu_s: float | None
    pids: int | None
    disk_bytes: int
    """What it has written on top of its image."""
    oom_kills: int | None
    """How many of its processes the kernel has ended for memory."""
