"""What sandboxes have written, kept as layers.

Knows where a layer is, how layers stand on an image, and which of them nobody needs any more. Refuses to know what is
in one, and how it is copied (the driver's).

    layers/<id>/upper/<key>    what was written to the overlay `key`
    layers/<id>/scratch/<key>  overlayfs's own, while a sandbox writes to the layer

A sandbox writes to the layer on top of its stack and to no other. Sealing that layer is nothing but a manifest that
names it below a new top: no file moves, so it takes the same time whatever is in it, and a crash finds it sealed or
not. A layer that no manifest and no checkpoint names is nobody's.

Who makes something that will name a layer holds the store's lock together with others, who collects holds it alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from atoll.contract.driver import Filesystem, Layer
from atoll.contract.model import Env, Frozen, Limits
from atoll.drivers import storage
from atoll.drivers.locks import lock_timeout, lock_within, open_lock

FLATTEN_AT = 24
"""A stack of so many layers, above its image, is made one when the next is sealed."""
MAX_LAYERS = 64
"""Of one stack. A checkpoint that would make it longer is refused."""
_LOCK_TIMEOUT_S = 600


class LayerRef(Frozen):
    """A layer in a stack."""

    id: str
    owner: int
    """The host id of what root owned in the sandbox that wrote it."""


class ResolvedSpec(Frozen):
    """What a sandbox stands on and is run with: the same in its manifest and in its checkpoints."""

    limits: Limits
    """In force, defaults filled in."""
    env: Env
    """The image's and the spec's."""
    image_digest: str
    base: tuple[Filesystem, ...]
    """The image's."""
    layers: tuple[LayerRef, ...] = ()
    """What stands on the image and is not written to any more, the first on top."""
    encrypted_secrets: str | None = None
    """What is secret about it, as the vault has sealed it. Unset: nothing is."""

    def resolved(self) -> dict[str, Any]:
        """These fields, for another that is to stand on the same."""
        return {name: getattr(self, name) for name in ResolvedSpec.model_fields}


class Layers:
    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "layers"
        self.lock_path = state_dir / "layers.lock"
        """Who is at work on layers beyond the life of this process holds it too."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, id: str) -> Path:
        return self._root / id

    def new(self) -> str:
        """An empty layer. Call it with the store held."""
        id = self.new_id()
        storage.make(self.path(id))
        return id

    @staticmethod
    def new_id() -> str:
        return f"layer-{secrets.token_hex(8)}"

    def compose(self, base: Iterable[Filesystem], stack: Iterable[LayerRef]) -> tuple[Filesystem, ...]:
        """An image's file systems with `stack`, the first on top, standing on them."""
        stack = tuple(stack)
        composed = []
        for filesystem in base:
            above = (Layer(path=self.path(each.id) / "upper" / filesystem.key, owner=each.owner) for each in stack)
            composed.append(filesystem.model_copy(update={"layers": (*above, *filesystem.layers)}))
        return tuple(composed)

    def unreferenced(self, named: set[str]) -> list[Path]:
        """Layers that are nobody's, `named` being all that somebody names. Call it with the store held alone."""
        return [self._root / id for id in os.listdir(self._root) if id not in named]

    @contextlib.asynccontextmanager
    async def lock(self, *, exclusive: bool = False, timeout_s: float | None = None) -> AsyncIterator[bool]:
        """Hold the store: with others who make something, or alone, to take away what nobody names.

        With `timeout_s`, false is given to who could not have it within that time.
        """
        fd = open_lock(self.lock_path)
        try:
            held = await lock_within(fd, _LOCK_TIMEOUT_S if timeout_s is None else timeout_s, shared=not exclusive)
            if not held and timeout_s is None:
                raise lock_timeout(_LOCK_TIMEOUT_S, "working on the layers", self.lock_path)
            yield held
        finally:
            os.close(fd)
