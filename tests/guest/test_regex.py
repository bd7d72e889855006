"""Patterns mean what Python means by them: the same lines match, or the pattern is refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from atoll import InvalidRequest
from atoll.runtime.guest import regex
from tests.guest.client import Guest

LINES = [
    "x = 42", "x = y", "", " ", "\t", "foo() {", "foo(bar)", "if (a) { b }", "a{2}", "aa", "aaa", "é", "É", "aéb",
    "ab",
    "naïve Ünïcode", "日本語", "日", "я", "Я 7", "user.name-x@example.com", "CamelCase", "snake_case", "a-b", "a]b",
    "a[b",
    "a^b", "a\\b", "a\\d", "tab\there", "say \"hi\"", "it's", "<div>", "$HOME", "1.5", "word", "sword", "words",
    "abab",
    "abcabc", "-", "^", "[", "]", "\\", "a|b", "*", "cr\r", "\x07", "end.", "aXb", "TODO: x", "todo", "ä1", "_",
    "a.b",
]  # fmt: skip
PATTERNS = [
    r"\d", r"\d+", r"\D", r"^\D+$", r"\w+", r"^\w+$", r"\W", r"^\W$", r"\s", r"^\s+$", r"\S+", r"^\S$", r"\bword\b",
    r"\Bword", r"wor\B", r"\B.b", r"é\B", r"..+", r"^.+.$", r"(.+)\1",
    r"^(.*)\1$", r"[\d]", r"[\w.-]+@[\w.-]+\.\w+", r"[^\s]", r"^[^\s]$", r"[^\W_]", r"^[^\W\d_]+$", r"[\s\S]",
    r"^[\s\S]$",
    r"[\]]", r"[]]", r"[^]]", r"a[\[\]]b", r"[\\]", r"[\^]", r"[-^]", r"[a\-z]", r"[\-]", r"^[^a-z]$", r"[a-z&]{4}",
    r"[[]", r"foo\(\) \{", r"foo\(\) {", r"{", r"a{2}", r"a\{2}", r"^a{2,3}$", r"a{1,}$", r"a{,2}b", r"x{", r"x{a}",
    r"(?:ab)+$", r"(?P<x>ab)(?P=x)", r"(a)(?:b)(c)?\1", r"(?:x|(ab))\1", r"(ab|cd)\1", r"([a-z])(?:é|[äö])?\1",
    r"a.*?b",
    r"a.+?b", r"a.??b", r"^a{1,2}?$", r"(?i)TODO", r"(?i)é", r"(?i)[É]", r"(?i)^[^é]$", r"(?i)[a-z]+é",
    r"(?im)^todo$",
    r"^.$", r"^..$", r"^.{3}$", r"a.b", r"^a?.?b$", r"é", r"^é?$", r"^é+$", r"é{1}", r"^[éÉ]$", r"^[^é]$", r"[а-я]",
    r"^[а-яА-Я] \d$", r"[\u4e00-\u9fff]", r"^[^\x00-\x7f]+$", r"\x41", r"\x{e9}|\u00c9", r"\t", r"[\t]", r"\r$",
    r"\x07", r"\.", r"\$HOME", r"\"hi\"", r"it\'s", r"\-", r"\/|\:", r"^$", r"", r"a|", r"(|a)b$", r"()", r"\Ax",
    r"b\Z",
    r"[[:alpha:]]+[[:digit:]]", r"^[[:upper:]]", r"[^[:space:]]$", r"(?#note)word", r"]", r"}", r"a-b", r"[$]",
    r"[.]",
    r"[*+?]", r"[(|)]", r"\|", r"[\w-]+$", r"[a-]", r"[--/]", r"[+--]", r"[\x20-\x7e]", r"^[!-~]+$",
]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes("".join(f"{line}\n" for line in LINES).encode())
    return path


def found(guest: Guest, path: Path, pattern: str) -> list[str]:
    expression, ignore_case = regex.translate(pattern)
    fields = {"PATTERN": expression.encode("utf-8", "surrogateescape"), "IGNORE_CASE": int(ignore_case)}
    return [LINES[record["LINE"] - 1] for record in guest.records("GREP", PATH=str(path), **fields)]


def meant(pattern: str) -> list[str]:
    """The lines in which Python finds the pattern, with classes of ASCII."""
    for name, characters in (("alpha", "a-zA-Z"), ("digit", "0-9"), ("upper", "A-Z"), ("space", r"\s")):
        pattern = pattern.replace(f"[:{name}:]", characters)
    flags = re.NOFLAG if pattern.startswith("(?i") else re.ASCII  # which is for case too
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return [line for line in LINES if re.search(pattern.replace(r"\x{e9}", "é"), line, flags)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_the_lines_that_it_matches_in_python(guest: Guest, text: Path, pattern: str) -> None:
    assert found(guest, text, pattern) == meant(pattern)


_ATOMS = ["a", "b", "é", "É", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[^a]", "[é-я]", r"[\w-]", r"[^\s\w]",
          "[^é]",
          r"\.", "-", "{", "^", "$", r"\b", r"\B", "日", "(a|b)", "(?:é|a)", "[]^-]"]  # fmt: skip
_PARTS = st.tuples(
    st.sampled_from(_ATOMS), st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{0,2}", "*?", "+?"])
).map("".join)
_ANY = st.lists(st.lists(_PARTS, max_size=5).map("".join), min_size=1, max_size=3).map("|".join)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=_ANY)
def test_no_pattern_matches_other_lines_than_in_python(guest: Guest, text: Path, pattern: str) -> None:
    try:
        wanted = meant(pattern)
    except re.error:
        return
    try:
        seen = found(guest, text, pattern)
    except InvalidRequest:
        # An anchor that is repeated, and some places for \B.
        assert re.search(r"(\^|\$|\\b)[*+?{]|\\B", pattern)
    else:
        assert seen == wanted


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("a(?=b)", "look-around"), ("a(?!b)", "look-around"), ("(?<=a)b", "look-around"), ("(?<!a)b", "grep -P"),
        (r"\<a\>", r"write \b"), (r"\p{L}", "range"), (r"\Qa\E", "literal"), (r"\h", r"[ \t]"),
        (r"a\nb", "line break"),
        ("a\nb", "line break"), ("(?s)a.b", "one by one"), ("(?x)a b", "allowed are i, m and u"),
        ("a(?i)b", "beginning"),
        ("(?i:a)b", "beginning"), ("*.py", ".*"), ("+", r"\+"), ("a**", "(?:…)"), ("a*+", "possessive"),
        ("(?>a)", "(?:…)"),
        ("(a", r"\("), ("a)", r"\)"), ("[a", r"\["), ("[a\\", r"\["), ("a\\", "backslash"), (r"(a)\2", "the group 2"),
        (r"(?P=x)", "the group x"), ("(?P<>a)", "name of a group"), ("[z-a]", "wrong order"),
        ("a{3,2}", "wrong order"),
        ("[\n]", "line break"), (r"[\n]", "no character"), (r"\x{110000}", "not a character"),
        ("a\0b", "no text file"),
        ("\ud800", "no text file"), ("[\udcff]", "UTF-8"), ("^*", "nothing to repeat"),
        (r"\B", "a character before or after"), (r"a?\B.*b", "re"), (r"\y", r"'\y' is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_for_is_refused_with_what_to_write_instead(pattern: str, advice: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(advice)):
        regex.translate(pattern)


def test_a_byte_that_is_not_utf8_is_found_as_it_is(guest: Guest, tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9 au lait\ncafe\n")
    pattern = regex.translate("caf\udce9")[0].encode(errors="surrogateescape")
    assert len(guest.records("GREP", PATH=str(path), PATTERN=pattern)) == 1
    assert regex.translate(regex.escape("a.b*(c)[d]{2}\\^$|+?"))[0] == r"a\.b\*\(c\)\[d\]\{2\}\\\^\$\|\+\?"
