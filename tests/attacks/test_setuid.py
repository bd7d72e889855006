"""Gaining rights by starting a program: set-user-id files, file capabilities, su, what is inherited."""

from __future__ import annotations

import os

import pytest

from atoll.contract.model import RuntimeName
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import PROBE, host_processes, shell, status_of

PLACES = ("/tmp", "/home/user", "/usr/local/bin", "/run", "/dev/shm", "/")
FORBIDDEN = 0xFFFFFFFFFF & ~sum(1 << n for n in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 31))
"""All capabilities but those that a package manager needs (`drivers/oci.py`)."""


def _rights(text: str) -> dict[str, int]:
    return {
        key: int(value, 16 if key in {"effective", "permitted"} else 10)
        for key, value in map(str.split, text.splitlines())
    }


@pytest.mark.parametrize("place", PLACES)
async def test_a_setuid_root_file_gives_a_user_nothing(prey: Sandbox, place: str) -> None:
    path = f"{place}/suid-probe"
    made = await shell(prey, f"cp {PROBE} {path} && chown root:root {path} && chmod 6755 {path}", user="root")
    assert made.ok, made.stderr
    said = await prey.exec([path, "rights"], timeout_s=10)
    await prey.files.remove(path, user="root")
    if said.exit_code == 126:
        return  # mounted noexec
    assert said.ok, said
    rights = _rights(said.stdout)
    assert rights["euid"] == rights["ruid"] == 1000
    assert rights["egid"] == 1000
    assert rights["effective"] == rights["permitted"] == 0


async def test_file_capabilities_give_a_user_nothing(prey: Sandbox, runtime_name: RuntimeName) -> None:
    code = (
        "import os, struct; "
        "os.setxattr('/tmp/capable', 'security.capability', struct.pack('<IIIII', 0x2000001, 0xffffffff, 0, 0x1ff, 0))"
    )
    await shell(prey, f"cp {PROBE} /tmp/capable && chmod 755 /tmp/capable", user="root")
    said = await prey.exec(["python3", "-c", code], user="root", timeout_s=20)
    # gVisor stores no such attribute; the kernel stores it for the sandbox's own root.
    assert said.ok or runtime_name == "runsc", said.stderr
    rights = _rights((await prey.exec(["/tmp/capable", "rights"], timeout_s=10)).stdout)
    assert rights["effective"] == rights["permitted"] == 0


async def test_su_and_sudo_do_not_make_a_user_root(prey: Sandbox) -> None:
    for line in (
        "su -c id </dev/null",
        "sudo -n id",
        "pkexec id",
        "runuser -u root id",
    ):
        said = await shell(prey, line)
        assert "uid=0" not in said.stdout, line


@pytest.mark.parametrize("user", ["user", "root"])
async def test_commands_run_with_no_new_privileges_and_no_more_rights_than_promised(
    prey: Sandbox, runtime_name: RuntimeName, user: str
) -> None:
    said = await shell(prey, "cat /proc/self/status", user=user)
    status = {key: value.strip() for key, _, value in (line.partition(":") for line in said.stdout.splitlines())}
    for kind in ("CapPrm", "CapEff", "CapBnd"):
        assert int(status[kind], 16) & FORBIDDEN == 0, kind
    if runtime_name != "runsc":
        # With inheritable ones, a user would gain rights from files with capabilities (CVE-2022-29162).
        assert int(status["CapInh"], 16) == int(status["CapAmb"], 16) == 0
    else:
        assert int(status["CapInh"], 16) & FORBIDDEN == 0
    if user == "user":
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    if runtime_name != "runsc":
        # gVisor has the flag, and does not show it here.
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to look at processes of other users")
async def test_on_the_host_no_process_of_a_sandbox_has_rights(prey: Sandbox, runtime_name: RuntimeName) -> None:
    """Capabilities that a process shows count in its user namespace only, which must not be the host's."""
    for pid in host_processes(prey):
        status = status_of(pid)
        assert status["Uid"].split()[0] != "0", status["Name"]
        assert os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user"), status["Name"]
        # gVisor traces the processes of its sandbox from outside: its own are in the host's process namespace, and
        # have a view of it through a /proc that is not there.
        for kind in ("mnt", "net", "ipc", "uts", *(("pid",) if runtime_name != "runsc" else ())):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), (status["Name"], kind)
        assert status["Seccomp"] == "2", (status["Name"], runtime_name)


async def test_a_user_becomes_no_other_user(prey: Sandbox) -> None:
    code = """
import os
for change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]),
               lambda: os.setuid(33), lambda: os.chown('/tmp', 1000, 1000), lambda: os.kill(1, 0)):
    try: change(); print('changed')
    except OSError: pass
"""
    said = await prey.exec(["python3", "-I", "-S", "-c", code], timeout_s=20)
    assert said.ok, said.stderr
    assert said.stdout == ""
