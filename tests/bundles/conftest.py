from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll.bundles.build import remove_built
from atoll.bundles.workspace import BundleFile, Workspace, WorkspaceInstance, WorkspaceSpec
from atoll.runtime.interface import Engine


class Recorder:
    """What a workspace has recorded about itself."""

    def __init__(self) -> None:
        self.instances: list[WorkspaceInstance] = []

    async def __call__(self, instance: WorkspaceInstance) -> None:
        self.instances.append(instance)

    @property
    def states(self) -> list[str]:
        """Each state that differs from the one before."""
        found = [each.state for each in self.instances]
        return [state for at, state in enumerate(found) if at == 0 or found[at - 1] != state]


MakeWorkspace = Callable[..., tuple[Workspace, Recorder]]


@pytest.fixture
async def workspaces(engine: Engine) -> AsyncIterator[MakeWorkspace]:
    """Makes workspaces, which are removed at the end with what was built for them."""
    async with AsyncExitStack() as undo:

        def make(name: str, bundle: BundleFile | None, **options: Any) -> tuple[Workspace, Recorder]:
            recorder = Recorder()
            given = {key: options.pop(key) for key in ("last", "admit", "admit_volume") if key in options}
            spec = WorkspaceSpec(sandbox=name, bundle=bundle, **options)
            workspace = Workspace(engine, spec, recorder, **given)
            undo.push_async_callback(workspace.destroy)
            return workspace, recorder

        yield make
    for checkpoint in await engine.checkpoints():
        if (checkpoint.label or "").startswith("bundle-"):
            await remove_built(engine, (checkpoint.label or "").split("-")[1])


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "made.tgz"
