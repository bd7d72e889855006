"""Leaving the root file system: `..`, chroot, /proc/*/root and cwd, kept descriptors, pivot_root, nested namespaces."""

from __future__ import annotations

import os

import pytest

from atoll.contract.model import RuntimeName
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import ABSENT, DENIED, attempts, probe, python, shell

USERS = ("user", "root")


async def _inner_root(sandbox: Sandbox) -> set[str]:
    return {entry.name for entry in await sandbox.files.list("/", user="root")}


@pytest.mark.parametrize("user", USERS)
async def test_dot_dot_ends_at_the_sandboxs_root(prey: Sandbox, engine: Engine, user: str) -> None:
    up = "../" * 64
    said = await shell(prey, f"cd /{up} && echo *; cat {up}{engine.state_dir}/names/* /{up}etc/shadow", user=user)
    assert set(said.stdout.split()) == await _inner_root(prey)


async def test_chroot_by_root_does_not_lead_out(prey: Sandbox, runtime_name: RuntimeName) -> None:
    said = await probe(prey, "chroot", user="root")
    found = {name for name in said.stdout.split() if not name.startswith(".")}
    # Below the root, gVisor since 2023 has an empty directory of its own kernel.
    assert found == await _inner_root(prey) or (runtime_name == "runsc" and not found)


async def test_chroot_is_refused_to_a_user(prey: Sandbox) -> None:
    found = await attempts(prey, "chroot")
    assert found["chroot"] in DENIED


async def test_the_roots_and_directories_of_all_processes_are_the_sandboxs_own(prey: Sandbox) -> None:
    inside = await _inner_root(prey)
    said = await shell(
        prey,
        "for d in /proc/[0-9]*; do for l in root cwd/../../../../..; do (cd $d/$l/ && echo *); done; done",
        user="root",
    )
    listings = [set(line.split()) for line in said.stdout.splitlines()]
    assert listings, "not even the shell's own root could be listed"
    assert all(listing == inside for listing in listings)


@pytest.mark.parametrize("user", USERS)
async def test_no_descriptor_of_any_process_leads_to_a_directory_outside(prey: Sandbox, user: str) -> None:
    code = """
import os
for pid in os.listdir('/proc'):
    if not pid.isdigit(): continue
    try: numbers = os.listdir(f'/proc/{pid}/fd')
    except OSError: continue
    for fd in numbers:
        try: names = os.listdir(f'/proc/{pid}/fd/{fd}/../../../../../../..')
        except OSError: continue
        print(' '.join(names))
"""
    inside = await _inner_root(prey)
    said = await python(prey, code, user=user)
    assert said.ok, said.stderr
    assert all(set(line.split()) == inside for line in said.stdout.splitlines())


async def test_the_root_inside_is_not_the_hosts(prey: Sandbox) -> None:
    await prey.files.write_text("/tmp/only-inside", "x", user="root")
    assert not os.path.exists("/tmp/only-inside")
    if os.path.exists(f"/proc/{prey.info.pid}/root/usr"):
        assert not os.path.samefile(f"/proc/{prey.info.pid}/root", "/")


@pytest.mark.parametrize("user", USERS)
async def test_namespaces_cannot_be_nested_to_gain_rights(prey: Sandbox, runtime_name: RuntimeName, user: str) -> None:
    said = await shell(
        prey,
        "unshare --user --map-root-user --mount sh -c 'mount -t tmpfs none /mnt && echo MOUNTED'; "
        "nsenter --target 1 --mount --uts --ipc --net --pid echo ENTERED; echo done",
        user=user,
    )
    assert "done" in said.stdout
    assert "MOUNTED" not in said.stdout
    if runtime_name == "runsc":
        # gVisor makes user namespaces, in a kernel that is the sandbox's own; joining one has no effect on the host.
        assert (await _inner_root(prey)) >= {"usr", "proc"}
    else:
        assert "ENTERED" not in said.stdout


async def test_pivot_root_and_setns_do_not_exist(prey: Sandbox, runtime_name: RuntimeName) -> None:
    found = await attempts(prey, "system-calls", user="root")
    for name in ("pivot_root", "setns"):
        # gVisor answers EPERM to all that its filter refuses.
        assert found[name] in (ABSENT if runtime_name != "runsc" else ABSENT | DENIED), name
