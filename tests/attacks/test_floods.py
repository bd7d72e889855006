"""Flooding the host through the API: endless output, connections, events, names, directories."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from atoll.contract.errors import ExecTimeout, FileError
from atoll.contract.model import Output
from atoll.runtime.sandbox import Sandbox
from atoll.testing.waiting import BOUND_S, SLOWNESS, eventually
from tests.attacks.programs import PROBE, python, running, shell

MIB = 1024 * 1024


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def test_endless_output_is_cut_and_costs_the_host_no_more_than_the_limit(prey: Sandbox) -> None:
    before = _resident_bytes()
    with pytest.raises(ExecTimeout) as flood:
        await prey.exec("cat /dev/zero & cat /dev/zero >&2", timeout_s=0.5, output_limit_bytes=64 * 1024)
    result = flood.value.result
    assert result.stdout_truncation is not None
    assert len(result.stdout) < 80 * 1024
    assert _resident_bytes() - before < 64 * MIB


async def test_a_flood_that_nobody_reads_stands_still_and_blocks_nobody(prey: Sandbox) -> None:
    before = _resident_bytes()
    async with await prey.spawn(["cat", "/dev/zero"], keep=False) as flood:
        first = await anext(flood)
        assert isinstance(first, Output)
        for _ in range(20):
            assert (await prey.exec(["true"], timeout_s=10)).ok
        assert _resident_bytes() - before < 64 * MIB


async def test_terminal_sequences_and_broken_text_come_through_as_data_only(prey: Sandbox) -> None:
    said = await prey.exec_bytes(
        ["/bin/sh", "-c", r"for fd in 1 2; do printf '\033]0;owned\007\377\376\000\033[2J' >&$fd; done"]
    )
    assert said.stdout == said.stderr == b"\033]0;owned\007\377\376\000\033[2J"


async def test_a_flood_of_connections_that_nobody_takes_is_held_back(prey: Sandbox, bystander: Sandbox) -> None:
    code = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
held = []
for i in range(600):
    s = socket.socket(); s.setblocking(False)
    s.connect_ex(('127.0.0.1', int(sys.argv[1])))
    held.append(s)
print('flooded', flush=True)
sys.stdin.read()
"""
    before = _resident_bytes()
    async with prey.listen() as listener:
        command = ["python3", "-I", "-S", "-c", code, str(listener.port)]
        async with await prey.spawn(command, stdin=True, keep=False) as flood:
            event = await anext(flood)
            assert isinstance(event, Output)
            assert event.data == b"flooded\n"
            assert (await prey.exec(["true"], timeout_s=10)).ok
            assert (await bystander.exec(["true"], timeout_s=10)).ok
            with anyio.fail_after(BOUND_S):
                async with await anext(aiter(listener)) as connection:
                    await connection.send(b"x")
    assert _resident_bytes() - before < 64 * MIB


async def test_connecting_and_leaving_over_and_over_ends_no_sandbox(prey: Sandbox) -> None:
    code = """
import socket, struct, sys
for i in range(500):
    s = socket.socket()
    s.settimeout(0.01)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    try: s.connect(('127.0.0.1', int(sys.argv[1])))
    except OSError: pass
    s.close()
print('done')
"""
    async with prey.listen() as listener:
        said = await python(prey, code, str(listener.port))
        assert said.stdout == "done\n", said.stderr
        assert (await prey.exec(["true"], timeout_s=10)).ok


async def test_names_of_any_bytes_come_back_whole_and_lead_nowhere_else(victim: Sandbox, tmp_path: Path) -> None:
    code = r"""
import os
os.makedirs('/tmp/names/deep', exist_ok=True)
os.chdir('/tmp/names')
names = [b'\xff\xfe', b'new\nline', b'\x1b[2Jescape', b'-rf', b'$(reboot)', b' ', b'a' * 255, b'..hidden', b'...',
         b'\\..\\x', '\u202egnp.exe'.encode(), b'*', b'{a,b}', b'%s%n']
for name in names:
    open(name, 'w').close()
deep = b'/tmp/names/deep'
os.chdir(deep)
for i in range(30):
    os.mkdir(b'd' * 200); os.chdir(b'd' * 200)
open(b'bottom', 'w').close()
print(len(names))
"""
    said = await python(victim, code)
    assert said.ok, said.stderr
    entries = await victim.files.list("/tmp/names")
    assert len(entries) == int(said.stdout) + 1
    for entry in entries:
        if entry.kind == "file":
            assert (await victim.files.stat(f"/tmp/names/{entry.name}", follow=False)).size == 0
    assert len(await victim.files.glob("*", cwd="/tmp/names", hidden=True)) == len(entries)
    await victim.files.remove("/tmp/names/deep", recursive=True)
    await victim.files.download("/tmp/names", tmp_path / "names")
    assert {os.fsencode(name) for name in os.listdir(tmp_path / "names")} == {
        os.fsencode(entry.name) for entry in entries if entry.kind == "file"
    }
    assert os.listdir(tmp_path) == ["names"]


@pytest.mark.runtimes("crun", "runsc")
async def test_a_huge_directory_is_listed_with_bounded_memory_while_others_work(victim: Sandbox) -> None:
    count = 10_000
    said = await victim.exec([PROBE, "litter", "/tmp/litter", str(count)], timeout_s=60)
    assert said.stdout == "littered\n"
    before = _resident_bytes()
    async with anyio.create_task_group() as group:
        done = anyio.Event()

        async def keep_asking() -> None:
            while not done.is_set():
                assert (await victim.exec(["true"], timeout_s=20)).ok

        group.start_soon(keep_asking)
        assert len(await victim.files.list("/tmp/litter")) == count
        assert len(await victim.files.glob("**", cwd="/tmp/litter", limit=50)) == 50
        done.set()
    assert _resident_bytes() - before < 64 * MIB


async def test_a_directory_that_grows_while_it_is_walked_is_walked_to_an_end(victim: Sandbox) -> None:
    grow = "mkdir -p /tmp/g; echo growing; i=0; while :; do i=$((i+1)); mkdir -p /tmp/g/$((i%50))/$i; done"
    async with running(victim, "/bin/sh", "-c", grow):
        with anyio.fail_after(30 * SLOWNESS):
            await victim.files.glob("**", cwd="/tmp/g", limit=100_000)
            await victim.files.grep("x", "/tmp/g")


async def test_links_in_a_circle_are_walked_to_an_end(victim: Sandbox) -> None:
    await shell(
        victim, "mkdir -p /tmp/c/a/b && ln -s ../.. /tmp/c/a/b/up && ln -s self /tmp/c/self && ln -s / /tmp/c/all"
    )
    with anyio.fail_after(BOUND_S):
        found = await victim.files.glob("**", cwd="/tmp/c", limit=100_000)
    assert {entry.name for entry in found if "up/" in entry.name or "all/" in entry.name} == set()


async def test_reading_what_never_ends_or_never_begins_is_refused(victim: Sandbox) -> None:
    await shell(victim, "mkfifo /tmp/fifo; ln -s /dev/zero /tmp/zero")
    for path in ("/tmp/fifo", "/dev/zero", "/tmp/zero", "/dev/tty", "/tmp"):
        with anyio.fail_after(10 * SLOWNESS):
            with pytest.raises(FileError):
                await victim.files.read_bytes(path)
            with pytest.raises(FileError):
                await victim.files.write_bytes(path, b"x", atomic=False)
    with anyio.fail_after(BOUND_S):
        await victim.files.grep("x", "/tmp")
        async for _ in victim.files.tar_out("/tmp"):
            pass


async def test_a_file_that_changes_while_it_is_packed_makes_no_broken_archive(victim: Sandbox, tmp_path: Path) -> None:
    grow = "mkdir -p /tmp/t; echo on; while :; do head -c 100000 /dev/zero > /tmp/t/f; : > /tmp/t/f; done"
    async with running(victim, "/bin/sh", "-c", grow):
        await eventually(lambda: victim.files.exists("/tmp/t/f"), "the file is there")
        for i in range(5):
            with suppress(FileError):
                await victim.files.download("/tmp/t", tmp_path / str(i))
                assert os.listdir(tmp_path / str(i)) == ["f"]
