"""Writing to the kernel through /proc and /sys: sysrq, core_pattern, sysctls, cgroup release agents, uevent helpers."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.contract.model import RuntimeName
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import python, shell

TARGETS = (
    "/proc/sysrq-trigger",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/hotplug",
    "/proc/sys/kernel/sysrq",
    "/proc/sys/kernel/randomize_va_space",
    "/proc/sys/kernel/unprivileged_bpf_disabled",
    "/proc/sys/kernel/domainname",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/fs/suid_dumpable",
    "/proc/sys/fs/protected_symlinks",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/panic_on_oom",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv4/ip_unprivileged_port_start",
    "/proc/irq/default_smp_affinity",
    "/proc/bus/pci/00/00.0",
    "/proc/mtrr",
    "/proc/scsi/scsi",
    "/proc/timer_stats",
    "/proc/1/oom_score_adj",
    "/proc/1/uid_map",
    "/proc/self/uid_map",
    "/proc/self/gid_map",
    "/proc/self/setgroups",
    "/proc/1/attr/current",
    "/sys/kernel/uevent_helper",
    "/sys/kernel/mm/ksm/run",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/debug/tracing/kprobe_events",
    "/sys/kernel/security/lockdown",
    "/sys/power/state",
    "/sys/power/disk",
    "/sys/class/mem/null/uevent",
    "/sys/devices/virtual/mem/null/uevent",
    "/sys/module/kernel/parameters/panic",
    "/sys/fs/cgroup/release_agent",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/firmware/efi/efivars/x",
    "/sys/bus/pci/rescan",
)

# Each value is harmless, and most are not even valid, should a write ever be let through.
_WRITE = """
import os, sys
for path in sys.argv[1:]:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT):
        try:
            fd = os.open(path, flags | os.O_NONBLOCK, 0o600)
        except OSError:
            continue
        try:
            os.write(fd, b'atoll-was-here')
        except OSError as error:
            # EINVAL means that it looked at the value.
            if error.errno in (1, 13, 30): continue
            print(path, 'looked at it:', error.strerror)
        else:
            print(path, 'written')
"""


@pytest.mark.parametrize("user", ["user", "root"])
async def test_nothing_of_the_kernel_can_be_written(prey: Sandbox, runtime_name: RuntimeName, user: str) -> None:
    core_pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    said = await python(prey, _WRITE, *TARGETS, user=user)
    assert said.ok, said.stderr
    written = set(said.stdout.splitlines())
    # Id maps are looked at before they are refused: they are set already. That root may offer its own sandbox to the
    # killer is its own affair. With gVisor all of these are files of a kernel that is the sandbox's own; that a value
    # reaches it is no attack on the host.
    own = ("/proc/self/", "/proc/1/uid_map looked") + (("/proc/1/oom_score_adj",) if user == "root" else ())
    reached = {line for line in written if not line.startswith(own)}
    if runtime_name == "runsc":
        reached = {
            line for line in reached if not line.startswith(("/proc/sys/", "/proc/sysrq-trigger", "/sys/fs/cgroup/"))
        }
    assert not reached
    assert Path("/proc/sys/kernel/core_pattern").read_text() == core_pattern


async def test_no_cgroup_is_mounted_writable(prey: Sandbox) -> None:
    said = await shell(
        prey, "mkdir /sys/fs/cgroup/x /sys/fs/cgroup/*/x 2>/dev/null && echo MADE; cat /proc/mounts", user="root"
    )
    assert "MADE" not in said.stdout
    writable = [line for line in said.stdout.splitlines() if " cgroup" in line and " rw," in line]
    assert not writable


@pytest.mark.parametrize(
    "path", ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/sys/firmware"]
)
async def test_masked_paths_show_nothing(prey: Sandbox, path: str) -> None:
    said = await shell(
        prey, f"if [ -d {path} ]; then find {path} -mindepth 1; else head -c 64 {path}; fi 2>/dev/null", user="root"
    )
    assert said.stdout == ""


async def test_a_crash_writes_no_core_outside_and_none_inside(prey: Sandbox) -> None:
    said = await shell(
        prey, "ulimit -c unlimited; cd /tmp; sh -c 'kill -SEGV $$'; find /tmp -name 'core*'", user="user"
    )
    assert said.stdout == ""
