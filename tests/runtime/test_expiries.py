"""When a lifetime is over: what an entry says, and how use renews it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from atoll.drivers.activity import RECORDED_EVERY_MS, Activity, read_activity
from atoll.runtime.state.expiries import Expiry, now_ms

ENTRIES = {
    "1700000000000": Expiry(1_700_000_000_000),
    "1700000000000s": Expiry(1_700_000_000_000, then="sleep"),
    "1700000000000+60000": Expiry(1_700_000_000_000, 60_000),
    "1700000000000+60000s": Expiry(1_700_000_000_000, 60_000, then="sleep"),
    "1700000000000p": Expiry(1_700_000_000_000, then="pause"),
    "1700000000000+60000p": Expiry(1_700_000_000_000, 60_000, then="pause"),
}


@pytest.mark.parametrize("text", ENTRIES)
def test_an_entry_is_read_as_it_was_written(text: str) -> None:
    assert Expiry.parse(text) == ENTRIES[text]
    assert str(ENTRIES[text]) == text


@pytest.mark.parametrize("text", ["", "soon", "-1", "1.5", "1+", "1+s", "s", "1s+2", "1sp", "1d", " 1", "1 "])
def test_another_text_is_no_entry(text: str) -> None:
    with pytest.raises(ValueError, match="is not the end of a lifetime"):
        Expiry.parse(text)


def test_a_use_renews_it_by_a_second_more_than_is_recorded(tmp_path: Path) -> None:
    plain, renewed = Expiry(2000), Expiry(2000, 500)
    assert renewed.end_ms(str(tmp_path), lambda: True) == 2000, "it was never used"
    note(tmp_path, used_ms=1000)
    assert renewed.end_ms(str(tmp_path), lambda: True) == 1000 + 500 + RECORDED_EVERY_MS
    note(tmp_path, used_ms=100)
    assert renewed.end_ms(str(tmp_path), lambda: True) == 2000, "it does not become shorter"
    note(tmp_path, used_ms=9000)
    assert plain.end_ms(str(tmp_path), lambda: True) == 2000


def test_one_that_is_in_use_is_not_over_unless_its_keeper_is_dead(tmp_path: Path) -> None:
    renewed = Expiry(2000, 60_000)
    note(tmp_path, used_ms=5000, streams=3, used_now=1)
    assert renewed.end_ms(str(tmp_path), lambda: True) >= now_ms() + 59_000
    assert renewed.end_ms(str(tmp_path), lambda: False) == 5000 + 60_000 + RECORDED_EVERY_MS
    note(tmp_path, used_ms=5000, streams=3)  # those of clients that are gone
    assert renewed.end_ms(str(tmp_path), lambda: True) == 5000 + 60_000 + RECORDED_EVERY_MS


def test_a_file_of_another_layout_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "activity").write_bytes(bytes(24))
    assert read_activity(str(tmp_path)) == Activity()


def note(directory: Path, *, used_ms: int, streams: int = 0, used_now: int = 0) -> None:
    (directory / "activity").write_bytes(struct.pack("<qqqq", used_ms, streams, 0, used_now))
