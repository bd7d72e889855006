"""Layers: what sandboxes have written, kept apart from their images.

Owns where a layer is, how layers are composed with an image, and which of them nothing refers to. Not here: what is in
a layer, and how it is copied and removed (the driver). Used by the engine, `lifecycle/` and `archive/`.

    layers/<id>/upper/<key>    what was written to the overlay `key`
    layers/<id>/work/<key>     overlayfs's work directory, while a sandbox writes to the layer

A sandbox writes to its active layer and to no other. Committing that layer takes only a manifest that names it among
the committed layers, with a new active layer: no file moves, so it takes the same time whatever is in it, and after a
crash it is committed or not. A layer that no manifest and no checkpoint names is unreferenced, and is removed.

A process that creates something that will name a layer holds the lock shared; garbage collection holds it exclusively.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from atoll.contract.driver import Filesystem, Layer
from atoll.contract.frozen import Frozen
from atoll.contract.model import Env, Limits
from atoll.drivers import storage
from atoll.drivers.locks import lock_timeout, lock_within, open_lock
from atoll.runtime.state.mounts import PinnedMount

FLATTEN_AT = 24
"""A stack of so many committed layers is merged into one when the next is committed."""
MAX_LAYERS = 64
"""The committed layers of one sandbox. A checkpoint that would need more is refused."""
_LOCK_TIMEOUT_S = 600


class LayerRef(Frozen):
    """A committed layer."""

    id: str
    owner: int
    """The host's user id of the files that root owned in the sandbox that wrote it."""


class ResolvedSpec(Frozen):
    """A spec with its image and limits resolved: the same fields in a sandbox's manifest and in its checkpoints."""

    limits: Limits
    """In force, defaults filled in."""
    env: Env
    """The image's variables and the spec's."""
    user: str
    """The user of commands and file operations that name none."""
    cwd: str | None
    """Where commands start that name no directory. Unset: in the home of the command's user."""
    image_digest: str
    base: tuple[Filesystem, ...]
    """The image's file systems."""
    layers: tuple[LayerRef, ...] = ()
    """The committed layers above the image, the first on top."""
    mounts: tuple[PinnedMount, ...] = ()
    """Directories of the host and volumes that it sees, one that is inside another after that."""
    encrypted_secrets: str | None = None
    """Its secrets, encrypted by the vault. Unset: it has none."""

    def resolved(self) -> dict[str, Any]:
        """These fields, for another record with the same base."""
        return {name: getattr(self, name) for name in ResolvedSpec.field_names()}


class Layers:
    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "layers"
        self.lock_path = state_dir / "layers.lock"
        """A program that works on layers and may outlive this process holds it too."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, id: str) -> Path:
        return self._root / id

    def new(self) -> str:
        """Create an empty layer. Call it with the lock held."""
        id = self.new_id()
        storage.make(self.path(id))
        return id

    @staticmethod
    def new_id() -> str:
        return f"layer-{os.urandom(8).hex()}"

    def compose(self, base: Iterable[Filesystem], stack: Iterable[LayerRef]) -> tuple[Filesystem, ...]:
        """An image's file systems with the layers of `stack` above them, the first on top."""
        stack = tuple(stack)
        composed = []
        for filesystem in base:
            above = (Layer(path=self.path(each.id) / "upper" / filesystem.key, owner=each.owner) for each in stack)
            composed.append(filesystem.model_copy(update={"layers": (*above, *filesystem.layers)}))
        return tuple(composed)

    def unreferenced(self, named: set[str]) -> list[Path]:
        """All layers except those in `named`. Call it with the lock held exclusively."""
        return [self._root / id for id in os.listdir(self._root) if id not in named]

    @contextlib.asynccontextmanager
    async def lock(self, *, exclusive: bool = False, timeout_s: float | None = None) -> AsyncIterator[bool]:
        """Hold the lock of all layers: shared, to refer to layers, or exclusively, to remove unreferenced ones.

        With `timeout_s`, false is given if another process holds it for longer; without it, that is an error.

        Raises:
            SandboxError: timed out waiting for another process.
        """
        fd = open_lock(self.lock_path)
        try:
            held = await lock_within(fd, _LOCK_TIMEOUT_S if timeout_s is None else timeout_s, shared=not exclusive)
            if not held and timeout_s is None:
                raise lock_timeout(_LOCK_TIMEOUT_S, "working on the layers", self.lock_path)
            yield held
        finally:
            os.close(fd)
