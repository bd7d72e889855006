"""The status of a sandbox, derived from its manifest, its locks, its keeper and the driver, and why it has ended.

Used by the engine. What the manifest says alone is not the status. The first line that holds counts:

    its record cannot be read, or is missing            error, with that reason
    `busy.lock` is held                                 provisioning
    its keeper is dead, the manifest says not `running` sleeping or shutdown, as the manifest says
    its keeper is dead, or has written why it ended     error, with that reason
    its cgroup is frozen                                paused
    its guest has not answered for half a minute        running, with that reason
    otherwise                                           running
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path

from atoll.contract.driver import Driver
from atoll.contract.model import Limits, SandboxInfo, Status
from atoll.drivers.locks import is_held
from atoll.runtime.state.store import Manifest


def describe(manifest: Manifest, directory: Path, driver: Driver | None) -> SandboxInfo:
    """A sandbox as `list` shows it. Without a driver it cannot run: its runtime is not on this machine."""
    pid = driver.pid(directory) if driver else None
    last_used = driver.keeper.last_used(directory)[0] if driver else None
    status: Status = "running"
    reason = ending(directory)
    if is_held(directory / "busy.lock"):
        status, reason = "provisioning", None
    elif pid is None and manifest.state != "running":
        status, reason = manifest.state, None
    elif pid is None or reason is not None:
        status, reason, pid = "error", reason or "its keeper has ended", None
    elif driver is not None and driver.is_frozen(manifest.run_id):
        status = "paused"
    elif driver is not None and (since := driver.keeper.unanswered_since(directory)) is not None:
        reason = f"it has not answered since {since:%Y-%m-%d %H:%M:%S} UTC"
    return SandboxInfo(
        id=manifest.id,
        name=manifest.spec.name,
        status=status,
        reason=reason,
        image=manifest.spec.image,
        runtime=manifest.runtime,
        limits=manifest.limits,
        user=manifest.user,
        cwd=manifest.cwd,
        created_at=manifest.created_at,
        last_used_at=last_used
        and max(last_used, manifest.created_at),  # a warm sandbox was used before it was created under its name
        pid=pid,
        network=manifest.spec.network,
    )


def describe_unreadable(id: str, name: str, directory: Path, reason: str, driver: Driver | None) -> SandboxInfo:
    """A sandbox without a manifest, as `list` shows it. `driver` is any that uses the keeper."""
    return SandboxInfo(
        id=id,
        name=name,
        status="error",
        reason=reason,
        image="",
        runtime="unknown",
        limits=Limits(),
        user="",
        created_at=modified(directory / "busy.lock", directory),  # the lock is written to when the sandbox is created
        pid=driver.pid(directory) if driver else None,
    )


def modified(*paths: Path) -> datetime:
    """When the first of `paths` that can be read was last written to; the epoch if none can be."""
    for path in paths:
        with contextlib.suppress(OSError):
            return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return datetime.fromtimestamp(0, UTC)


def ending(directory: Path) -> str | None:
    """Why a sandbox has ended, as its keeper wrote it. None: it has not, or gave no reason."""
    try:
        return (directory / "ended").read_text(errors="replace")[:300].strip() or None
    except OSError:
        return None


def record_ending(directory: Path, reason: str) -> None:
    """Write why a sandbox has ended. Its keeper, which writes this otherwise, has ended too."""
    (directory / "ended").write_text(reason)
