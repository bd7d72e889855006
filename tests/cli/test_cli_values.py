"""Words on the command line become values, and wrong ones become sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.contract.errors import InvalidRequest
from atoll.surfaces.cli import values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("1b", 1),
        ("512m", 512 * 1024**2),
        ("512M", 512 * 1024**2),
        ("1.5g", 1536 * 1024**2),
        ("1GiB", 1024**3),
        ("1 gb", 1024**3),
        (".5k", 512),
        ("2t", 2 * 1024**4),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read_in_powers_of_1024(text: str, expected: int) -> None:
    assert values.size(text) == expected


@pytest.mark.parametrize("text", ["", "m", "12x", "-1", "1e3", "0", "0.1b", "nan", "inf", "5 5", "١"])
def test_a_wrong_size_is_refused_with_what_was_typed(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        values.size(text)
    assert repr(text) in refused.value.message


@pytest.mark.parametrize(
    ("word", "source", "target", "read_only"),
    [
        ("/srv/data:/data", "/srv/data", "/data", True),
        ("/srv/data:/data:ro", "/srv/data", "/data", True),
        ("/srv/data:/data:rw", "/srv/data", "/data", False),
        ("/a:b/c:/data:rw", "/a:b/c", "/data", False),
        ("volume:cache:/data", "volume:cache", "/data", False),
        ("volume:cache:/data:ro", "volume:cache", "/data", True),
    ],
)
def test_a_mount_is_read_only_unless_it_is_a_volume_or_rw_follows(
    word: str, source: str, target: str, read_only: bool
) -> None:
    mount = values.mount(word)
    assert (mount.source, mount.target, mount.is_read_only) == (source, target, read_only)
    assert values.mount(str(mount)) == mount.model_copy(update={"read_only": read_only})


def test_the_source_of_a_mount_is_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert values.mount(".:/work").source == str(tmp_path)
    assert values.mount("src/../lib:/work").source == str(tmp_path / "lib")


@pytest.mark.parametrize(
    "word", ["", ":", "/srv", "/srv:", ":/work", "/srv:work", "/srv:/work:rx", "volume::/x", "volume:/x"]
)
def test_a_wrong_mount_is_refused_with_what_was_typed(word: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        values.mount(word)
    assert repr(word) in refused.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30", 30), ("30s", 30), ("1.5s", 1.5), ("500ms", 0.5), ("5m", 300), ("2h", 7200), ("1m30s", 90), ("1D", 86400)],
)
def test_a_duration_is_read_in_seconds(text: str, expected: float) -> None:
    assert values.duration(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "s", "5x", "-1", "0", "0ms", "1m30", "inf", "nan", "1e400", "9" * 400])
def test_a_wrong_duration_is_refused_with_what_was_typed(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        values.duration(text)
    assert repr(text) in refused.value.message


def test_variables_are_set_or_taken_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "a=b")
    assert values.environment(["A=1", "B=", "C=x=y", "FROM_HERE"]) == {
        "A": "1",
        "B": "",
        "C": "x=y",
        "FROM_HERE": "a=b",
    }


@pytest.mark.parametrize("word", ["=1", "", "NOT_SET_ANYWHERE_HERE"])
def test_a_variable_without_name_or_value_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest):
        values.environment([word])


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("box:/etc/hosts", "/etc/hosts"),
        ("box:", "."),
        ("box:a:b", "a:b"),
        ("box:new\nline", "new\nline"),
    ],
)
def test_a_name_before_a_colon_is_a_sandbox(text: str, inside: str) -> None:
    place, here = values.Place("box", inside), values.Place(None, "here")
    assert values.copy_places(["here"], text) == ([here], place)
    assert values.copy_places([text, text], "here") == ([place, place], here)


@pytest.mark.parametrize("here", ["./box:file", "/a:b", "Box:file", "file", "-", ":x"])
def test_all_else_is_a_path_of_this_machine(here: str) -> None:
    assert values.copy_places([here], "box:x")[0] == [values.Place(None, here)]


@pytest.mark.parametrize(
    ("sources", "target", "word"),
    [
        (["x"], "y", "neither x nor y"),
        (["a:x", "x"], "y", "neither x nor y"),
        (["-"], "-", "neither"),
        ([""], "a:", "empty"),
        (["x", "-"], "a:", "one file"),
        (["a:x", "a:y"], "-", "one file"),
    ],
)
def test_each_copy_needs_a_side_in_a_sandbox_and_a_stream_is_alone(sources: list[str], target: str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        values.copy_places(sources, target)


@pytest.mark.parametrize(("word", "number"), [("TERM", 15), ("sigkill", 9), ("9", 9), ("34", 34)])
def test_a_signal_is_a_name_or_a_number(word: str, number: int) -> None:
    assert values.signal_number(word) == number


@pytest.mark.parametrize("word", ["", "NOPE", "0", "99", "-1", "TERM KILL"])
def test_what_is_not_a_signal_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a signal"):
        values.signal_number(word)


def test_a_file_of_variables_has_one_on_each_line_and_options_come_on_top(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OURS", "inherited")
    (tmp_path / "env").write_text("# comment\n\nA=1\nB=x = y # kept \n  OURS\nQUOTED='q'\n")
    found = values.environment(["A=2"], [str(tmp_path / "env")])
    assert found == {"A": "2", "B": "x = y # kept", "OURS": "inherited", "QUOTED": "'q'"}
    (tmp_path / "bad").write_text("A=1\n=2\n")
    for wrong, said in (tmp_path / "bad", "has no name"), (tmp_path / "none", "No such file"), (tmp_path, "directory"):
        with pytest.raises(InvalidRequest, match=f"--env-file {wrong}: .*{said}"):
            values.environment([], [str(wrong)])


def test_an_offset_is_for_both_streams_or_for_each() -> None:
    assert values.offsets("10") == (10, 10)
    assert values.offsets("10,0") == (10, 0)
    for wrong in ("", "-1", "1,2,3", "a", "1,"):
        with pytest.raises(InvalidRequest):
            values.offsets(wrong)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("KEY@api.test", ("KEY", "KEY", ("api.test",), None)),
        ("KEY=OURS@api.test,b.test", ("KEY", "OURS", ("api.test", "b.test"), None)),
        ("KEY=file:/a@b/c@api.test:x-api-key", ("KEY", "file:/a@b/c", ("api.test",), "x-api-key")),
        ("KEY=-@http://plain.test", ("KEY", "-", ("http://plain.test",), None)),
        ("KEY@http://plain.test:X-Key", ("KEY", "KEY", ("http://plain.test",), "X-Key")),
    ],
)
def test_a_secret_says_where_its_value_is_and_where_it_goes(
    word: str, expected: tuple[str, str, tuple[str, ...], str | None]
) -> None:
    assert values.secret(word) == values.SecretSource(*expected)


def test_a_value_is_taken_from_a_variable_or_a_file_and_never_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OURS", "sk-of-a-variable")
    (tmp_path / "key").write_text("sk-of-a-file\n")
    assert values.secret_value(values.secret_variable("KEY=OURS")) == "sk-of-a-variable"
    assert values.secret_value(values.secret_variable(f"KEY=file:{tmp_path}/key")) == "sk-of-a-file"
    for wrong in ("KEY=sk-live-123", "KEY=file:/no/sk-live-123"):
        with pytest.raises(InvalidRequest) as refused:
            values.secret_value(values.secret_variable(wrong))
        assert "sk-live" not in refused.value.message
    for wrong in ("KEY=sk-live-123", "sk-live-123", "@api.test", "=sk-live-123@api.test", "KEY=@api.test", "KEY@"):
        with pytest.raises(InvalidRequest) as refused:
            values.secret(wrong)
        assert "sk-live" not in refused.value.message
