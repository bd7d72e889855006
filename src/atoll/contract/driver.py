"""The contract of a driver: what differs between kinds of isolation, and nothing else.

Three protocols. `Driver` starts the guest in isolation, with its standard streams on the sandbox's FIFOs, and stops it.
`LayerStore` copies, merges and removes layers (containerd calls this a snapshotter). `KeeperClient` talks to a running
keeper; every driver that starts its sandboxes through the keeper shares one implementation.

Not here: commands, files, names, where images come from, the protocol of the guest. Used by `runtime/`; implemented in
`drivers/`, or by another package that registers in the entry-point group `atoll.drivers` (`drivers/registry.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits, RuntimeName, Usage

if TYPE_CHECKING:
    from anyio.abc import ByteStream


class Capabilities(Frozen):
    """What a runtime on this machine can do. What is false is not offered, and refused when it is requested."""

    memory_limit: bool
    cpu_limit: bool
    pids_limit: bool
    id_range: bool
    """Each sandbox has its own range of host user ids. False: sandboxes share the ids of the user who runs Atoll."""
    several_users: bool = True
    """Users inside have ids of their own. False: there is one id inside, root's, and `user` is a name of it."""
    process_oom: bool
    """Reaching the memory limit ends a process. False: it ends the sandbox."""
    memory_checkpoint: bool
    """Running processes can be saved to disk and resumed. False: a checkpoint holds files only."""
    saves_epoll_waiters: bool
    """`save` also works while a process waits for a TCP socket with `epoll`. False: it would fail and end the sandbox.
    True without `memory_checkpoint`, where nothing is saved."""
    terminal_keys: bool
    """Keys and sizes of a terminal have a meaning: Ctrl-C, Ctrl-D, SIGWINCH. False: they are bytes and numbers."""
    freeze: bool
    """All processes of a sandbox can be frozen in memory at once."""
    mounts: bool = False
    """Directories of the host can be mounted (`Launch.mounts`)."""
    sudo: bool = False
    """The guest can start commands as root for another user (`SandboxSpec.sudo`): inside, only root
    writes to /run, where its supervisors listen."""
    disk_limit: bool
    """The file system of the layers can limit what is written to one. `atoll storage` shows more."""
    chosen_by_default: bool
    """A sandbox that names no runtime may get this one. False: it is used only when it is requested by name."""


class Diagnostic(Frozen):
    """One fact that `atoll doctor` reports."""

    topic: str
    ok: bool
    detail: str
    fix: str | None = None
    """The command that fixes it. Unset when nothing is wrong, or no command fixes it."""


class Layer(Frozen):
    """A directory that a sandbox sees and never changes: a committed layer, or a part of an image."""

    path: Path
    owner: int | Literal["machine"] = 0
    """The id on disk that becomes root inside: 0 in an image, the first id of its range in a sandbox's layer.
    `machine`: a directory of the machine itself; its owners do not exist inside, so that only world-readable files can
    be read."""


class Filesystem(Frozen):
    """One overlay of a sandbox: `layers`, read-only, the first on top, below a writable upper directory."""

    target: str
    """Where it is mounted inside: `/`, or a directory below it such as `/usr`."""
    key: str
    """Its directory below `upper/` and `work/`."""
    layers: tuple[Layer, ...]


class MountOwner(Frozen):
    """Whose files in a mounted directory are whose inside, where `Capabilities.id_range` holds."""

    uid: int
    gid: int
    """The owner of the directory on the host."""
    uid_inside: int
    gid_inside: int
    """The user of the sandbox that has the owner's files."""


class BindMount(Frozen):
    """A directory of the host that a sandbox sees, without the mounts below it, set-uid programs and devices."""

    source: Path
    """Absolute. If a symlink is found in it, the launch fails."""
    target: str
    """Where it is inside. The directory is made if it is missing."""
    read_only: bool
    owner: MountOwner | None = None
    """All other ids inside are stored as those of the range `MOUNT_IDS`. Unset: all ids are."""


class ProcessImage(Frozen):
    """The saved processes of a sandbox, as `Driver.save` wrote them."""

    path: Path
    hostname: str
    """The hostname that the processes had when they were saved."""


class Lifetime(Frozen):
    """When a keeper ends a sandbox by itself."""

    ends_ms: int
    """By the clock of the day, in milliseconds since 1970."""
    renewal_ms: int = 0
    """It goes on for so long after each use. 0: use does not matter."""
    freezes: bool = False
    """True: the sandbox is frozen then, since its processes are to be saved. False: they are ended."""


class Launch(Frozen):
    """All that a driver needs to start a sandbox."""

    id: str
    """Never used twice on a machine."""
    directory: Path
    """The sandbox's own directory. The driver makes what it needs in it; the engine removes all of it."""
    active_layer: Path
    """The layer that the sandbox writes to. The driver makes `upper/` and `work/` in it where they are missing."""
    hostname: str
    filesystems: tuple[Filesystem, ...]
    """`/` first."""
    limits: Limits
    """With defaults filled in: what is unset here is not limited."""
    id_base: int
    """The first host user id of the sandbox's range, where `Capabilities.id_range` holds."""
    ephemeral: bool
    memory: ProcessImage | None = None
    """The saved processes to resume. Unset: start with no process but the guest."""
    pause_after_s: float | None = None
    """How long the sandbox may be unused before it is frozen. Unset: it is never frozen by itself."""
    lifetime: Lifetime | None = None
    """When the keeper ends the sandbox. Unset: never."""
    mounts: tuple[BindMount, ...] = ()
    """Empty unless `Capabilities.mounts` holds. Saved processes resume only with the same."""
    wait_ready: bool = False
    """True: `launch` returns when the guest has answered. False: it returns earlier, and the first client that connects
    gets the error if the start failed."""


class LayerStore(Protocol):
    """Copies, merges, measures and removes layers, and whatever else sandboxes wrote.

    All methods may be called from several host processes at once, for different paths.
    """

    async def copy(self, source: Path, target: Path, *, earlier: Path | None = None) -> None:
        """Make `target` a layer with the contents of `source`, which nothing writes to meanwhile.

        All attributes that overlayfs keeps are copied. `earlier` is an older copy of the same layer: files that have
        not changed since may be shared with it. Where the file system has snapshots, this takes constant time.

        Raises:
            SandboxError: the copy is incomplete; the caller removes `target`.
        """
        ...

    async def merge(self, layers: Sequence[Layer], target: Path, owner: int) -> None:
        """Make `target` one layer that shows the same as `layers` do together, the first on top.

        Files may be shared with `layers`. `owner` is the id on disk of root inside.

        Raises:
            SandboxError: the merge is incomplete; the caller removes `target`.
        """
        ...

    async def remove(self, *paths: Path) -> None:
        """Remove trees that sandboxes wrote. A path that does not exist is no error.

        Raises:
            SandboxError: removing took too long.
        """
        ...

    async def size(self, path: Path) -> int:
        """The bytes that a tree occupies on disk."""
        ...

    def owner_command(self, *command: str) -> list[str]:
        """The command line that runs `command` as the owner of all files that sandboxes write.

        As root the program runs as root, and ids are the host's. As an unprivileged user it runs as root of the
        sandboxes' user namespace, and ids are those inside. The started process becomes the program: a signal to it
        reaches it.
        """
        ...


class KeeperClient(Protocol):
    """Requests to the keeper of a running sandbox, which is found by the sandbox's directory.

    The keeper is the process outside that holds the guest's stream (containerd: shim, Podman: conmon).
    """

    async def freeze(self, directory: Path) -> None:
        """Freeze every process of the sandbox until it is next used. When this returns, none runs any more.

        Raises:
            Unenforceable: `Capabilities.freeze` is false.
            SandboxDied: the sandbox has ended.
            SandboxError: the processes could not be frozen.
        """
        ...

    def frozen(self, directory: Path) -> AbstractAsyncContextManager[None]:
        """As `freeze`, but requests of clients wait. The sandbox resumes when the context, or this process, ends.

        Raises:
            As `freeze`.
        """
        ...

    def quiesced(self, directory: Path) -> AbstractAsyncContextManager[ByteStream]:
        """While the context lasts, no frame of another client reaches the guest, and it has received all earlier ones.

        The processes run on; network streams are reset. Gives the connection that holds the others back, on which the
        keeper has said HELLO.

        Raises:
            SandboxDied: the sandbox has ended.
            SandboxError: the guest did not receive the frames in time.
        """
        ...

    async def reconfigure(
        self, directory: Path, *, ephemeral: bool, pause_after_s: float | None, lifetime: Lifetime | None
    ) -> None:
        """Apply these options, each as in `Launch`, to a running sandbox. If `ephemeral`, a client must be connected.

        Neither resumes a paused sandbox nor counts as use.

        Raises:
            SandboxDied: the sandbox has ended.
        """
        ...

    def last_used(self, directory: Path) -> tuple[datetime | None, bool]:
        """When the sandbox was last started or used, to about a second, and whether an operation is running now.

        None: it was never started.
        """
        ...

    def unanswered_since(self, directory: Path) -> datetime | None:
        """Since when a sandbox that runs has not answered, if clients waited for it longer than its keeper lets them.

        None: it answers, as far as is known.
        """
        ...


class Driver(Protocol):
    """One runtime on this machine.

    All methods may be called from several host processes at once for different sandboxes, and `stop` also for the same
    one.
    """

    @property
    def name(self) -> RuntimeName: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def layers(self) -> LayerStore: ...

    @property
    def keeper(self) -> KeeperClient: ...

    async def launch(self, launch: Launch) -> None:
        """Start the guest and its keeper. When this returns, `directory/sock` accepts clients.

        The sandbox then outlives the calling process. If this is cancelled or fails, `stop` removes what was started.

        Raises:
            Unenforceable: a limit cannot be enforced here, or a directory cannot be mounted for writing.
            LaunchFailed: the keeper did not start. Without `wait_ready` and `memory`, an error of the runtime comes
                later, to the first client that connects.
        """
        ...

    async def stop(self, id: str, directory: Path) -> None:
        """End every process of the sandbox and free its cgroups, mounts and locks. `directory` stays.

        Works at any moment, after any interrupted `launch`, and when nothing runs.

        Raises:
            SandboxError: a process does not end.
        """
        ...

    async def save(self, id: str, directory: Path, image: Path, *, lock: int) -> None:
        """Write the sandbox's processes to the directory `image`, and end them. Requires `memory_checkpoint`.

        The open file `lock` stays locked until no program works on that any more, even if the calling process dies.
        Clients lose their connections. A process that lives as long as its connection ends when `image` is resumed.

        Raises:
            Unenforceable: `Capabilities.memory_checkpoint` is false.
            NotCheckpointable: a process holds something that cannot be saved. They go on, also if they were frozen.
            SandboxError: the processes could not be saved. They may have ended.
        """
        ...

    def setting_hostname(
        self, id: str, directory: Path, hostname: str, id_base: int
    ) -> AbstractAsyncContextManager[None]:
        """Change the hostname of a running sandbox while the context's body runs. It is set when the context ends.

        Raises:
            LaunchFailed: the hostname could not be set, or the sandbox does not run.
        """
        ...

    async def change_limits(self, id: str, active_layer: Path, changes: Limits, *, running: bool) -> None:
        """Enforce `changes`, those limits that are set, instead of the former ones. The others stay.

        Of one that does not run, the caller enforces them with the next `launch`: here they are checked. Lowering a
        limit ends no process. When this fails, none of them may have changed, or some.

        Raises:
            Unenforceable: one cannot be enforced, or not while the sandbox runs.
            InvalidRequest: it uses more memory than the new limit.
        """
        ...

    def pid(self, directory: Path) -> int | None:
        """The host process id of the sandbox's first process. None: the sandbox does not run."""
        ...

    def is_frozen(self, id: str) -> bool:
        """Whether the sandbox's processes are frozen. False where `Capabilities.freeze` is."""
        ...

    async def usage(self, id: str, active_layer: Path | None) -> Usage:
        """What the sandbox uses now. A field is None where the machine does not account for it.

        Without a layer the disk, which takes a walk through all files, is not measured, and is 0.
        """
        ...

    def oom_kills(self, id: str) -> int | None:
        """How many processes of the sandbox the kernel has killed for lack of memory. None: not accounted for.

        Cheap: called around each command.
        """
        ...
