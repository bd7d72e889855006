"""What the kernel tells about itself and the machine: addresses, messages, other processes, other users' memory."""

from __future__ import annotations

import os

import pytest

from atoll.contract.model import RuntimeName
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import shell


@pytest.mark.parametrize("user", ["user", "root"])
async def test_addresses_of_the_kernel_are_not_told(prey: Sandbox, user: str) -> None:
    said = await shell(
        prey,
        "head -n 400 /proc/kallsyms; head -n 200 /proc/modules; cat /proc/*/stack /sys/module/*/sections/.text",
        user=user,
    )
    addresses = {
        word for line in said.stdout.splitlines() for word in line.split() if len(word.removeprefix("0x")) == 16
    }
    assert {int(word, 16) for word in addresses if all(c in "0123456789abcdefx" for c in word)} <= {0}


@pytest.mark.parametrize("user", ["user", "root"])
async def test_memory_and_messages_of_the_kernel_cannot_be_read(prey: Sandbox, user: str) -> None:
    said = await shell(
        prey,
        "for f in /proc/kcore /proc/kmsg /dev/kmsg /dev/mem /dev/port /proc/kpagecount /proc/kpageflags /proc/vmcore "
        "/proc/slabinfo /proc/vmallocinfo /proc/pagetypeinfo /boot/System.map*; "
        "do timeout 2 head -c 16 $f; done 2>/dev/null | od -c | head -2; dmesg 2>/dev/null | head -c 200",
        user=user,
    )
    # gVisor invents a boot log of its own.
    assert len(said.stdout) <= 8 or "Starting gVisor" in said.stdout, said.stdout


@pytest.mark.parametrize("user", ["user", "root"])
async def test_disks_locks_and_the_kernels_configuration_are_not_shown(
    prey: Sandbox, runtime_name: RuntimeName, user: str
) -> None:
    files = "locks diskstats partitions config.gz pressure/cpu pressure/io pressure/memory"
    said = await shell(prey, f"cd /proc && cat {files} 2>/dev/null", user=user)
    assert said.stdout == ""
    if runtime_name != "runsc":  # gVisor's /sys shows its own kernel
        said = await shell(prey, "find /sys -maxdepth 3 -mindepth 1 | sort", user=user)
        assert set(said.stdout.split()) <= {
            *("/sys/devices", "/sys/devices/system", "/sys/devices/system/cpu", "/sys/devices/system/node"),
            *("/sys/kernel", "/sys/kernel/mm", "/sys/kernel/mm/transparent_hugepage"),
        }
        for line in ("mkdir /sys/made", "touch /sys/kernel/made", "echo 0 >/sys/devices/system/cpu/cpu0/online"):
            assert not (await shell(prey, line, user=user)).ok, line


async def test_usual_tools_find_what_they_need(prey: Sandbox) -> None:
    for line in (
        "ps aux",
        "top -bn1",
        "df -h /",
        "free",
        "uptime",
        "nproc",
        "lscpu",
        "cat /sys/devices/system/cpu/online",
        "python3 -c 'import os, platform; assert os.cpu_count(); platform.platform()'",
    ):
        said = await shell(prey, f"type {line.split()[0]} >/dev/null || exit 0; export HOME=/tmp; {line}")
        assert said.ok, (line, said.stderr)


async def test_processes_of_the_host_and_of_neighbours_are_not_seen(prey: Sandbox, bystander: Sandbox) -> None:
    marker = "86399.1234"
    async with await bystander.spawn(["sleep", marker], keep=False) as sleeper:
        said = await shell(prey, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo /proc/[0-9]*", user="root")
        await sleeper.kill()
    assert marker not in said.stdout
    assert "pytest" not in said.stdout
    assert len(said.stdout.split("/proc/")) < 40


async def test_processes_of_the_host_cannot_be_signalled(prey: Sandbox) -> None:
    said = await shell(prey, f"kill -0 {os.getpid()} {os.getppid()} {prey.info.pid} && echo reached", user="root")
    assert said.stdout == ""


async def test_the_hosts_name_is_not_told(prey: Sandbox) -> None:
    said = await shell(prey, "hostname; uname -n; cat /proc/sys/kernel/hostname /etc/hostname", user="root")
    host = os.uname().nodename
    assert prey.name in said.stdout
    if len(host) > 3:
        assert host not in said.stdout.split()


async def test_memory_of_a_neighbour_is_not_shown_by_fresh_pages(prey: Sandbox) -> None:
    code = "import mmap; m = mmap.mmap(-1, 16 << 20); print(m[:].count(0) == len(m))"
    said = await prey.exec(["python3", "-I", "-S", "-c", code], timeout_s=20)
    assert said.stdout == "True\n"


async def test_the_boot_parameters_tell_no_secret_of_ours(prey: Sandbox) -> None:
    """/proc/cmdline is the machine's and readable for all on it; what matters is that none of it is Atoll's."""
    said = await shell(prey, "cat /proc/cmdline /proc/version")
    assert "atoll" not in said.stdout.lower()
