"""Records on disk: bounded, read again after anything, and in the way of nothing that is not written down."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from atoll import AuditRecord
from atoll.runtime import audit
from tests.egress.world import World, proxied


def record(id: str, **fields: object) -> AuditRecord:
    given = {"time": datetime.now(UTC), "sandbox": "box", "protocol": "http", "host": "h", "verdict": "allowed"}
    return AuditRecord.model_validate({**given, "id": id, **fields})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(audit, "LIMIT_BYTES", 4096)
    return 4096


def test_what_is_kept_is_bounded_and_the_latest(tmp_path: Path, small: int) -> None:
    trail = audit.Trail(tmp_path)
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
    trail = audit.Trail(tmp_path)
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
    monkeypatch.setattr(audit, "_LOOK_S", 0.001)
    trail = audit.Trail(tmp_path)
    trail.write(record("0"))
    following = audit.follow(tmp_path)
    assert (await anext(following)).id == "0"
    for number in range(1, 40):
        trail.write(record(str(number)))
        assert (await anext(following)).id == str(number)
    assert (tmp_path / audit.EARLIER).exists()
    trail.close()


async def test_what_cannot_be_written_down_does_not_leave(world: World, tmp_path: Path) -> None:
    (tmp_path / audit.CURRENT).symlink_to("/dev/full")
    async with proxied(world, tmp_path, "*") as proxy:
        assert (await proxy.tunnel("example.com:443")).startswith(b"HTTP/1.1 503 ")
        assert (await proxy.tunnel("127.0.0.1:443")).startswith(b"HTTP/1.1 403 ")
    assert world.dialled == []
