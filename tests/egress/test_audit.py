"""Records on disk: bounded, read again after anything, and in the way of nothing that is not written down."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from atoll import AuditRecord
from atoll.runtime.egress import audit
from tests.egress.world import World, proxied


def record(id: str, **fields: object) -> AuditRecord:
    given = {"time": datetime.now(UTC), "sandbox": "box", "protocol": "http", "host": "h", "verdict": "allowed"}
    return AuditRecord.model_validate({**given, "id": id, **fields})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(audit, "MAX_FILE_BYTES", 4096)
    return 4096


@pytest.fixture
def limit() -> Iterator[Callable[[int, int], None]]:
    """Sets a limit of this process, until the test ends."""
    before: dict[int, tuple[int, int]] = {}

    def set_to(kind: int, most: int) -> None:
        before.setdefault(kind, resource.getrlimit(kind))
        resource.setrlimit(kind, (most, before[kind][1]))

    yield set_to
    for kind, limits in before.items():
        resource.setrlimit(kind, limits)


def test_what_is_kept_is_bounded_and_the_latest(tmp_path: Path, small: int) -> None:
    trail = audit.AuditLog(tmp_path)
    for number in range(200):
        trail.write(record(str(number)))
    trail.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= small
    kept = [int(each.id) for each in audit.read(tmp_path)]
    assert kept == list(range(200 - len(kept), 200))
    assert sum(sizes) > small


def test_a_record_that_ended_replaces_the_one_that_began_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    trail = audit.AuditLog(tmp_path)
    trail.write(record("a"))
    trail.write(record("b"))
    trail.write(record("a", ended=datetime.now(UTC), sent_bytes=7))
    trail.close()
    path = tmp_path / audit.CURRENT
    path.write_bytes(path.read_bytes() + b'{"id": "c", "ti')
    found = {each.id: each for each in audit.read(tmp_path)}
    assert (found["a"].sent_bytes, found["b"].ended, len(found)) == (7, None, 2)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_records_are_followed_into_the_next_file(
    tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_POLL_INTERVAL_S", 0.001)
    trail = audit.AuditLog(tmp_path)
    trail.write(record("0"))
    following = audit.follow(tmp_path)
    assert (await anext(following)).id == "0"
    for number in range(1, 40):
        trail.write(record(str(number)))
        assert (await anext(following)).id == str(number)
    assert (tmp_path / audit.EARLIER).exists()
    trail.close()


def test_a_new_file_that_cannot_be_begun_leaves_the_old_one_to_write_to(
    tmp_path: Path, small: int, limit: Callable[[int, int], None]
) -> None:
    trail = audit.AuditLog(tmp_path)
    trail.write(record("full", host="h" * 3700))
    limit(resource.RLIMIT_NOFILE, 3)
    for _ in range(2):
        with pytest.raises(OSError, match="Too many open files"):
            trail.write(record("refused", host="h" * 3700))
    trail.write(record("short"))
    limit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    trail.write(record("next", host="h" * 3700))
    trail.close()
    assert [each.id for each in audit.read(tmp_path)] == ["full", "short", "next"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_record_that_is_written_in_part_is_none(tmp_path: Path, limit: Callable[[int, int], None]) -> None:
    trail = audit.AuditLog(tmp_path)
    trail.write(record("first"))
    size = (tmp_path / audit.CURRENT).stat().st_size
    limit(resource.RLIMIT_FSIZE, size + 20)  # as a disk that has room for 20 bytes
    with pytest.raises(OSError, match="No space left"):
        trail.write(record("torn"))
    assert (tmp_path / audit.CURRENT).stat().st_size == size
    limit(resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    trail.write(record("second"))
    trail.close()
    assert [each.id for each in audit.read(tmp_path)] == ["first", "second"]


async def test_what_cannot_be_written_down_does_not_leave(world: World, tmp_path: Path) -> None:
    (tmp_path / audit.CURRENT).symlink_to("/dev/full")
    async with proxied(world, tmp_path, "*") as proxy:
        assert (await proxy.tunnel("example.com:443")).startswith(b"HTTP/1.1 503 ")
        assert (await proxy.tunnel("127.0.0.1:443")).startswith(b"HTTP/1.1 403 ")
    assert world.dialled == []
