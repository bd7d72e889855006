"""Mounting: every way to mount, and unmounting what hides or protects something."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.contract.model import RuntimeName
from atoll.drivers.bundle import MASKED_PATHS
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import python, shell

_MOUNT = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs('/tmp/m', exist_ok=True)
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_SHARED = 1, 32, 4096, 8192, 16384, 1 << 18, 1 << 20
tries = {
    'tmpfs': (b'none', b'/tmp/m', b'tmpfs', 0, b''),
    'proc': (b'proc', b'/tmp/m', b'proc', 0, b''),
    'sysfs': (b'sysfs', b'/tmp/m', b'sysfs', 0, b''),
    'cgroup': (b'cgroup', b'/tmp/m', b'cgroup', 0, b'memory'),
    'cgroup2': (b'cgroup2', b'/tmp/m', b'cgroup2', 0, b''),
    'devpts': (b'devpts', b'/tmp/m', b'devpts', 0, b''),
    'overlay': (b'overlay', b'/tmp/m', b'overlay', 0, b'lowerdir=/,upperdir=/tmp/u,workdir=/tmp/w'),
    'fuse': (b'fuse', b'/tmp/m', b'fuse', 0, b'fd=3,rootmode=40000,user_id=0,group_id=0'),
    'bind': (b'/', b'/tmp/m', None, MS_BIND, None),
    'bind a masked path': (b'/proc/kcore', b'/tmp/m', None, MS_BIND, None),
    'recursive bind': (b'/', b'/tmp/m', None, MS_BIND | MS_REC, None),
    'move': (b'/proc', b'/tmp/m', None, MS_MOVE, None),
    'proc writable': (b'proc', b'/proc', b'proc', MS_REMOUNT, b''),
    'proc/sys writable': (None, b'/proc/sys', None, MS_REMOUNT | MS_BIND, None),
    'sys writable': (None, b'/sys', None, MS_REMOUNT | MS_BIND, None),
    'guest writable': (None, b'/run/atoll/guest', None, MS_REMOUNT | MS_BIND, None),
    'root with devices and setuid': (None, b'/', None, MS_REMOUNT | MS_BIND, None),
    'shared': (None, b'/', None, MS_REC | MS_SHARED, None),
    'private': (None, b'/', None, MS_REC | MS_PRIVATE, None),
}
for name, arguments in tries.items():
    if libc.mount(*arguments) == 0:
        print('mounted', name)
for path in (b'/proc/kcore', b'/proc/keys', b'/proc/sys', b'/proc/sysrq-trigger', b'/sys/firmware', b'/proc', b'/sys',
             b'/dev/shm', b'/run/atoll/guest', b'/run', b'/usr', b'/'):
    for flags in (0, 2):
        if libc.umount2(path, flags) == 0:
            print('unmounted', path.decode())
"""


@pytest.mark.parametrize("user", ["user", "root"])
async def test_nothing_can_be_mounted_or_unmounted(prey: Sandbox, user: str) -> None:
    before = (await shell(prey, "cat /proc/self/mountinfo")).stdout
    said = await python(prey, _MOUNT, user=user)
    assert said.ok, said.stderr
    assert said.stdout == ""
    assert (await shell(prey, "cat /proc/self/mountinfo")).stdout == before


@pytest.mark.parametrize("user", ["user", "root"])
async def test_nothing_can_be_mounted_from_a_nested_user_namespace(prey: Sandbox, user: str) -> None:
    said = await shell(
        prey,
        "for t in tmpfs proc sysfs overlay cgroup2; do unshare -Urmpf mount -t $t none /mnt && echo MOUNTED $t; done; "
        "unshare -Urm mount --bind / /mnt && echo MOUNTED; unshare -Urm umount -l /proc && echo UNMOUNTED; echo end",
        user=user,
    )
    assert said.stdout == "end\n"


_CLONE3 = """
import ctypes, os, signal
CLONE3, MOUNT, NEWUSER, NEWNS = 435, 165 if os.uname().machine == 'x86_64' else 40, 0x10000000, 0x20000
call = ctypes.CDLL(None, use_errno=True).syscall
arguments = (ctypes.c_uint64 * 11)(NEWUSER | NEWNS, 0, 0, 0, signal.SIGCHLD)
child = call(CLONE3, arguments, ctypes.sizeof(arguments))
if child > 0: os.waitpid(child, 0)
elif child == 0:
    for kind in (b'tmpfs', b'proc', b'sysfs'):
        if call(MOUNT, b'none', b'/mnt', kind, 0, None) == 0: print('MOUNTED', kind, flush=True)
    os._exit(0)
print('end')
"""


@pytest.mark.parametrize("user", ["user", "root"])
async def test_nothing_can_be_mounted_from_a_namespace_that_no_filter_sees_the_making_of(
    prey: Sandbox, user: str
) -> None:
    """gVisor since 2023 makes the namespace, in its own kernel, and lets nobody mount."""
    assert (await python(prey, _CLONE3, user=user)).stdout == "end\n"


async def test_what_can_be_written_carries_no_devices_and_no_setuid(prey: Sandbox, runtime_name: RuntimeName) -> None:
    said = await shell(prey, "cat /proc/self/mounts", user="root")
    mounts = [line.split() for line in said.stdout.splitlines()]
    places = {where: set(options.split(",")) for _, where, _, options, *_ in mounts}
    assert "/" in places
    if runtime_name == "runsc":
        # gVisor does not show the flags; what they would prevent is tried in test_setuid.py and test_devices.py.
        return
    for where, options in places.items():
        # What stands below /dev are single nodes, those that every process needs.
        if "rw" in options and not where.startswith(("/proc", "/sys", "/dev/")):
            assert "nosuid" in options, where
            assert "nodev" in options or (where == "/dev" and runtime_name == "bwrap"), where


async def test_a_sandbox_has_few_file_systems_of_its_own(prey: Sandbox, runtime_name: RuntimeName) -> None:
    """Each costs kernel memory in every memory cgroup, so that many sandboxes would exhaust the machine."""
    if runtime_name not in ("crun", "runc"):
        return  # the mounts of the one are its own kernel's, those of the other bubblewrap's
    ours = {line.split()[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    said = await shell(prey, "cat /proc/self/mountinfo")
    own = {line.split()[2]: line.split(" - ")[1].split()[0] for line in said.stdout.splitlines()}
    kinds = sorted(kind for device, kind in own.items() if device not in ours)
    masks = [] if runtime_name == "crun" else ["tmpfs"] * sum(map(os.path.isdir, MASKED_PATHS))
    assert kinds == sorted(["devpts", "mqueue", "overlay", "overlay", "proc", "tmpfs", *masks])
