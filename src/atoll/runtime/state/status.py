"""The status of a sandbox, derived from its manifest, its locks, its keeper and the driver, and why it has ended.

Used by the engine. What the manifest says alone is not the status. The first line that holds counts:

    its record cannot be read, or is missing            error, with that reason
    `busy.lock` is held                                 provisioning
    its keeper is dead, the manifest says not `running` sleeping or shutdown, as the manifest says
    its keeper is dead, and it is to sleep since its
        lifetime is over                                sleeping
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
from atoll.contract.model import Limits, RuntimeName, SandboxInfo
from atoll.drivers.locks import is_held, read_small
from atoll.runtime.state.store import Manifest, now


def describe(manifest: Manifest, directory: Path, driver: Driver | None, *, expires_at: datetime | None) -> SandboxInfo:
    """A sandbox as `list` shows it. Without a driver it cannot run: its runtime is not on this machine."""
    is_busy = is_held(directory / "busy.lock")
    return RecordedSandbox.of(manifest).now(directory, driver, is_busy=is_busy, expires_at=expires_at)


class RecordedSandbox:
    """What the manifest of a sandbox says about it, to be shown again and again while the manifest does not change."""

    __slots__ = ("_last_used", "_run_id", "info")

    def __init__(self, info: SandboxInfo, run_id: str) -> None:
        self.info = info
        """With the manifest's state as its status."""
        self._run_id = run_id
        self._last_used: datetime | None = None
        """Noted once it sleeps."""

    @classmethod
    def of(cls, manifest: Manifest) -> RecordedSandbox:
        info = SandboxInfo(
            id=manifest.id,
            namespace=manifest.namespace,
            name=manifest.spec.name,
            status=manifest.state,
            image=manifest.spec.image,
            runtime=manifest.runtime,
            limits=manifest.limits,
            user=manifest.user,
            cwd=manifest.cwd,
            created_at=manifest.created_at,
            network=manifest.spec.network,
            labels=manifest.spec.labels,
            ttl_s=manifest.spec.ttl_s,
            on_expiry=manifest.spec.on_expiry,
            ttl_renewed_by_use=manifest.spec.ttl_renewed_by_use,
            mounts=tuple(each.mount for each in manifest.mounts),
            ephemeral=manifest.spec.ephemeral,
            sudo=manifest.spec.sudo,
        )
        return cls(info, manifest.run_id)

    @property
    def runtime(self) -> RuntimeName:
        return self.info.runtime

    def now(self, directory: Path, driver: Driver | None, *, is_busy: bool, expires_at: datetime | None) -> SandboxInfo:
        """As `list` shows it now. `is_busy`: it is created or removed."""
        pid = driver.pid(directory) if driver else None
        # Its keeper has ended it: it sleeps, and its manifest says so when a process of the host has come by.
        sleeps = pid is None and self.info.on_expiry == "sleep" and expires_at is not None and expires_at <= now()
        expires_at = None if sleeps else expires_at
        if expires_at != self.info.expires_at:
            self.info = self.info.model_copy(update={"expires_at": expires_at})
        status, reason = self.info.status, None
        asleep = pid is None and status != "running"
        if asleep and self._last_used is not None and not is_busy:
            return self.info
        if is_busy:
            status = "provisioning"
        elif not asleep:
            status = "running"
            if sleeps:
                status = "sleeping"
            elif pid is None:
                status, reason = "error", ending(directory) or "its keeper has ended"
            elif driver is not None and driver.is_frozen(self._run_id):
                status = "paused"
            elif driver is not None and (since := driver.keeper.unanswered_since(directory)) is not None:
                reason = f"it has not answered since {since:%Y-%m-%d %H:%M:%S} UTC"
        used = driver.keeper.last_used(directory)[0] if driver else None
        # A warm sandbox was used before it was created under its name.
        last_used = used and max(used, self.info.created_at)
        seen = {"status": status, "reason": reason, "pid": pid, "last_used_at": last_used}
        info = self.info.model_copy(update=seen)
        if asleep and last_used is not None and not is_busy:
            self.info, self._last_used = info, last_used
        return info


def describe_unreadable(
    id: str, namespace: str, name: str, directory: Path, reason: str, driver: Driver | None
) -> SandboxInfo:
    """A sandbox without a manifest, as `list` shows it. `driver` is any that uses the keeper."""
    return SandboxInfo(
        id=id,
        namespace=namespace,
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
    return read_small(f"{directory}/ended")[:300].decode(errors="replace").strip() or None


def record_ending(directory: Path, reason: str) -> None:
    """Write why a sandbox has ended. Its keeper, which writes this otherwise, has ended too."""
    (directory / "ended").write_text(reason)
