"""A sandbox that runs, found by its name without models, locks and drivers: for `atoll exec`, which must start at once.

Owns which sandboxes may be used so. Whatever is not plainly right gives None: then the engine looks (`store.py`), and
wakes, waits or says what is wrong. So nothing is refused here, and a rule of the store may be repeated only in its
strictest form. Imports nothing heavy.
"""

# Without `from __future__ import annotations`: the fields of a `NamedTuple` would be text that has to be compiled, and
# the first time that takes 1 ms.

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from atoll.contract.names import DEFAULT_NAMESPACE, is_name
from atoll.runtime.state.expiries import Expiry, now_ms
from atoll.runtime.state.namespaces import entry_of

MANIFEST_VERSION = 9
"""The version of the manifests that this Atoll writes and reads. Raise it as `StoredRecord.VERSION` says."""
ENDINGS = {"running": None, "sleeping": "was put to sleep", "shutdown": "was shut down"}
"""What was done to a sandbox that has ended, by the state in its manifest. None: nothing, it ended by itself."""
SANDBOX_ID = re.compile(r"atoll-[0-9a-f]{16}")
_REFUSES = b'"--refuse"'
_CGROUPS = "/sys/fs/cgroup"


class RunningSandbox(NamedTuple):
    """What a command needs to know of the sandbox that it is to run in."""

    namespace: str
    name: str
    id: str
    directory: str
    runtime: str
    run_id: str
    env: Mapping[str, str]
    user: str
    cwd: str | None
    memory_bytes: int | None
    sudo: bool
    refuses_inside: bool
    """Whether its guest answers on the proxy's port, and says how to allow what is refused."""

    def manifest_version(self) -> tuple[int, int]:
        """Differs whenever the manifest has been written. (0, 0): there is none."""
        try:
            seen = os.stat(f"{self.directory}/manifest.json", follow_symlinks=False)
        except OSError:
            return 0, 0
        return seen.st_ino, seen.st_mtime_ns

    def has_policy(self) -> bool:
        """Whether the manifest has a network policy now."""
        return (_read_manifest(self.directory) or {}).get("spec", {}).get("network") is not None

    def why_ended(self) -> str | None:
        """What was done to it, in words that follow its name. None: it has not ended, or by itself."""
        names = f"{os.path.dirname(os.path.dirname(self.directory))}/names"
        try:
            destroyed = os.readlink(
                f"{names}/{entry_of(self.namespace, self.name)}"
            ) != self.id or self.manifest_version() == (0, 0)
        except OSError:
            destroyed = True
        if destroyed:
            return "was destroyed"
        manifest = _read_manifest(self.directory)
        return ENDINGS.get(manifest["state"]) if manifest is not None else None

    def oom_kills(self) -> int | None:
        """How many of its processes the kernel has killed for memory. None: not known."""
        pid = _read(f"{self.directory}/pid").strip().decode()
        for line in _read(f"/proc/{pid}/cgroup").decode().splitlines() if pid.isdecimal() else ():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                counters = _read(f"{_CGROUPS}/memory{path}/memory.oom_control")
            elif not controllers:
                counters = _read(f"{_CGROUPS}{path}/memory.events")
            else:
                continue
            for name, _, count in (counter.partition(b" ") for counter in counters.splitlines()):
                if name == b"oom_kill":
                    return int(count)
        return None


def find_running(state_dir: str, name: str, namespace: str = DEFAULT_NAMESPACE) -> RunningSandbox | None:
    """The sandbox of this name in a namespace, if it runs or is paused, and needs nothing of this process but to pass
    on a command: it has neither a network policy nor secrets, and its lifetime is not over. None: it has, or it cannot
    be told.
    """
    try:
        seen = os.stat(state_dir)
        if seen.st_uid != os.geteuid() or seen.st_mode & 0o077 or not is_name(name):
            return None
        id = os.readlink(f"{state_dir}/names/{entry_of(namespace, name)}")
    except OSError:
        return None
    directory = f"{state_dir}/sandboxes/{id}"
    manifest = _read_manifest(directory) if SANDBOX_ID.fullmatch(id) else None
    if manifest is None or manifest["state"] != "running" or manifest["ending"]:
        return None
    if manifest["encrypted_secrets"] is not None or manifest["spec"]["network"] is not None:
        return None
    if _has_expired(f"{state_dir}/expiries/{id}", directory):
        return None
    config = _read(f"{directory}/config.json")  # of the runtimes of `drivers/oci.py`
    if not config:
        return None
    return RunningSandbox(
        namespace=namespace,
        name=name,
        id=id,
        directory=directory,
        runtime=manifest["runtime"],
        run_id=f"{id}.{manifest['run']}",
        env=manifest["env"],
        user=manifest["user"],
        cwd=manifest["cwd"],
        memory_bytes=manifest["limits"]["memory_bytes"],
        sudo=manifest["spec"]["sudo"],
        refuses_inside=_REFUSES in config,
    )


def _has_expired(entry: str, directory: str) -> bool:
    """Whether its lifetime is over: then the engine destroys it, or puts it to sleep and wakes it."""
    try:
        return Expiry.parse(os.readlink(entry)).end_ms(directory, lambda: True) <= now_ms()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # it cannot be told


def _read_manifest(directory: str) -> Any:
    """The fields of a manifest that this Atoll wrote, or one with the same version. None: it is another."""
    try:
        fields = json.loads(_read(f"{directory}/manifest.json"))
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and fields.get("version") == MANIFEST_VERSION else None


def _read(path: str) -> bytes:
    """A file. Empty: it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        with open(fd, "rb", buffering=0, closefd=False) as file:
            return file.readall() or b""
    except OSError:
        return b""
    finally:
        os.close(fd)
