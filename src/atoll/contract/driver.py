"""What isolation must offer: few verbs, written once per kind of isolation.

A driver starts the guest in isolation, with its two ends on the sandbox's FIFOs, and ends it. It knows runtimes,
namespaces, cgroups and mounts. It refuses to know commands, files, names, images' origins and the protocol.
Above it stands `runtime/`, below it an OCI runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from atoll.contract.model import Frozen, Limits, RuntimeName, Usage


class Capabilities(Frozen):
    """What a runtime on this machine can do. What is false is not offered and refused when asked for."""

    memory_limit: bool
    cpu_limit: bool
    pids_limit: bool
    id_range: bool
    """Each sandbox has a range of host user ids of its own. False: one id of the host stands for all inside."""
    process_oom: bool
    """Reaching the memory limit ends a process. False: it ends the sandbox."""
    memory_checkpoint: bool
    freeze: bool
    disk_limit: bool
    """The file system that the layers stand on can bound what is written to one. `atoll storage` tells more."""


class Diagnostic(Frozen):
    """One thing that `doctor` looked at."""

    topic: str
    ok: bool
    detail: str
    fix: str | None = None
    """The command that mends it. Unset when there is nothing to mend, or no command does."""


class Layer(Frozen):
    """A directory that a sandbox sees and never changes."""

    path: Path
    owner: int | Literal["machine"] = 0
    """The id on disk of what root inside is to own: 0 in an image, the first of its range in what a sandbox left.
    `machine`: these are the machine's own directories; what belongs to anybody there belongs to nobody inside, so that
    only what everybody may read can be read."""


class Filesystem(Frozen):
    """One overlay of a sandbox: `layers` read-only, the first on top, under a writable upper of its own."""

    target: str
    """Where it stands inside: `/`, or a directory below it such as `/usr`."""
    key: str
    """Its directory below `upper/` and `work/`."""
    layers: tuple[Layer, ...]


class ProcessImage(Frozen):
    """What `save` wrote of a sandbox's processes."""

    path: Path
    hostname: str
    """That they knew."""


class Launch(Frozen):
    """All that a driver needs to start a sandbox."""

    id: str
    """Never used twice on a machine."""
    directory: Path
    """The sandbox's own. The driver makes what it needs in it; `destroy` removes all of it."""
    active_layer: Path
    """The layer that it writes to. The driver makes `upper/` and `work/` in it where they are missing."""
    hostname: str
    filesystems: tuple[Filesystem, ...]
    """`/` first."""
    limits: Limits
    """Resolved: what is unset here is not limited."""
    id_base: int
    """The first host user id of the sandbox's range, where `Capabilities.id_range` holds."""
    ephemeral: bool
    memory: ProcessImage | None = None
    """The processes that are to go on. Unset: it begins with none."""
    pause_after_s: float | None = None
    """How long it may be unused before it is frozen. Unset: for ever."""
    wait_ready: bool = False
    """True: `launch` returns when the guest is there. Unset: whoever connects first is told whether it is."""


class Driver(Protocol):
    """One runtime on this machine.

    All methods may be called from several host processes at once for different sandboxes, and `destroy` also for
    the same one.
    """

    @property
    def name(self) -> RuntimeName: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def launch(self, launch: Launch) -> None:
        """Start the guest and its keeper. When it returns, `directory/sock` accepts clients.

        The sandbox then lives on without the calling process. Cancelling leaves something that `destroy` removes.

        Raises:
            LaunchFailed: the runtime said no, with what it said; or it said nothing for too long.
        """
        ...

    async def stop(self, id: str, directory: Path) -> None:
        """End every process of the sandbox and free what it holds on the machine. `directory` stays.

        Works at any moment, on anything that `launch` may have left, and when there is nothing to do.
        """
        ...

    async def destroy(self, id: str, directory: Path, *more: Path) -> None:
        """`stop`, and remove `directory` and what is in `more`."""
        ...

    def setting_hostname(
        self, id: str, directory: Path, hostname: str, id_base: int
    ) -> AbstractAsyncContextManager[None]:
        """Give a sandbox that runs another hostname, while the caller does something else. It has it at the end.

        Raises:
            LaunchFailed: it could not be done, or the sandbox does not run.
        """
        ...

    async def reconfigure(self, directory: Path, *, ephemeral: bool, pause_after_s: float | None) -> None:
        """Have a sandbox that runs be from now on as if it had been launched so. An `ephemeral` one has a client.

        Raises:
            SandboxDied: it has ended.
        """
        ...

    async def copy(self, source: Path, target: Path, *, earlier: Path | None = None) -> None:
        """Make `target` a layer that holds what one does that nobody writes to meanwhile, with all of overlayfs's own.

        `earlier` is a copy that was made of the same layer before: what has not changed since may be shared with it.
        Where the file system can, it is a snapshot, and takes the same time whatever is in the layer.

        Raises:
            SandboxError: it could not be copied whole; what there is of `target` is the caller's to remove.
        """
        ...

    async def merge(self, layers: Sequence[Layer], target: Path, owner: int) -> None:
        """Make `target` a layer of what is seen of several sealed ones, the first on top. It may share files with them.

        Raises:
            SandboxError: as with `copy`.
        """
        ...

    async def remove(self, *paths: Path) -> None:
        """Remove trees that sandboxes have written."""
        ...

    def in_userns(self, *command: str) -> list[str]:
        """The command line that runs a program as whoever may read, make and give away all that sandboxes write.

        As root that is root, and ids are the host's. As an ordinary user it is root in the user namespace of sandboxes,
        where ids are what they are inside. The program is the process that is started: to end that ends it.
        """
        ...

    async def freeze(self, directory: Path) -> None:
        """Have every process of the sandbox stand still until it is next used. When it returns, none runs any more.

        Raises:
            Unenforceable: `Capabilities.freeze` is false.
            SandboxError: they do not stand still.
        """
        ...

    def frozen(self, directory: Path) -> AbstractAsyncContextManager[None]:
        """As `freeze`, but whoever uses it meanwhile waits. It goes on when the context, or this process, ends."""
        ...

    async def save(self, id: str, directory: Path, image: Path, *, lock: int) -> None:
        """Write the sandbox's processes to the directory `image`, and end them. Only where `memory_checkpoint` holds.

        The open file `lock` stays locked until no program is at that any more, also when the calling process dies.
        Clients lose their connections. What is not kept alive beyond its connection ends when `image` goes on.

        Raises:
            SandboxError: it could not be done.
        """
        ...

    def loses_waiting(self) -> bool:
        """Whether `save` fails, and the sandbox ends, if a process waits for a TCP socket with `epoll`."""
        ...

    def last_used(self, directory: Path) -> tuple[datetime | None, bool]:
        """When the sandbox was last started or asked something, to about a second.

        None: it never was. Also whether it is at work on something now.
        """
        ...

    def is_frozen(self, id: str) -> bool: ...

    def pid(self, directory: Path) -> int | None:
        """The sandbox's process on the host, if it runs."""
        ...

    async def size(self, path: Path) -> int:
        """The bytes that a tree takes up."""
        ...

    async def usage(self, id: str, active_layer: Path) -> Usage:
        """What the sandbox uses now, writing to the layer `active_layer`."""
        ...

    def oom_kills(self, id: str) -> int | None:
        """How many processes of the sandbox the kernel has ended for memory. Cheap: called around each command."""
        ...
