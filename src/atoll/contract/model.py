"""The data of the public API: what a caller passes in and gets back.

Owns the models. Every model is frozen and refuses unknown fields; the docstring under a field says what unset means.
Not here: the rules for names and environment variables (`names.py`), network policies (`network.py`), secrets
(`secret.py`), errors (`errors.py`), and any behaviour. Used by every layer.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from atoll.contract.errors import InvalidRequest
from atoll.contract.frozen import AfterValidator, Field, Frozen, FrozenRequest
from atoll.contract.names import DEFAULT_NAMESPACE, check_env, check_name
from atoll.contract.network import NetworkPolicy, PackageIndexes

VOLUME_PREFIX = "volume:"
MAX_MOUNTS = 16
"""Of one sandbox; the same in `drivers/keeper/keeper.h`."""
MAX_LABELS = 64
"""Labels of one sandbox."""
MAX_COMMAND_CHARS = 16 * 1024
"""Of a start command or a ready command."""
RESERVED_LABELS = "atoll.dev/"
"""The beginning of labels that a server sets for itself. They are neither counted nor shown to its clients."""
LABEL_VALUE_RULE = (
    "up to 63 characters: letters, digits, '-', '_' and '.', beginning and ending with a letter or a digit; or none"
)
LABEL_KEY_RULE = (
    "1 to 63 characters: letters, digits, '-', '_' and '.', beginning and ending with a letter or a digit; "
    "before them, if need be, a domain and '/': example.com/team"
)
_LABEL_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:(?=[^/]{{1,253}}/)[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/)?{_LABEL_WORD}")
_LABEL_VALUE = re.compile(rf"(?:{_LABEL_WORD})?")
MAX_TTL_S = 1e9
"""The longest lifetime: some thirty years. None is longer."""

Status = Literal["provisioning", "running", "paused", "sleeping", "shutdown", "error"]
RuntimeName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
"""crun, runc, runsc, bwrap, or the name that a driver of another package registers (`drivers/registry.py`)."""
FileKind = Literal["file", "directory", "symlink", "fifo", "socket", "char_device", "block_device"]


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return `labels` if a sandbox can have them: keys and values as in Kubernetes, and few.

    Raises:
        InvalidRequest: a key or a value is not allowed, or there are too many.
    """
    count = sum(not key.startswith(RESERVED_LABELS) for key in labels)
    if count > MAX_LABELS:
        raise InvalidRequest(f"{count} labels are too many; a sandbox may have {MAX_LABELS}")
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            raise InvalidRequest(f"{key!r} is not a key for a label; allowed are {LABEL_KEY_RULE}", key=key)
        if not _LABEL_VALUE.fullmatch(value):
            raise InvalidRequest(
                f"{value!r} is not a value for the label {key!r}; allowed are {LABEL_VALUE_RULE}", key=key, value=value
            )
    return labels


def check_words(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return `words` if they can be a command that is kept with a sandbox.

    Raises:
        InvalidRequest: they are too long, or hold a NUL.
    """
    if sum(map(len, words)) > MAX_COMMAND_CHARS or len(words) > MAX_COMMAND_CHARS // 16:
        raise InvalidRequest(f"a command that is kept with a sandbox may have {MAX_COMMAND_CHARS} characters")
    if any("\0" in word for word in words):
        raise InvalidRequest("a command holds a NUL character")
    return words


OnExpiry = Literal["destroy", "sleep", "pause"]
Name = Annotated[str, AfterValidator(check_name)]
Env = Annotated[dict[str, str], AfterValidator(check_env)]
Labels = Annotated[dict[str, str], AfterValidator(check_labels)]
CommandWords = Annotated[tuple[str, ...], AfterValidator(check_words)]


class Limits(FrozenRequest):
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
    """The quota of its active layer: what it writes on top of its image and its checkpoint. Beyond it, writing fails as
    on a full disk, for this sandbox alone. Unset: no limit but the free space."""


class Mount(FrozenRequest):
    """A directory of the host, or a volume, that a sandbox sees at `target`. Its files are not in checkpoints.

    Outside, what the sandbox's user writes belongs to the owner of the directory, and the owner's files belong to that
    user inside. Files of all other users of the host have no owner inside: they can be read if everyone may.
    """

    source: str = Field(min_length=1, max_length=4095)
    """A directory of the host, whose symlinks are followed once, when the sandbox is created; or `volume:NAME`."""
    target: str = Field(min_length=1, max_length=4095)
    """Where it is inside: an absolute path. A directory that is missing there is made."""
    read_only: bool | None = None
    """Whether nothing inside can write to it. Unset: true for a directory of the host, false for a volume."""

    @property
    def volume(self) -> str | None:
        """The name of the volume. None: it is a directory of the host."""
        return self.source.removeprefix(VOLUME_PREFIX) if self.source.startswith(VOLUME_PREFIX) else None

    @property
    def is_read_only(self) -> bool:
        return self.volume is None if self.read_only is None else self.read_only

    def __str__(self) -> str:
        """As `--mount` takes it."""
        return f"{self.source}:{self.target}:{'ro' if self.is_read_only else 'rw'}"


class ResolvedMount(Mount):
    """A mount whose source has been checked: it has no symlinks, and is refused if there is one in it later."""


class SandboxSpec(Frozen):
    """What was requested for a sandbox. Kept in its manifest for as long as it exists."""

    name: Name
    image: str = "host"
    """`host`, `dir:PATH`, `tar:PATH`, or an OCI reference such as `python:3.12`."""
    limits: Limits = Limits()
    env: Env = Field(default_factory=dict)
    """For every command in it. A command's own `env` goes on top."""
    user: str | None = Field(default=None, min_length=1, max_length=255)
    """The user of commands and file operations that name none, as `USER` of an image is written. Unset: the image's
    `USER`, else `user` (uid 1000, home /home/user)."""
    cwd: str | None = Field(default=None, pattern=r"^/[^\x00]*$", max_length=4095)
    """Where commands start that name no directory, and relative paths begin. Unset: the image's `WORKDIR`, else the
    home of the command's user."""
    runtime: RuntimeName | None = None
    """Unset: the fastest that works on this machine."""
    ephemeral: bool = False
    """True: it ends when its last client disconnects, however that client ends."""
    pause_after_s: float | None = Field(default=None, gt=0, le=1_000_000)
    """How long it may be unused before it is paused. Unset: for ever. Using it resumes it."""
    labels: Labels = Field(default_factory=dict)
    """What its users say about it: `list` filters by them. They mean nothing to Atoll, and are not seen inside."""
    ttl_s: float | None = Field(default=None, ge=1, le=MAX_TTL_S)
    """Its lifetime, which began when this was set. Unset: it lives until it is destroyed."""
    on_expiry: OnExpiry = "destroy"
    """What happens when its lifetime is over. `sleep`: it is put to sleep; used again, it lives as long again."""
    ttl_renewed_by_use: bool = False
    """True: each use begins its lifetime anew."""
    network: NetworkPolicy | None = None
    """The policy of its egress. Unset: no connection leaves it, and no proxy listens inside."""
    indexes: PackageIndexes | None = None
    """The package indexes that the preset `registries` meant when `network` was set. Unset: `network` has no preset."""
    mounts: tuple[Mount, ...] = Field(default=(), max_length=MAX_MOUNTS)
    """Directories of the host and volumes that it sees."""
    start_command: CommandWords = ()
    """A program and its arguments that run in the background whenever it starts without saved processes, as its user
    and in its directory. Empty: none."""
    ready_command: CommandWords = ()
    """A program that is run until it succeeds, before the sandbox counts as created. Empty: none."""
    sudo: bool = False
    """True: `sudo` works inside, without a password, for the user of commands that name none."""


class SandboxInfo(Frozen):
    """A sandbox as `list` shows it.

    Of one whose record cannot be read only the id, the namespace and the name are known: `status` is `error`, `reason`
    says why, `runtime` is `unknown`, `image` and `user` are empty. It can be destroyed.
    """

    id: str
    namespace: str = DEFAULT_NAMESPACE
    """Where its name is its own. An engine sees one namespace."""
    name: str
    status: Status
    reason: str | None = None
    """Why it is in `error`; or that it is `running` and does not answer, which is known once a client has waited for it
    for half a minute. Else unset."""
    image: str
    runtime: RuntimeName
    limits: Limits
    """The limits in force, with defaults filled in."""
    user: str
    """The user of commands and file operations that name none."""
    cwd: str | None = None
    """Where commands start that name no directory, and relative paths begin. Unset: in the home of the command's
    user."""
    created_at: datetime
    last_used_at: datetime | None = None
    """When it was last used. Unset: it has not been used since it was created."""
    pid: int | None = None
    """The guest's process on the host. Unset when none runs."""
    labels: Labels = Field(default_factory=dict)
    expires_at: datetime | None = None
    """When its lifetime is over, as far as is known now. Unset: never; or it sleeps, and its lifetime begins anew when
    it is next used."""
    ttl_s: float | None = None
    """Its lifetime, from when this was set, or from its last use. Unset: it lives until it is destroyed."""
    on_expiry: OnExpiry = "destroy"
    """What happens when its lifetime is over."""
    ttl_renewed_by_use: bool = False
    """Whether each use begins its lifetime anew."""
    network: NetworkPolicy | None = None
    """The policy of its egress. Unset: no connection leaves it."""
    mounts: tuple[Mount, ...] = ()
    """Directories of the host and volumes that it sees, with the paths that they were found at."""
    ephemeral: bool = False
    """It ends when its last client disconnects."""
    sudo: bool = False
    """Whether `sudo` works inside for `user`."""


class WarmPool(Frozen):
    """A warm pool: sandboxes of one template that are ready to be claimed."""

    image: str
    runtime: RuntimeName
    limits: Limits
    """The limits in force, with defaults filled in."""
    count: int
    """How many are to be ready."""
    ready: int
    """How many are ready now."""
    reason: str | None = None
    """Why its record cannot be read: `runtime` is `unknown` then, `image` empty and `count` 0. Unset: it can be."""


class Volume(Frozen):
    """A named directory that outlives sandboxes, and that several of them mount at once."""

    name: str
    size_bytes: int | None = None
    """The limit of what is written to it. Unset: no limit but the free space."""
    used_bytes: int
    """What it occupies on disk."""
    created_at: datetime
    sandboxes: tuple[str, ...] = ()
    """The names of the sandboxes that mount it, running or not."""
    reason: str | None = None
    """Why its record cannot be read: it can only be removed then. Unset: it can be read."""


class Checkpoint(Frozen):
    """A sandbox as it was at one moment, to restore it or to fork others from."""

    id: str
    label: str | None = None
    """No other checkpoint of its sandbox has it. Unset: it has none, and is found by its id only."""
    sandbox: str
    """The name of its sandbox."""
    sandbox_id: str
    """Whose it is: the id of the sandbox that it was taken of. Another sandbox that has the name later has another."""
    created_at: datetime
    size_bytes: int | None = None
    """What was written since its parent. Unset: not measured yet."""
    parent: str | None = None
    """The checkpoint before it: the last that its sandbox had, was made from or restored to. Unset: there is none."""
    with_memory: bool
    """True: it holds files and running processes. False: it holds files."""
    without_mounts: tuple[str, ...] = ()
    """Where its sandbox had mounts: their files are not in it. They are what they are when it is restored or forked."""
    runtime: RuntimeName
    image: str
    reason: str | None = None
    """Why its record cannot be read: it can only be deleted then, `runtime` is `unknown`, `sandbox`, `sandbox_id` and
    `image` are empty. Unset: it can be read."""


BuildStatus = Literal["waiting", "building", "ready", "failed", "cancelled", "interrupted"]
"""Interrupted: the server ended. What the steps before have made is kept for the next build."""


class TemplateVersion(Frozen):
    """What a template is under one of its tags: files, and what sandboxes that begin with them have."""

    build_id: str
    checkpoint: str
    """The id of the checkpoint that has the files."""
    image: str
    runtime: RuntimeName
    created_at: datetime
    env: Env = Field(default_factory=dict)
    """On top of the image's."""
    user: str | None = Field(default=None, min_length=1, max_length=255)
    """The user of commands. Unset: the image's, else `user`."""
    cwd: str | None = Field(default=None, pattern=r"^/[^\x00]*$", max_length=4095)
    """Where commands start. Unset: the image's `WORKDIR`, else the home of the command's user."""
    start_command: CommandWords = ()
    ready_command: CommandWords = ()


class Template(Frozen):
    """A named beginning of sandboxes, made by a build."""

    name: Name
    versions: dict[str, TemplateVersion] = Field(default_factory=dict)
    """By tag. `default` is the one of those who name none."""
    created_at: datetime
    reason: str | None = None
    """Why its record cannot be read: it can only be removed then. Unset: it can be read."""


class Build(Frozen):
    """A build of a template by a server, as far as it has come."""

    id: str
    template: Name
    tags: tuple[str, ...]
    status: BuildStatus
    created_at: datetime
    ended_at: datetime | None = None
    """Unset: it has not ended."""
    steps: int = 0
    """How many it has. 0: they are not known yet."""
    step: int = 0
    """The last that it has begun, from 1."""
    reason: str | None = None
    """Why it has failed."""
    failed_step: int | None = None
    """Unset: it has not failed, or in none of them."""
    version: TemplateVersion | None = None
    """What it has made, once it is `ready`."""


class BuildLogLine(Frozen):
    """A line of a build's log."""

    number: int
    """From 1."""
    at: datetime
    level: Literal["info", "error"]
    kind: Literal["step", "cached", "output", "note"]
    """A step begins; the result of one is kept from before; a step has printed it; anything else."""
    step: int
    """From 1. 0: it is about none."""
    text: str


class StorageInfo(Frozen):
    """The file system that holds the layers of a state directory."""

    path: Path
    """The directory of the layers."""
    filesystem: str
    total_bytes: int
    free_bytes: int
    reflinks: bool
    """Copies of files share their data."""
    snapshots: bool
    """The files of a running sandbox are copied in constant time, however much it has written."""
    disk_limit: bool
    """`Limits.disk_bytes` can be enforced."""
    missing: str | None = None
    """Why it cannot. Unset: it can."""
    fix: str | None = None
    """The command that fixes it. Unset: it can, or there is none."""
    image: Path | None = None
    """The file that holds the file system, made by `init`. Unset: it is a file system of the machine."""


class ExportResult(Frozen):
    """What `export` wrote to a file."""

    sandbox: str
    checkpoint: str | None = None
    """The label of the exported checkpoint. Unset: it has none, or the sandbox was exported as it was then."""
    image: str
    """Its image, which is not in the file."""
    image_digest: str
    layers: int
    entries: int
    """Files, directories and other entries, including deletions from the image."""
    size_bytes: int | None = None
    """Of the file. Unset: the target was an open file, not a path."""
    without_processes: bool
    """True: the checkpoint held processes, which are not in the file: only files are exported."""
    without_mounts: tuple[str, ...] = ()
    """Where the sandbox had mounts, which are not in the file."""


class GcResult(Frozen):
    """What `gc` removed."""

    sandboxes: tuple[str, ...] = ()
    """Ids of sandboxes that were abandoned, or whose session's process died."""
    layers: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    """Digests."""
    downloads: tuple[str, ...] = ()
    """Directories of images that were being fetched or unpacked when their process died."""


class Preview(Frozen):
    """A port of a sandbox that clients of the host can reach. It ends with the process that serves it."""

    sandbox: str
    port: int
    """The port inside."""
    url: str
    """For a browser or any other client: `http://PORT-NAME.localhost:…/` with the token in its query. The same as
    `path_url` where the sandbox's name cannot be part of a host name."""
    path_url: str
    """The same for clients that do not resolve names below `.localhost`: `http://127.0.0.1:…/preview/PORT-NAME/`."""
    token: str
    """Grants access, in the query parameter `atoll_token` or the header `Atoll-Token`, to any client that has it."""


class Truncation(Frozen):
    """The bytes that a limit on output left out: `start` up to, not including, `end` of `total`."""

    start: int
    end: int
    total: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


class ExecOutcome(Frozen):
    """How a command ended."""

    exit_code: int
    """As a shell reports it: 128+n after signal n."""
    signal: int | None = None
    """The signal that ended the main process. Unset: it exited by itself."""
    duration_s: float
    timed_out: bool = False
    out_of_memory: bool = False
    """True: the kernel killed the command because the sandbox reached its memory limit."""
    stdout_truncation: Truncation | None = None
    stderr_truncation: Truncation | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


class ExecResult(ExecOutcome):
    """How a command ended, and its output as text: UTF-8, with U+FFFD for an invalid byte.

    Where `stdout_truncation` is set, `stdout` is the head, one line that says how much was left out, and the tail.
    """

    stdout: str
    stderr: str


class ExecBytes(ExecOutcome):
    """How a command ended, and its output as bytes.

    Where `stdout_truncation` is set, `stdout` is head and tail, joined.
    """

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
    """The target of a symlink. Unset: it is not a symlink."""
    xattrs: dict[str, bytes] = Field(default_factory=dict)
    """The extended attributes that were asked for, by their whole names."""


class FileEntry(FileStat):
    name: str
    """Relative to the listed or globbed directory. Bytes that are not UTF-8 are kept as surrogates."""


class Match(Frozen):
    """A line that `grep` found."""

    path: str
    line: int
    """From 1."""
    text: str
    """At most 4096 bytes of it, without its newline."""
    before: tuple[str, ...] = ()
    """The lines before it, as many as `context` asked for and there are: together at most 8192 bytes."""
    after: tuple[str, ...] = ()
    """The lines after it, likewise."""


class FileChange(Frozen):
    """A change that `watch` saw. `lost` means that the kernel dropped events: read the tree again."""

    change: Literal["created", "modified", "deleted", "moved_from", "moved_to", "attributes", "lost"]
    path: str
    """Relative to the watched path."""
    kind: FileKind | None = None


class Output(Frozen):
    """Bytes that a process wrote. `offset` is how many it wrote to this stream before."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    offset: int


class Gap(Frozen):
    """Output that is no longer kept: the stream continues at `offset`."""

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


ProcessEvent = Output | Gap | Exited


class ProcessInfo(Frozen):
    """A command that was started through the API, running or recently ended."""

    id: int
    """The argument of `attach` and `atoll logs`. Never used twice in one sandbox."""
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
    """What a sandbox uses now. A number that the machine does not report is unset."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    cpu_s: float | None
    pids: int | None
    disk_bytes: int
    """What it has written on top of its image."""
    oom_kills: int | None
    """How many of its processes the kernel has killed for memory."""
    cache_bytes: int | None = None
    """Of its memory, what holds contents of files, which the kernel gives back when memory is needed."""
