"""The keeper, which reads what a hostile guest sends: what it could do if that ever took it over."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

import pytest

from atoll.contract.protocol import MAX_PAYLOAD, Tag
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import host_processes, shell, status_of

KEEPERS_FIRST_OWN = 3


def keeper_of(engine: Engine, sandbox: Sandbox) -> int:
    return int((engine.state_dir / "sandboxes" / sandbox.id / "keeper.lock").read_text())


async def test_the_keeper_has_given_up_every_right(prey: Sandbox, engine: Engine) -> None:
    status = status_of(keeper_of(engine, prey))
    assert status["Name"] == "keeper"
    assert status["Seccomp"] == "2"
    assert status["NoNewPrivs"] == "1"
    if os.geteuid() == 0:
        # As an unprivileged user it has none to give up: it stays that user, behind the same filter.
        assert "0" not in status["Uid"].split() + status["Gid"].split()
        assert status["Groups"] == ""
    for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
        assert int(status[kind], 16) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="as an unprivileged user all processes are that user's")
async def test_the_keeper_is_nobody_that_exists_inside(prey: Sandbox, engine: Engine) -> None:
    """Were it a user of the sandbox's, a process that left its namespaces could trace it."""
    keeper = int(status_of(keeper_of(engine, prey))["Uid"].split()[0])
    assert prey.info.pid is not None
    _, first, count = map(int, Path(f"/proc/{prey.info.pid}/uid_map").read_text().split()[:3])
    assert not first <= keeper < first + count
    owned = {int(status_of(pid)["Uid"].split()[0]) for pid in host_processes(prey)}
    assert keeper not in owned


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to look at processes of other users")
async def test_the_keeper_holds_only_what_it_relays(prey: Sandbox, engine: Engine) -> None:
    pid = keeper_of(engine, prey)
    directory = str(engine.state_dir / "sandboxes" / prey.id)
    # And that by which it makes the sandbox, and nothing else, stand still, and learns that its memory was too little.
    cgroup_files = {
        f"/sys/fs/cgroup/{file}"
        for file in (
            f"freezer/atoll/{prey.id}.1/freezer.state",
            f"atoll/{prey.id}.1/cgroup.freeze",
            f"atoll/{prey.id}.1/cgroup.events",
            f"memory/atoll/{prey.id}.1/memory.oom_control",
            f"atoll/{prey.id}.1/memory.events",
        )
    }
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        assert (
            target.startswith(("socket:", "anon_inode:[pidfd]", "pidfd:", "/dev/null", "pipe:"))
            or target
            in {f"{directory}/{own}" for own in ("in", "out", "ended", "keeper.log", "keeper.lock", "activity")}
            | cgroup_files
        ), target
    assert os.readlink(f"/proc/{pid}/cwd") == "/"


async def test_a_client_that_breaks_the_protocol_is_dropped_and_harms_nobody(prey: Sandbox, engine: Engine) -> None:
    """A client is trusted with the sandbox, not with other clients' streams, and never with the keeper."""
    path = engine.state_dir / "sandboxes" / prey.id / "sock"
    directory = os.open(path.parent, os.O_PATH)
    frames = {
        "too large": struct.pack("<IBBHI", MAX_PAYLOAD + 1, 2, 0, 0, 1),
        "a length that wraps": struct.pack("<IBBHI", 0xFFFFFFFF, 3, 0, 0, 1),
        "reserved bits": struct.pack("<IBBHI", 0, 6, 0, 7, 1),
        "no such type": struct.pack("<IBBHI", 0, 77, 0, 0, 1),
        "a type of the guest's": struct.pack("<IBBHI", 0, 9, 0, 0, 1),
        "a type of the keeper's": struct.pack("<IBBHI", 0, 33, 0, 0, 0),
        "another client's stream": struct.pack("<IBBHI", 0, 6, 0, 0, 1 << 20 | 1),
        "stream 0": struct.pack("<IBBHI", 0, 2, 0, 0, 0),
        "a channel that cannot be": struct.pack("<IBBHI", 1, 3, 200, 0, 1) + b"x",
        "fields that overrun": struct.pack("<IBBHI", 6, 2, 0, 0, 1) + struct.pack("<HI", 6, 0xFFFFFFFF),
        "an integer of another size": struct.pack("<IBBHI", 7, 2, 0, 0, 1) + struct.pack("<HIB", Tag.QUIET, 1, 1),
        "a window below nothing": struct.pack("<IBBHI", 14, 2, 0, 0, 1) + struct.pack("<HIq", 6, 8, -1),
        "a window without end": struct.pack("<IBBHI", 14, 2, 0, 0, 1) + struct.pack("<HIq", 6, 8, 2**62),
        "half a credit": struct.pack("<IBBHI", 14, 2, 0, 0, 1)
        + struct.pack("<HIq", 6, 8, 1)
        + struct.pack("<IBBHI", 2, 5, 1, 0, 1)
        + b"xx",
        "nonsense": os.urandom(4096),
    }
    try:
        for what, frame in frames.items():
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(10)
                client.connect(f"/proc/self/fd/{directory}/sock")
                client.sendall(frame)
                said = b""
                while piece := client.recv(65536):
                    said += piece
                assert said[4:5] in {b"", b"\x01"}, f"{what}: greeted at most, then dropped"
            assert (await shell(prey, "echo on")).stdout == "on\n", what
    finally:
        os.close(directory)


async def test_clients_beyond_number_leave_room_for_the_first(prey: Sandbox, engine: Engine) -> None:
    directory = os.open(engine.state_dir / "sandboxes" / prey.id, os.O_PATH)
    clients = []
    try:
        for _ in range(300):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            clients.append(client)
            if client.connect_ex(f"/proc/self/fd/{directory}/sock"):
                break
        assert len(clients) > 100
        assert (await shell(prey, "echo on")).stdout == "on\n"
    finally:
        for client in clients:
            client.close()
        os.close(directory)
    assert (await shell(prey, "echo on")).stdout == "on\n"
