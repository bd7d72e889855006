"""Devices: making nodes of the host's disks and memory, and what is in /dev."""

from __future__ import annotations

import os

import pytest

from atoll.contract.model import RuntimeName
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import attempts, shell, top_of

HARMLESS = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console", "net/tun"}


@pytest.mark.parametrize("user", ["user", "root"])
async def test_no_device_node_of_the_hosts_can_be_made_and_opened(
    prey: Sandbox, engine: Engine, runtime_name: RuntimeName, user: str
) -> None:
    found = await attempts(prey, "devices", user=user)
    opened = {name.rpartition("-")[2] for name, error in found.items() if name.startswith("open:") and error == 0}
    made = {name.rpartition("-")[2] for name, error in found.items() if name.startswith("mknod:") and error == 0}
    if runtime_name == "runsc":
        # gVisor makes nodes in its own memory, and has devices of its own behind three of them.
        assert opened <= {"null", "fuse", "tun"}
    else:
        # A node 0:0 cannot be opened: it is how an overlay says that something is not there.
        assert not opened
        assert made <= {"whiteout"}
    upper = top_of(engine, prey) / "upper"
    nodes = [path for path in upper.rglob("*") if path.is_block_device() or path.is_char_device()]
    assert {os.lstat(path).st_rdev for path in nodes} <= {0}, "on the host there are none either"


async def test_dev_holds_what_every_process_needs_and_no_more(prey: Sandbox, runtime_name: RuntimeName) -> None:
    # Not by `find -type`: what a directory says of a mounted node is what stands below the mount.
    line = "cd /dev; for f in * */*; do [ -h $f ] || { [ -c $f ] && echo $f c; [ -b $f ] && echo $f b; }; done"
    nodes = dict(entry.split() for entry in (await shell(prey, line, user="root")).stdout.splitlines())
    nodes = {name: kind for name, kind in nodes.items() if not name.startswith("pts/")}
    assert "null" in nodes
    assert set(nodes) <= HARMLESS | ({"fuse"} if runtime_name == "runsc" else set())
    assert "b" not in nodes.values()


async def test_the_hosts_terminals_are_not_there(prey: Sandbox) -> None:
    said = await shell(
        prey, "find /dev/pts -type c; : < /dev/tty1 && echo opened; : < /dev/console && echo opened", user="root"
    )
    assert set(said.stdout.split()) <= {"/dev/pts/ptmx"}


async def test_a_terminal_cannot_be_typed_into_from_another_session(prey: Sandbox) -> None:
    """TIOCSTI puts input into one's own terminal; into another's only with a capability that nobody has."""
    async with await prey.shell(command=["/bin/sh", "-c", "tty; sleep 30"], user="root") as terminal:
        event = await anext(terminal)
        name = getattr(event, "data", b"").decode().strip()
        assert name.startswith("/dev/pts/")
        code = (
            "import fcntl, os, sys, termios\n"
            f"fd = os.open({name!r}, os.O_RDWR | os.O_NOCTTY)\n"
            "try: fcntl.ioctl(fd, termios.TIOCSTI, b'x'); print('typed')\n"
            "except OSError: pass\n"
        )
        said = await prey.exec(["python3", "-I", "-S", "-c", code], user="root", timeout_s=20)
        assert "typed" not in said.stdout
        await terminal.kill()
