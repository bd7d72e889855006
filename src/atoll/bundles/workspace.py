"""The workspace of an agent: a sandbox with a bundle in it, made by the first call of a tool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, SecretStr

from atoll.bundles.manifest import BundleReason
from atoll.bundles.schemas import ToolSchema
from atoll.contract.model import Limits, RuntimeName
from atoll.contract.network import NetworkPolicy
from atoll.contract.secret import Secret
from atoll.runtime.interface import Engine
from atoll.tools.tool import StrictModel, ToolSet

MAX_LOG_BYTES = 16 * 1024
"""Of the log of a boot that an instance keeps."""

WorkspaceState = Literal["provisioning", "running", "sleeping", "failed", "destroyed"]


class BundleFile(StrictModel):
    """A stored bundle: its bytes on this machine, and what was read of them."""

    path: Path
    sha256: str
    """What the bytes must have; they are checked again at each boot."""
    tools: tuple[ToolSchema, ...]
    """As `read_bundle` gave them."""


class WorkspaceSpec(BaseModel):
    """What a workspace is made of. Values of secrets are not shown when it is printed."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, arbitrary_types_allowed=True)

    sandbox: str
    """The name of its sandbox in the engine, the same for as long as the config exists."""
    bundle: BundleFile | None = None
    """Unset: it has built-in tools only, and no sandbox is made."""
    image: str | None = None
    """Unset: the engine's default."""
    runtime: RuntimeName | None = None
    """Unset: the engine's default."""
    network: NetworkPolicy | None = None
    """The policy of its egress, once it is built. Unset: no connection leaves it."""
    limits: Limits = Limits()
    environment: Mapping[str, str] = {}
    secret_env: Mapping[str, SecretStr] = {}
    """Variables that tools see in clear, and that are shown nowhere else."""
    secrets: Mapping[str, Secret] = {}
    """Values that stay outside: tools see placeholders, replaced in requests to the hosts of each."""
    labels: Mapping[str, str] = {}
    """Of its sandbox."""
    sleep_after_s: float = 600
    """How long it may be unused before it sleeps."""
    call_timeout_s: float = 60
    """How long a call of a tool may take."""


class WorkspaceInstance(StrictModel):
    """One life of a workspace: from the boot of its sandbox to its end."""

    external_id: str
    """Known before the boot begins, and unique."""
    state: WorkspaceState
    reason: BundleReason | None = None
    """Why it failed, if its bundle is the cause."""
    message: str | None = None
    """What failed, in words. Unset: nothing did."""
    created_at: datetime
    ready_at: datetime | None = None
    """When its first call could be made. Unset: it has not been ready."""
    ended_at: datetime | None = None
    """When it failed or was destroyed. Unset: it has not ended."""
    log: str = ""
    """The end of what its boot and its tools printed, at most `MAX_LOG_BYTES`."""


OnInstance = Callable[[WorkspaceInstance], Awaitable[None]]
"""Receives an instance each time it changes, in order; called again with the same `external_id`, it replaces what was
stored."""


class Workspace:
    """The sandbox of one agent config, and its tools. Nothing is made until a tool of the bundle is called.

    `last` is the newest stored instance of this config, if there is one: a process that comes later goes on with it.
    Use one object for a sandbox at a time in a process; calls may be concurrent. `aclose` leaves the sandbox.
    """

    def __init__(
        self, engine: Engine, spec: WorkspaceSpec, record: OnInstance, *, last: WorkspaceInstance | None = None
    ) -> None:
        self.engine = engine
        self.spec = spec
        self._record = record
        self._instance = last

    @property
    def instance(self) -> WorkspaceInstance | None:
        """The newest one, as it was last recorded."""
        return self._instance

    def tools(self, names: Sequence[str]) -> ToolSet:
        """The tools of these names, of the bundle or built in. Boots nothing.

        A call of one boots the workspace if it does not run, and waits for it. A boot that fails is the result of the
        call, as an error that names the reason.

        Raises:
            InvalidRequest: a name is neither in the bundle nor built in; the message has those that are.
        """
        raise NotImplementedError

    async def boot(self) -> WorkspaceInstance:
        """Make sure that the workspace runs and its tools can be called. Does nothing if they can be.

        A workspace whose sandbox was made of another bundle, image, environment or secrets is made anew; the files in
        `/workspace` stay. The network policy and limits of a sandbox that exists are updated.

        Raises:
            BundleFailed: `reason` says at which step; the instance is recorded as failed.
            AtollError: the sandbox could not be made. The instance is recorded as failed, without a reason.
        """
        raise NotImplementedError

    async def refresh(self) -> WorkspaceInstance | None:
        """Look whether the sandbox runs or sleeps, and record it if that has changed."""
        raise NotImplementedError

    async def destroy(self) -> None:
        """End the sandbox and remove it with its files. Does nothing if there is none."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Let go of the sandbox, which goes on and sleeps when it has not been used for a while. Does not raise."""
        raise NotImplementedError
