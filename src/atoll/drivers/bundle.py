"""The OCI configuration of a sandbox: `config.json` of a bundle, and what is common to all isolation here.

Owns which capabilities the guest has, which paths of /proc and /sys are masked, which file systems are mounted inside,
and the guest's own arguments. Not here: system calls (`seccomp.py`), the runtime's command line (`oci.py`), assembling
the root file system (`keeper/launch.c`).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence

from atoll.contract.driver import Launch
from atoll.contract.inside import DEFAULT_PATH, EGRESS_PORT, GUEST
from atoll.drivers import seccomp
from atoll.drivers.keeper_command import ID_COUNT, HostFile
from atoll.drivers.machine import Machine

LINUX_CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        "CHOWN DAC_OVERRIDE FOWNER FSETID KILL NET_BIND_SERVICE SETFCAP SETGID SETPCAP SETUID SYS_CHROOT".split()
    )
]
"""What the guest and a package manager need. Without SYS_PTRACE no process inside can trace the guest."""
MASKED_PATHS = """
/proc/acpi /proc/asound /proc/config.gz /proc/diskstats /proc/interrupts /proc/kcore /proc/keys /proc/latency_stats
/proc/locks /proc/partitions /proc/pressure/cpu /proc/pressure/io /proc/pressure/irq /proc/pressure/memory
/proc/sched_debug /proc/scsi /proc/timer_list /proc/timer_stats
""".split()
"""A runtime mounts /dev/null over a file, and a tmpfs over a directory, unless `mounts_in_proc`."""
_MASKED_IN_SYS = "/sys/devices/virtual/powercap /sys/firmware /sys/kernel/debug".split()
SYS_PATHS = "/sys/devices/system/cpu /sys/devices/system/node /sys/kernel/mm/transparent_hugepage".split()
"""All that a sandbox sees of the host's /sys: how many processors, how memory is managed. No disks, buses, drivers."""
SCRATCH_BYTES = 64 * 1024 * 1024
"""The size of /dev, /dev/shm and /run together, in one tmpfs that the keeper makes (`keeper/launch.c`)."""
MOUNTS = "mounts"
"""The directory below the cover in which the keeper has made the mounts of a sandbox, by number."""
READ_ONLY_PATHS = "/proc/bus /proc/fs /proc/irq /proc/sys /proc/sysrq-trigger".split()
MAX_TERMINALS = 256
"""Of a sandbox. All sandboxes of a machine share 3,072 (`kernel.pty.max` less what is reserved for the host)."""
GUEST_ENVIRONMENT = {"PATH": DEFAULT_PATH, "HOME": "/root"}
"""With HOME given, a runtime does not look it up in the image's /etc/passwd."""


def guest_command(launch: Launch, machine: Machine, *, refuse: bool = True) -> list[str]:
    """The command line of the guest, inside. `refuse`: it answers on the egress proxy's port while that is unserved."""
    user_ids = "0:0" if machine.single_id else "1000:1000"
    command = [GUEST, "--home", f"{user_ids}:/home/user", "--user", f"user:{user_ids}:/home/user"]
    if launch.limits.open_files is not None:
        command += ["--open-files", str(launch.limits.open_files)]
    if refuse:
        command += ["--refuse", str(EGRESS_PORT)]
    return command


def config(
    launch: Launch,
    machine: Machine,
    *,
    cover: str,
    files: Sequence[HostFile],
    cgroup: str | None,
    own_user_namespace: bool,
    own_kernel: bool,
    mounts_in_proc: bool,
    refuse: bool,
    seccomp_annotation: tuple[str, bytes] | None,
) -> dict[str, object]:
    """`config.json`.

    `cgroup`: where the runtime puts the sandbox; None: it starts there. `own_user_namespace`: the runtime makes the
    user namespace; else it joins the keeper's. `own_kernel`: it interprets the filter, /dev, /run and /sys are its own,
    and `files` are bound; else the keeper has made all of them. `mounts_in_proc`: it accepts mounts below /proc.
    `refuse`: as `guest_command`. `seccomp_annotation`: its key and the compiled filter, for a runtime that takes one.
    """
    namespaces = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]
    covered = [path for path in MASKED_PATHS if mounts_in_proc and os.path.isdir(path)]
    mounts = _own_mounts(cover, files, machine.single_id) if own_kernel else _mounts(cover, machine.single_id, covered)
    for number, mount in enumerate(launch.mounts):
        access = "ro" if mount.read_only else "rw"
        mounts.append(_bind(f"{cover}/{MOUNTS}/{number}", mount.target, access=access))
    linux: dict[str, object] = {
        "namespaces": namespaces,
        "maskedPaths": [path for path in MASKED_PATHS if path not in covered] + (_MASKED_IN_SYS if own_kernel else []),
        "readonlyPaths": READ_ONLY_PATHS,
        "seccomp": seccomp.denials() if own_kernel else seccomp.profile(),
    }
    if machine.root:
        namespaces.append({"type": "user"} | ({} if own_user_namespace else {"path": f"{cover}/userns"}))
        mapping = [{"containerID": 0, "hostID": launch.id_base, "size": ID_COUNT}]
        linux |= {"uidMappings": mapping, "gidMappings": mapping}
    if cgroup is not None:
        linux["cgroupsPath"] = cgroup
    if machine.cgroup_mode == "v2":
        namespaces.append({"type": "cgroup"})
    annotations = {}
    if seccomp_annotation is not None:
        key, program = seccomp_annotation
        annotations[key] = base64.b64encode(program).decode()
    return {
        "ociVersion": "1.0.2",
        "hostname": launch.hostname,
        "annotations": annotations,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": guest_command(launch, machine, refuse=refuse),
            "env": [f"{name}={value}" for name, value in GUEST_ENVIRONMENT.items()],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), LINUX_CAPABILITIES),
            "noNewPrivileges": True,
        },
        "root": {"path": f"{cover}/root", "readonly": False},
        "mounts": mounts,
        "linux": linux,
    }


def _mounts(cover: str, single_id: bool, covered: Sequence[str]) -> list[dict[str, object]]:
    """The file systems that belong to namespaces of the sandbox; the keeper has mounted /dev, /run and /sys.

    That of the message queues comes with the IPC namespace: without its mount, nothing would be saved.
    """
    return [
        _PROC,
        _devpts(single_id),
        _MQUEUE,
        *(_bind(f"{cover}/empty", path, "noexec") for path in covered),
    ]


def _own_mounts(cover: str, files: Sequence[HostFile], single_id: bool) -> list[dict[str, object]]:
    """File systems of the runtime's own kernel."""
    shm, run = ["mode=1777", "size=64m"], ["nosuid", "nodev", "mode=755", "size=64m"]
    return [
        _PROC,
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
        _devpts(single_id),
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*_SAFE, *shm]},
        _MQUEUE,
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*_SAFE, "ro"]},
        {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": run},
        *(_bind(f"{cover}/{file.name}", file.destination) for file in files),
    ]


_SAFE = ["nosuid", "noexec", "nodev"]
_PROC: dict[str, object] = {"destination": "/proc", "type": "proc", "source": "proc", "options": _SAFE}
_MQUEUE: dict[str, object] = {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": _SAFE}


def _devpts(single_id: bool) -> dict[str, object]:
    options = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", f"max={MAX_TERMINALS}"]
    return {
        "destination": "/dev/pts",
        "type": "devpts",
        "source": "devpts",
        "options": options if single_id else [*options, "gid=5"],
    }


def _bind(source: str, destination: str, *more: str, access: str = "ro") -> dict[str, object]:
    options = ["bind", access, "nosuid", "nodev", *more]
    return {"destination": destination, "type": "bind", "source": source, "options": options}
