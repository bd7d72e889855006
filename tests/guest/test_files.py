"""Reading, writing and the rest of the file operations."""

from __future__ import annotations

import errno
import os
import resource
import signal as signals
import stat
import struct
from pathlib import Path

import pytest

from tests.guest.client import Guest, N, wait_for

NASTY = [b"plain", b"with\nnewline", b"\xff\xfe\x80", "€ü".encode(), b" lead", b"-dash", b"a" * 255]


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A directory that other users can reach."""
    for directory in [tmp_path, *tmp_path.parents]:
        if directory not in (Path("/"), Path("/tmp")):
            directory.chmod(0o755)
    return tmp_path


def test_read_gives_the_file_and_what_it_is(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    path.chmod(0o640)
    stream = guest.run("READ", PATH=str(path))
    assert stream.out == b"0123456789"
    assert stream.end == {"SIZE": 10, "MODE": 0o640, "MTIME_NS": path.stat().st_mtime_ns}


@pytest.mark.parametrize(
    ("offset", "limit", "wanted"), [(3, None, b"3456789"), (3, 4, b"3456"), (20, None, b""), (0, 0, b"")]
)
def test_read_can_be_a_part(guest: Guest, tmp_path: Path, offset: int, limit: int | None, wanted: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    stream = guest.run("READ", PATH=str(path), OFFSET=offset, LIMIT=limit)
    assert stream.out == wanted
    assert stream.end["SIZE"] == 10


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 1 << 20, 20_000_003])
def test_read_of_any_size_is_exact(guest: Guest, tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    data = os.urandom(size)
    path.write_bytes(data)
    stream = guest.run("READ", PATH=str(path))
    assert stream.out == data
    assert stream.end["SIZE"] == size


def test_read_with_a_window_of_just_the_file_comes_to_an_end(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 70000)
    for window in (70000, 0):
        stream = guest.open("READ", window=window, auto=False, PATH=str(path))
        if not window:
            stream.give(70000)
        assert "ERRNO" not in stream.wait()
        assert len(stream.out) == 70000
    path.write_bytes(b"")
    assert guest.open("READ", window=0, auto=False, PATH=str(path)).wait()["SIZE"] == 0


def test_read_never_sends_more_than_the_credit(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1_000_000)
    stream = guest.open("READ", window=1234, auto=False, PATH=str(path))
    guest.until(lambda: len(stream.out) == 1234)
    guest.run("STAT", PATH="/")
    assert len(stream.out) == 1234
    stream.give(1)
    guest.until(lambda: len(stream.out) == 1235)
    stream.reset()
    assert stream.wait()["ERRNO"] == errno.ECANCELED
    wait_for(lambda: guest.children() == [])


def test_files_of_proc_can_be_read(guest: Guest) -> None:
    stream = guest.run("READ", PATH="/proc/version")
    assert stream.out.startswith(b"Linux")
    assert stream.end["SIZE"] == len(stream.out)


def test_read_and_write_refuse_what_is_no_file(guest: Guest, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, wanted in ((tmp_path, errno.EISDIR), (fifo, errno.EINVAL), ("/dev/zero", errno.EINVAL)):
        assert guest.run("READ", PATH=str(path)).end["ERRNO"] == wanted
        assert guest.run("WRITE", b"x", PATH=str(path)).end["ERRNO"] == wanted
        assert guest.run("WRITE", b"x", PATH=str(path), ATOMIC=1).end["ERRNO"] == wanted
    assert guest.run("READ", PATH=str(tmp_path / "none")).end["ERRNO"] == errno.ENOENT


@pytest.mark.parametrize("atomic", [0, 1])
@pytest.mark.parametrize("size", [0, 5, 65536, 10_000_001])
def test_write_is_exact(guest: Guest, tmp_path: Path, atomic: int, size: int) -> None:
    path = tmp_path / "file"
    data = os.urandom(size)
    stream = guest.run("WRITE", data, PATH=str(path), ATOMIC=atomic)
    assert stream.end == {"SIZE": size}
    assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("atomic", [0, 1])
def test_write_keeps_the_mode_of_an_old_file_unless_told(guest: Guest, tmp_path: Path, atomic: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old and longer")
    path.chmod(0o751)
    os.chown(path, 1234, 1235)
    guest.run("WRITE", b"new", PATH=str(path), ATOMIC=atomic)
    assert path.read_bytes() == b"new"
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid, path.stat().st_gid) == (0o751, 1234, 1235)
    guest.run("WRITE", b"new", PATH=str(path), ATOMIC=atomic, MODE=0o666)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666


def test_write_can_append_make_parents_and_be_exclusive(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    assert guest.run("WRITE", b"x", PATH=str(path)).end["ERRNO"] == errno.ENOENT
    assert guest.run("WRITE", b"x", PATH=str(path), PARENTS=1, EXCLUSIVE=1).end["SIZE"] == 1
    assert guest.run("WRITE", b"yz", PATH=str(path), APPEND=1).end["SIZE"] == 3
    for atomic in (0, 1):
        assert guest.run("WRITE", b"x", PATH=str(path), EXCLUSIVE=1, ATOMIC=atomic).end["ERRNO"] == errno.EEXIST
    other = tmp_path / "other"
    assert guest.run("WRITE", b"x", PATH=str(other), EXCLUSIVE=1, ATOMIC=1).end["SIZE"] == 1
    assert path.read_bytes() == b"xyz"
    assert sorted(os.listdir(tmp_path)) == ["a", "other"]


def test_an_abandoned_atomic_write_leaves_nothing(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    stream = guest.open("WRITE", PATH=str(path), ATOMIC=1)
    stream.send(b"x" * 100_000)
    wait_for(lambda: len(os.listdir(tmp_path)) == 2)
    stream.reset()
    assert stream.wait()["ERRNO"] == errno.ECANCELED
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_atomic_write_goes_through_links(guest: Guest, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to("target")
    guest.run("WRITE", b"new", PATH=str(link), ATOMIC=1)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    assert guest.run("WRITE", b"new", PATH=str(loop), ATOMIC=1).end["ERRNO"] == errno.ELOOP


def test_permissions_are_the_users(guest: Guest, public: Path) -> None:
    secret, shared = public / "secret", public / "shared"
    secret.write_bytes(b"x")
    secret.chmod(0o600)
    shared.mkdir()
    shared.chmod(0o777)
    assert guest.run("READ", PATH=str(secret), USER="nobody").end["ERRNO"] == errno.EACCES
    assert guest.run("WRITE", b"x", PATH=str(secret), USER="nobody", ATOMIC=1).end["ERRNO"] == errno.EACCES
    assert guest.run("WRITE", b"x", PATH=str(shared / "mine"), USER="nobody").end["SIZE"] == 1
    assert (shared / "mine").stat().st_uid == 65534
    assert guest.run("STAT", PATH="/", USER="no-such-user").end["ERRNO"] == errno.ENOENT


def test_a_relative_path_is_taken_from_the_home(binary: str, public: Path) -> None:
    guest = Guest(binary, "--user", f"agent:4321:4321:{public}")
    (public / "file").write_bytes(b"hi")
    assert guest.run("READ", PATH="file", USER="agent").out == b"hi"
    assert guest.run("STAT", PATH=".", USER="4321").end["KIND"] == N["KIND_DIRECTORY"]
    guest.close()


def test_stat_tells_what_there_is(guest: Guest, tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"123")
    os.chown(path, 11, 12)
    link.symlink_to(path)
    end = guest.run("STAT", PATH=str(link)).end
    assert end == {"KIND": 1, "SIZE": 3, "MODE": 0o644, "UID": 11, "GID": 12, "MTIME_NS": path.stat().st_mtime_ns}
    end = guest.run("STAT", PATH=str(link), FOLLOW=0).end
    assert end["KIND"] == N["KIND_SYMLINK"]
    assert end["TARGET"] == str(path).encode()
    assert guest.run("STAT", PATH=str(tmp_path / "none")).end["ERRNO"] == errno.ENOENT
    assert guest.run("STAT", PATH="/dev/null").end["KIND"] == N["KIND_CHAR_DEVICE"]


def test_list_gives_every_name_as_it_is(guest: Guest, tmp_path: Path) -> None:
    for name in NASTY:
        with open(os.path.join(bytes(tmp_path), name), "wb") as file:
            file.write(name)
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "fifo")
    listed = guest.records("LIST", PATH=str(tmp_path))
    assert [r["NAME"] for r in listed] == sorted([*NASTY, b"dir", b"fifo"])
    kinds = {r["NAME"]: r["KIND"] for r in listed}
    assert (kinds[b"dir"], kinds[b"fifo"], kinds[b"plain"]) == (2, 4, 1)
    assert guest.run("LIST", PATH=str(tmp_path / "plain")).end["ERRNO"] == errno.ENOTDIR


def test_list_of_a_huge_directory_is_complete(guest: Guest, tmp_path: Path) -> None:
    for i in range(5000):
        (tmp_path / f"{i:05}").touch()
    assert [r["NAME"] for r in guest.records("LIST", PATH=str(tmp_path))] == [b"%05d" % i for i in range(5000)]


@pytest.mark.parametrize("name", NASTY)
def test_names_of_any_bytes_can_be_used(guest: Guest, tmp_path: Path, name: bytes) -> None:
    path = os.path.join(bytes(tmp_path), name)
    assert "ERRNO" not in guest.run("WRITE", name, PATH=path).end
    assert guest.run("READ", PATH=path).out == name
    assert guest.run("REMOVE", PATH=path).end == {}
    assert os.listdir(tmp_path) == []


def test_mkdir_makes_one_or_all(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert guest.run("MKDIR", PATH=str(path)).end["ERRNO"] == errno.ENOENT
    assert guest.run("MKDIR", PATH=str(path), PARENTS=1, MODE=0o777).end == {}
    assert stat.S_IMODE(path.stat().st_mode) == 0o777
    assert guest.run("MKDIR", PATH=str(path), PARENTS=1).end == {}
    assert guest.run("MKDIR", PATH=str(path)).end["ERRNO"] == errno.EEXIST
    (tmp_path / "file").touch()
    assert guest.run("MKDIR", PATH=str(tmp_path / "file"), PARENTS=1).end["ERRNO"] == errno.ENOTDIR


def test_remove_takes_files_links_and_trees(guest: Guest, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tree / "link").symlink_to(outside)
    assert guest.run("REMOVE", PATH=str(tree)).end["ERRNO"] == errno.ENOTEMPTY
    assert guest.run("REMOVE", PATH=str(tree), RECURSIVE=1).end == {}
    assert not tree.exists()
    assert (outside / "kept").exists()
    assert guest.run("REMOVE", PATH=str(tree)).end["ERRNO"] == errno.ENOENT
    assert guest.run("REMOVE", PATH=str(tree), MISSING_OK=1).end == {}
    assert guest.run("REMOVE", PATH="/", RECURSIVE=1).end["ERRNO"] == errno.EBUSY


def test_a_tree_deeper_than_any_path_is_removed(guest: Guest, tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        os.mkdir("deep")
        os.chdir("deep")
        for _ in range(1500):
            os.mkdir("directory")
            os.chdir("directory")
    finally:
        os.chdir(here)
    assert guest.run("REMOVE", PATH=str(tmp_path / "deep"), RECURSIVE=1).end == {}
    assert os.listdir(tmp_path) == []


def test_rename_symlink_and_chmod_do_what_they_say(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    to = tmp_path / "new" / "name"
    assert guest.run("RENAME", PATH=str(path), TO=str(to)).end["ERRNO"] == errno.ENOENT
    assert guest.run("RENAME", PATH=str(path), TO=str(to), PARENTS=1).end == {}
    assert to.read_bytes() == b"x"
    assert not path.exists()
    assert guest.run("SYMLINK", PATH=str(path), TARGET="new/name").end == {}
    assert os.readlink(path) == "new/name"
    assert guest.run("SYMLINK", PATH=str(path), TARGET="x").end["ERRNO"] == errno.EEXIST
    assert guest.run("CHMOD", PATH=str(path), MODE=0o400).end == {}
    assert stat.S_IMODE(to.stat().st_mode) == 0o400
    assert guest.run("CHMOD", PATH=str(path), MODE=0o77777).end["ERRNO"] == errno.EINVAL


def test_a_worker_that_is_killed_ends_its_operation_with_eio(guest: Guest, tmp_path: Path) -> None:
    stream = guest.open("WRITE", PATH=str(tmp_path / "file"))
    wait_for(lambda: len(guest.children()) == 1)
    wait_for((tmp_path / "file").exists)
    os.kill(guest.children()[0], 9)
    end = stream.wait()
    assert end["ERRNO"] == errno.EIO
    assert b"killed" in end["MESSAGE"]
    assert guest.run("STAT", PATH="/").end["KIND"] == 2


def test_a_full_disk_is_told(guest: Guest) -> None:
    assert guest.run("WRITE", b"x", PATH="/proc/self/oom_score_adj-no").end["ERRNO"] in (errno.ENOENT, errno.EACCES)
    # /dev/full is no regular file; a limit on file size is the nearest thing
    stream = guest.run("WRITE", b"x" * 10, PATH="/proc/sys/kernel/ostype")
    assert "ERRNO" in stream.end


def test_missing_fields_are_an_error_and_not_a_crash(guest: Guest) -> None:
    for op in (
        "READ",
        "STAT",
        "LIST",
        "MKDIR",
        "REMOVE",
        "RENAME",
        "SYMLINK",
        "CHMOD",
        "TAR_OUT",
        "GLOB",
        "GREP",
        "WATCH",
    ):
        assert guest.run(op).end["ERRNO"] in (errno.ENOENT, errno.EINVAL), op
    assert guest.run("WRITE", b"").end["ERRNO"] == errno.ENOENT
    assert guest.run("TAR_IN", b"").end["ERRNO"] == errno.ENOENT


# ---- workers that are used again ----


def worker_of(guest: Guest) -> int:
    [pid] = guest.children()
    return pid


def test_an_idle_worker_serves_the_next_operations_of_its_user(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert guest.run("WRITE", b"0123456789", PATH=str(path), ATOMIC=1).end == {"SIZE": 10}
    first = worker_of(guest)
    for _ in range(3):
        assert guest.run("READ", PATH=str(path)).out == b"0123456789"
        assert guest.run("STAT", PATH=str(path)).end["SIZE"] == 10
        assert guest.run("STAT", PATH=str(tmp_path / "missing")).end["ERRNO"] == errno.ENOENT
        assert guest.run("WRITE", b"9876543210", PATH=str(path), ATOMIC=1).end == {"SIZE": 10}
        assert guest.run("WRITE", b"0123456789", PATH=str(path)).end == {"SIZE": 10}
        assert worker_of(guest) == first


def test_a_large_file_comes_whole_out_of_an_idle_worker(guest: Guest, tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    (tmp_path / "large").write_bytes(data)
    guest.run("STAT", PATH="/")
    first = worker_of(guest)
    for size in (32 << 10, (32 << 10) + 1, 65536, 65537, len(data)):
        assert guest.run("READ", PATH=str(tmp_path / "large"), LIMIT=size).out == data[:size]
    assert guest.run("READ", PATH=str(tmp_path / "large")).out == data
    assert worker_of(guest) == first


def test_output_that_came_with_the_result_waits_for_credit(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    stream = guest.open("READ", window=10, auto=False, PATH=str(tmp_path / "file"))
    stream.until_received(10)
    assert stream.end is None
    for _ in range(9):
        stream.give(110)
    assert stream.wait()["SIZE"] == 1000
    assert stream.out == b"x" * 1000


def test_abandoned_output_that_came_with_the_result_ends_the_stream(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    stream = guest.open("READ", window=10, auto=False, PATH=str(tmp_path / "file"))
    stream.until_received(10)
    stream.reset()
    assert stream.wait()["ERRNO"] == errno.ECANCELED
    assert guest.run("STAT", PATH="/").end["KIND"] == 2


def test_a_worker_serves_one_user(guest: Guest) -> None:
    guest.run("STAT", PATH="/")
    first = worker_of(guest)
    guest.run("STAT", PATH="/", USER="12345")
    [other] = set(guest.children()) - {first}
    assert os.stat(f"/proc/{other}").st_uid in (0, 12345)  # root where the process is not dumpable
    assert "Uid:\t12345\t12345\t12345\t12345" in Path(f"/proc/{other}/status").read_text()
    guest.run("STAT", PATH="/", USER="12345")
    guest.run("STAT", PATH="/")
    assert sorted(guest.children()) == sorted((first, other))


def test_a_worker_whose_operation_failed_is_not_used_again(guest: Guest, tmp_path: Path) -> None:
    """A process of its user may have set a limit on it."""
    guest.run("STAT", PATH="/")
    first = worker_of(guest)
    resource.prlimit(first, resource.RLIMIT_NOFILE, (0, 0))
    (tmp_path / "file").write_bytes(b"x")
    assert guest.run("READ", PATH=str(tmp_path / "file")).end["ERRNO"] == errno.EMFILE
    assert guest.run("READ", PATH=str(tmp_path / "file")).out == b"x"
    wait_for(lambda: first not in guest.children())


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_an_idle_worker_that_was_killed_or_stopped_costs_no_operation(guest: Guest, signal: str) -> None:
    guest.run("STAT", PATH="/")
    first = worker_of(guest)
    os.kill(first, getattr(signals, signal))
    if signal != "SIGSTOP":
        wait_for(lambda: first not in guest.children())
    assert guest.run("STAT", PATH="/").end["KIND"] == 2


def test_idle_workers_end_soon(guest: Guest) -> None:
    streams = [guest.open("STAT", PATH="/") for _ in range(20)]
    assert all(stream.wait()["KIND"] == 2 for stream in streams)
    wait_for(lambda: len(guest.children()) <= 4)
    wait_for(lambda: not guest.children())


def test_a_worker_that_is_used_again_keeps_nothing_of_its_operations(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    path = str(tmp_path / "file")

    def each_operation() -> None:
        guest.run("WRITE", b"x" * 4096, PATH=path, ATOMIC=1, PARENTS=1)
        guest.run("WRITE", b"x" * 4096, PATH=path)
        guest.run("WRITE", b"x", PATH=str(tmp_path / "missing" / "file"), ATOMIC=1)
        guest.run("READ", PATH=path)
        guest.run("READ", PATH=path + "-missing")
        guest.run("LIST", PATH=str(tmp_path / "directory"))
        guest.run("MKDIR", PATH=path + "-new", PARENTS=1)
        guest.run("SYMLINK", PATH=path + "-link", TARGET=path)
        guest.run("RENAME", PATH=path + "-link", TO=path + "-new/link")
        guest.run("CHMOD", PATH=path, MODE=0o640)
        guest.run("REMOVE", PATH=path + "-new", RECURSIVE=1)
        guest.run("STAT", PATH="relative")

    def held() -> tuple[list[str], str]:
        status = Path(f"/proc/{worker}/status").read_text()
        return sorted(os.listdir(f"/proc/{worker}/fd")), next(x for x in status.splitlines() if x.startswith("VmSize"))

    for _ in range(3):
        each_operation()
    worker = worker_of(guest)
    before = held()
    for _ in range(50):
        each_operation()
    assert worker_of(guest) == worker
    assert held() == before


# ------------------------------------------------------------------------------------------------- extended attributes


def xattrs(**values: bytes) -> bytes:
    """The field XATTRS, as PROTOCOL.md has it."""
    parts = (name.encode() + b"\0" + struct.pack("<I", len(value)) + value for name, value in values.items())
    return b"".join(parts)


@pytest.mark.parametrize("atomic", [0, 1])
def test_write_replaces_extended_attributes_below_a_prefix(guest: Guest, tmp_path: Path, atomic: int) -> None:
    path = tmp_path / "file"
    asked = {"PATH": str(path), "ATOMIC": atomic, "XATTR_PREFIX": "user.mine."}
    stream = guest.run("WRITE", b"one", **asked, XATTRS=xattrs(a=b"1", b=b"\0\xff"))
    assert stream.end == {"SIZE": 3, "COUNT": 2}
    os.setxattr(path, "user.other", b"kept")
    assert guest.run("STAT", PATH=str(path), XATTR_PREFIX="user.mine.").end["XATTRS"] in (
        xattrs(a=b"1", b=b"\0\xff"),
        xattrs(b=b"\0\xff", a=b"1"),
    )
    assert guest.run("WRITE", b"two", **asked, XATTRS=xattrs(b=b"2", c=b"")).end["COUNT"] == 2
    found = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    assert found == {"user.mine.b": b"2", "user.mine.c": b""} | ({} if atomic else {"user.other": b"kept"})
    assert guest.run("WRITE", b"three", **asked).end == {"SIZE": 5, "COUNT": 0}
    assert "user.mine.b" not in os.listxattr(path)
    assert "XATTRS" not in guest.run("STAT", PATH=str(path), XATTR_PREFIX="user.mine.").end


def test_write_without_a_prefix_leaves_extended_attributes_alone(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    os.setxattr(path, "user.mine.a", b"1")
    assert guest.run("WRITE", b"x", PATH=str(path)).end == {"SIZE": 1}
    assert os.listxattr(path) == ["user.mine.a"]
    assert "XATTRS" not in guest.run("STAT", PATH=str(path)).end


def test_list_and_stat_give_extended_attributes_of_each_file_and_not_through_links(
    guest: Guest, tmp_path: Path
) -> None:
    for name in ("one", "two", "without"):
        (tmp_path / name).touch()
    os.setxattr(tmp_path / "one", "user.mine.a", b"1")
    os.setxattr(tmp_path / "two", "user.mine.a", b"2")
    (tmp_path / "link").symlink_to("one")
    records = guest.records("LIST", PATH=str(tmp_path), XATTR_PREFIX="user.mine.")
    assert {each["NAME"]: each.get("XATTRS") for each in records} == {
        b"one": xattrs(a=b"1"),
        b"two": xattrs(a=b"2"),
        b"without": None,
        b"link": None,
    }
    link = str(tmp_path / "link")
    assert guest.run("STAT", PATH=link, XATTR_PREFIX="user.mine.").end["XATTRS"] == xattrs(a=b"1")
    assert "XATTRS" not in guest.run("STAT", PATH=link, XATTR_PREFIX="user.mine.", FOLLOW=0).end


def test_extended_attributes_that_do_not_fit_are_left_out(guest: Guest, tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"atoll-{os.getpid()}"  # of a file system that keeps large ones
    path.touch()
    try:
        os.setxattr(path, "user.mine.large", b"x" * 5000)
        os.setxattr(path, "user.mine.small", b"y")
        stream = guest.run("STAT", PATH=str(path), XATTR_PREFIX="user.mine.")
        assert stream.end["XATTRS"] == xattrs(small=b"y")
    finally:
        path.unlink()


@pytest.mark.parametrize(
    "fields",
    [
        {"XATTR_PREFIX": "user."},
        {"XATTR_PREFIX": "security.capability"},
        {"XATTR_PREFIX": "user." + "x" * 250},
        {"XATTRS": xattrs(a=b"1")},
        {"XATTR_PREFIX": "user.mine.", "XATTRS": b"no end"},
        {"XATTR_PREFIX": "user.mine.", "XATTRS": xattrs(a=b"1") + b"\0"},
        {"XATTR_PREFIX": "user.mine.", "XATTRS": b"a\0\xff\xff\xff\xff"},
        {"XATTR_PREFIX": "user.mine.", "XATTRS": xattrs(**{"x" * 250: b""})},
        {"XATTR_PREFIX": "user.mine.", "XATTRS": xattrs(a=b"1" * 5000)},
    ],
)
def test_wrong_extended_attributes_are_refused_and_nothing_is_made(
    guest: Guest, tmp_path: Path, fields: dict[str, str | bytes]
) -> None:
    path = tmp_path / "file"
    assert guest.run("WRITE", b"x", PATH=str(path), **fields).end["ERRNO"] == errno.EINVAL
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_extended_attributes_refuses_some_and_takes_none(guest: Guest) -> None:
    asked = {"PATH": "/proc/self/comm", "XATTR_PREFIX": "user.mine."}
    assert guest.run("WRITE", b"x", **asked, XATTRS=xattrs(a=b"1")).end["ERRNO"] == errno.EOPNOTSUPP
    assert guest.run("WRITE", b"x", **asked).end["COUNT"] == 0
