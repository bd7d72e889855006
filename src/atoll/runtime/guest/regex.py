"""The regular expressions of `files.grep`: translated to POSIX ones, which the guest compiles.

Owns what a pattern means. People and models write patterns as Python, JavaScript and ripgrep read them (`\\d`,
`[\\w.-]`, `(?:…)`, `.*?`, `(?i)`); the guest has the C library's extended expressions, over bytes, where half of these
have another meaning and no error. Not here: how lines are searched (`guest/search.c`). Used by `files.py`.

A translated pattern matches the same lines, or it is refused with what to write instead. A search only asks whether a
line matches, so lazy quantifiers are the greedy ones. `.` and `[^…]` match a whole UTF-8 character. `\\d`, `\\w`, `\\s`
and `\\b` know ASCII, as in Go and JavaScript.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from atoll.contract.errors import InvalidRequest

_SPECIAL = frozenset("\\.[](){}*+?|^$")
_MAX_CODE = 0x10FFFF
_WIDE = ((0x80, _MAX_CODE),)
"""All characters that are not ASCII."""
_CONTINUATION = "\udc80-\udcbf"
"""In a bracket expression: the bytes of a UTF-8 character after its first."""
_LINE = frozenset(range(1, 128)) - {ord("\n")}
"""The ASCII characters that a line of a text file has."""
_DIGITS = frozenset(map(ord, string.digits))
_WORD = frozenset(map(ord, string.ascii_letters + string.digits + "_"))
_SPACE = frozenset(map(ord, " \t\n\r\f\v"))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_POSIX_CLASSES = {
    "alpha": string.ascii_letters,
    "digit": string.digits,
    "alnum": string.ascii_letters + string.digits,
    "upper": string.ascii_uppercase,
    "lower": string.ascii_lowercase,
    "space": " \t\n\r\f\v",
    "blank": " \t",
    "punct": string.punctuation,
    "xdigit": string.hexdigits,
    "word": string.ascii_letters + string.digits + "_",
    "print": "".join(map(chr, range(32, 127))),
    "graph": "".join(map(chr, range(33, 127))),
    "cntrl": "".join(map(chr, (*range(1, 32), 127))),
}
_CONTROLS = {"t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
_INTERVAL = re.compile(r"\{(\d{1,5})?(,)?(\d{1,5})?\}")
_CODE = re.compile(r"x\{([0-9A-Fa-f]{1,6})\}|u\{([0-9A-Fa-f]{1,6})\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")
_NAME = re.compile(r"\w+")
_LOOK = {"=": "(?=…)", "!": "(?!…)", "<=": "(?<=…)", "<!": "(?<!…)"}
_MAX_CASE_CODES = 4096
"""Characters of a range outside ASCII whose other case is looked up."""


def translate(pattern: str, *, ignore_case: bool = False) -> tuple[str, bool]:
    """The pattern as a POSIX extended expression, and whether it ignores case: `(?i)` asks for that too.

    Raises:
        InvalidRequest: it is not a regular expression, or has something that a search by lines cannot do; the message
            says what to write instead.
    """
    at = 0
    if flags := _FLAGS.match(pattern):
        _check_flags(pattern, flags[1])
        ignore_case |= "i" in flags[1]
        at = flags.end()
    translator = _Translator(pattern, at, ignore_case=ignore_case)
    return translator.translate(), ignore_case


def escape(text: str) -> str:
    """A pattern that matches `text` as it is."""
    return "".join(f"\\{each}" if each in _SPECIAL else each for each in text)


def _check_flags(pattern: str, flags: str) -> None:
    for flag in flags:
        if flag == "s":
            raise _refused(pattern, "(?s) is not supported: lines are searched one by one, so no match spans two")
        if flag not in "imu":
            raise _refused(pattern, f"the flag {flag!r} is not supported; allowed are i, m and u")


def _refused(pattern: str, why: str) -> InvalidRequest:
    shown = pattern if len(pattern) <= 200 else f"{pattern[:200]}…"
    return InvalidRequest(f"the pattern {shown!r} cannot be used: {why}")


# ----------------------------------------------------------------------------------------------------------- characters


@dataclass
class _Characters:
    """A set of characters: those of ASCII, and ranges of others."""

    ascii: frozenset[int] = frozenset()
    wide: tuple[tuple[int, int], ...] = ()

    def union(self, other: _Characters) -> _Characters:
        return _Characters(self.ascii | other.ascii, _merged((*self.wide, *other.wide)))

    def complement(self) -> _Characters:
        gaps, begin = [], 0x80
        for low, high in self.wide:
            if low > begin:
                gaps.append((begin, low - 1))
            begin = high + 1
        if begin <= _MAX_CODE:
            gaps.append((begin, _MAX_CODE))
        return _Characters(frozenset(range(128)) - self.ascii, tuple(gaps))

    def any_case(self) -> _Characters:
        """With the other case of every letter."""
        codes = list(self.ascii)
        for low, high in self.wide:
            codes += range(low, min(high, low + _MAX_CASE_CODES) + 1)
        others = (chr(code).swapcase() for code in codes)
        return self.union(_of(other for other in others if len(other) == 1))


def _of(characters: Iterable[str]) -> _Characters:
    codes = [ord(each) for each in characters]
    return _Characters(
        frozenset(code for code in codes if code < 128), _merged([(code, code) for code in codes if code >= 128])
    )


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _class(letter: str) -> _Characters:
    """`\\d`, `\\w` or `\\s`, or with a capital what they leave out."""
    characters = _Characters(_CLASSES[letter.lower()])
    return characters.complement() if letter.isupper() else characters


def _items(codes: frozenset[int], more: str = "") -> str:
    """What stands between the brackets for these characters, and for the range `more`. Not for '^' alone."""
    plain = ((code, code) for code in codes - frozenset(map(ord, "]-[^")))
    runs = "".join(f"{chr(low)}-{chr(high)}" if high > low else chr(low) for low, high in _merged(plain))
    first = "]" if ord("]") in codes else ""
    last = "".join(each for each in "[^-" if ord(each) in codes)
    if last == "^-" and not first + runs + more:
        last = "-^"
    return f"{first}{runs}{more}{last}"


def _sequences(low: int, high: int) -> Iterator[str]:
    """Bracket expressions over bytes that together match the UTF-8 of the characters from `low` to `high`."""
    for most in (0x7FF, 0xFFFF):
        if low <= most < high:
            yield from _sequences(low, most)
            yield from _sequences(most + 1, high)
            return
    if low <= 0xDFFF and high >= 0xD800:  # surrogates have no UTF-8
        if low < 0xD800:
            yield from _sequences(low, 0xD7FF)
        if high > 0xDFFF:
            yield from _sequences(0xE000, high)
        return
    for bits in (6, 12, 18):
        mask = (1 << bits) - 1
        if low & ~mask == high & ~mask:
            break
        if low & mask:
            yield from _sequences(low, low | mask)
            yield from _sequences((low | mask) + 1, high)
            return
        if high & mask != mask:
            yield from _sequences(low, (high & ~mask) - 1)
            yield from _sequences(high & ~mask, high)
            return
    pairs = zip(chr(low).encode(), chr(high).encode(), strict=True)
    yield "".join(_byte(one) if one == other else f"[{_byte(one)}-{_byte(other)}]" for one, other in pairs)


def _byte(value: int) -> str:
    return bytes([value]).decode("utf-8", "surrogateescape")


# ----------------------------------------------------------------------------------------------------------- translator


@dataclass
class _Atom:
    """A part of the expression that a quantifier can follow."""

    text: str
    is_one: bool = True
    """A quantifier would apply to all of `text`, without parentheses."""
    repeated: str | None = None
    """A shorter form, over bytes, that means the same if it is repeated without a bound."""
    is_character: bool = False
    """It matches one whole character."""


@dataclass
class _Part:
    """An atom with its quantifier."""

    text: str
    begins_whole: bool = False
    """What it matches has a character at least, and begins with all of it."""
    ends_whole: bool = False
    """And ends with all of one."""


@dataclass
class _Translator:
    pattern: str
    at: int
    ignore_case: bool
    groups: list[int] = field(default_factory=list)
    """For each group that a backreference can name, its number in the translation."""
    names: dict[str, int] = field(default_factory=dict)
    opened: int = 0
    """Groups of the translation so far."""
    refers_back: bool = False
    """It may have backreferences, which must not be to a part of a character."""

    def translate(self) -> str:
        self.refers_back = re.search(r"\\[1-9k]|\(\?P=", self.pattern) is not None
        for each in self.pattern:
            if each in "\n\0" or ("\ud800" <= each <= "\udfff" and not "\udc80" <= each <= "\udcff"):
                raise self._refuse(
                    "it has a line break: lines are searched one by one, so search for one of its lines"
                    if each == "\n"
                    else f"it has the character {each!r}, which no text file has"
                )
        text = self._alternatives()
        if self.at < len(self.pattern):
            raise self._refuse("a ')' has no '('; write \\) for the character")
        return text

    def _refuse(self, why: str) -> InvalidRequest:
        return _refused(self.pattern, why)

    def _looking_at(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def _take(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self.pattern, self.at)
        if found:
            self.at = found.end()
        return found

    def _alternatives(self) -> str:
        branches = [self._branch()]
        while self._looking_at("|"):
            self.at += 1
            branches.append(self._branch())
        # The C library takes an empty branch for a mistake in some places, an empty group never.
        return "|".join(branch or self._group("") for branch in branches) if len(branches) > 1 else branches[0]

    def _branch(self) -> str:
        parts: list[_Part] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._quantified())
        for before, part, after in zip([_Part(""), *parts], parts, [*parts[1:], _Part("")], strict=False):
            # Between the bytes of a character there is no edge of a word either.
            if part.text == "\\B" and not (before.ends_whole or after.begins_whole):
                raise self._refuse("\\B needs a character before or after it, as in \\Bing or re\\B")
        return "".join(part.text for part in parts)

    def _group(self, inside: str) -> str:
        self.opened += 1
        return f"({inside})"

    def _quantified(self) -> _Part:
        begin = self.at
        if self._quantifier() is not None:
            raise self._refuse(
                f"{self.pattern[begin : self.at]!r} has nothing to repeat; write \\{self.pattern[begin]} for the "
                "character, or .* for any text"
            )
        atom = self._atom()
        begin = self.at
        quantifier = self._quantifier()
        if quantifier is None:
            return _Part(atom.text, atom.is_character, atom.is_character and not atom.repeated)
        if not atom.text or atom.text in {"^", "$", "\\b", "\\B"}:
            raise self._refuse(f"{self.pattern[begin : self.at]!r} has nothing to repeat")
        if self._looking_at("?"):  # lazy: the same lines match
            self.at += 1
        elif self._looking_at("+"):
            raise self._refuse("possessive quantifiers are not supported; leave out the '+' after the quantifier")
        begin = self.at
        if self._quantifier() is not None:
            raise self._refuse(
                f"{self.pattern[begin : self.at]!r} repeats what is repeated already; use (?:…) around it"
            )
        if atom.repeated is not None and quantifier in {"*", "+"} and not self.refers_back:
            return _Part((atom.text if quantifier == "+" else "") + f"{atom.repeated}*", quantifier == "+")
        text = (atom.text if atom.is_one else self._group(atom.text)) + quantifier
        whole = atom.is_character and quantifier[0] not in "*?" and not quantifier.startswith("{0")
        return _Part(text, whole, whole and not atom.repeated)

    def _quantifier(self) -> str | None:
        """The quantifier at this place, as POSIX writes it. None: there is none; a brace may be only a character."""
        if self.at < len(self.pattern) and self.pattern[self.at] in "*+?":
            self.at += 1
            return self.pattern[self.at - 1]
        found = _INTERVAL.match(self.pattern, self.at)
        if not found or (found[1] is None and found[3] is None):
            return None
        self.at = found.end()
        low = found[1] or "0"
        if not found[2]:
            return f"{{{low}}}"
        if found[3] and int(low) > int(found[3]):
            raise self._refuse(f"{found[0]} has its bounds in the wrong order")
        return f"{{{low},{found[3] or ''}}}"

    def _atom(self) -> _Atom:
        each = self.pattern[self.at]
        self.at += 1
        if each == "(":
            return self._parenthesis()
        if each == "[":
            return self._set(self._bracket())
        if each == ".":
            return self._set(_Characters(_LINE, _WIDE))
        if each in "^$":
            return _Atom(each)
        if each == "\\":
            return self._escape()
        return self._literal(each)

    def _literal(self, each: str) -> _Atom:
        if each in "\n\0":
            raise self._refuse("no line has a line break or a NUL in it")
        if each.isascii():
            return _Atom(f"\\{each}" if each in _SPECIAL else each, is_character=True)
        other = each.swapcase()
        if self.ignore_case and len(other) == 1 and other != each:
            return _Atom(self._group(f"{each}|{other}"), is_character=True)
        return _Atom(each, is_one="\udc80" <= each <= "\udcff", is_character=True)

    def _set(self, characters: _Characters) -> _Atom:
        """An expression for one of these characters: bytes, where one is ASCII; whole UTF-8 sequences otherwise."""
        inside = characters.ascii & _LINE
        if characters.wide == _WIDE:
            without = _items(_LINE - inside)
            first = f"[^{_items(_LINE - inside, _CONTINUATION)}]"
            repeated = f"[^{without}]" if without else "."
            return _Atom(f"{first}[{_CONTINUATION}]*", is_one=False, repeated=repeated, is_character=True)
        if not characters.wide:
            if not inside:
                raise self._refuse("a part of it matches no character that a line can have")
            if len(inside) == 1:
                return self._literal(chr(min(inside)))
            return _Atom(f"[{_items(inside)}]", is_character=True)
        branches = [sequence for low, high in characters.wide for sequence in _sequences(low, high)]
        if inside:
            branches.insert(0, self._set(_Characters(inside)).text)
        return _Atom(self._group("|".join(branches)), is_character=True)

    # ---------------------------------------------------------------------------------------------------- groups

    def _parenthesis(self) -> _Atom:
        name = None
        if self._looking_at("?"):
            self.at += 1
            if self._looking_at("#"):
                self.at = self.pattern.find(")", self.at) + 1 or len(self.pattern)
                return _Atom("")
            if self._looking_at("P="):
                self.at += 2
                return self._reference(self._name(")"))
            for begin, whole in sorted(_LOOK.items(), key=lambda each: -len(each[0])):
                if self._looking_at(begin):
                    raise self._refuse(
                        f"look-around, {whole}, is not supported; search for a part of the line, and look at what is "
                        "found, or run a program that has it, such as grep -P, in the sandbox"
                    )
            if self._looking_at(":"):
                self.at += 1
                return self._close()
            if self._looking_at("<") or self._looking_at("P<"):
                self.at = self.pattern.index("<", self.at) + 1
                name = self._name(">")
            else:
                raise self._refuse(
                    f"'(?{self.pattern[self.at : self.at + 1]}' is not supported here; flags such as (?i) go to the "
                    "beginning of the pattern, and (?:…) is a group"
                )
        self.groups.append(self.opened + 1)
        if name is not None:
            self.names[name] = len(self.groups)
        return self._close()

    def _close(self) -> _Atom:
        self.opened += 1
        inside = self._alternatives()
        if not self._looking_at(")"):
            raise self._refuse("a '(' has no ')'; write \\( for the character")
        self.at += 1
        return _Atom(f"({inside})")

    def _name(self, end: str) -> str:
        found = self._take(_NAME)
        if not found or not self._looking_at(end):
            raise self._refuse(f"the name of a group has to be letters, digits and '_', and end with {end!r}")
        self.at += 1
        return found[0]

    def _reference(self, group: str) -> _Atom:
        number = self.names.get(group, 0) if not group.isdecimal() else int(group)
        if not 1 <= number <= len(self.groups) or self.groups[number - 1] > 9:
            raise self._refuse(f"it refers to the group {group}, which is not one of its first nine before that place")
        return _Atom(f"\\{self.groups[number - 1]}")

    # ---------------------------------------------------------------------------------------------------- escapes

    def _escape(self) -> _Atom:
        if self.at == len(self.pattern):
            raise self._refuse("it ends with a backslash; write \\\\ for the character")
        each = self.pattern[self.at]
        if each in "dDwWsS":
            self.at += 1
            return self._set(self._cased(_class(each)))
        if each in "bB":
            self.at += 1
            return _Atom(f"\\{each}")
        if each in "AZz":
            self.at += 1
            return _Atom("^" if each == "A" else "$")
        if each in "<>":
            raise self._refuse(
                f"'\\{each}' has two meanings; write \\b for the edge of a word, or {each} for the character"
            )
        if each in "123456789":
            self.at += 1
            return self._reference(each)
        if each == "k" and (found := self._take(re.compile(r"k[<{'](\w+)[>}']"))):
            return self._reference(found[1])
        return self._literal(self._escaped())

    def _escaped(self) -> str:
        """The character that an escape stands for, inside or outside of brackets."""
        each = self.pattern[self.at]
        if found := self._take(_CODE):
            code = int(next(group for group in found.groups() if group), 16)
            if code > _MAX_CODE or 0xD800 <= code <= 0xDFFF:
                raise self._refuse(f"\\{found[0]} is not a character")
            return chr(code)
        self.at += 1
        if each == "n":
            return "\n"
        if each in _CONTROLS:
            return _CONTROLS[each]
        if each.isalnum() and each.isascii():
            advice = {
                "p": "; write the characters as a range, such as [À-ÿ]",
                "P": "; write the characters as a range, such as [^À-ÿ]",
                "Q": "; search for literal text instead",
                "h": "; write [ \\t]",
                "R": "; lines are searched one by one",
            }.get(each, "")
            raise self._refuse(f"'\\{each}' is not supported{advice}")
        return each

    # --------------------------------------------------------------------------------------------------- brackets

    def _cased(self, characters: _Characters) -> _Characters:
        return characters.any_case() if self.ignore_case else characters

    def _bracket(self) -> _Characters:
        """The set in a bracket expression, whose '[' has been read."""
        negated = self._looking_at("^")
        self.at += negated
        found, first = _Characters(), True
        while first or not self._looking_at("]"):
            found = found.union(self._member())
            first = False
        self.at += 1
        found = self._cased(found)
        return found.complement() if negated else found

    def _member(self) -> _Characters:
        if self._looking_at("[:"):
            end = self.pattern.find(":]", self.at)
            name = self.pattern[self.at + 2 : end] if end >= 0 else ""
            if name in _POSIX_CLASSES:
                self.at = end + 2
                return _of(_POSIX_CLASSES[name])
        low = self._end_of_range()
        if isinstance(low, _Characters):
            return low
        if not self._looking_at("-") or self.pattern[self.at + 1 : self.at + 2] in {"]", ""}:
            return _of(low)
        self.at += 1
        high = self._end_of_range()
        if isinstance(high, _Characters):  # as in [\w-\d]: the '-' is a character
            return _of((low, "-")).union(high)
        if high < low:
            raise self._refuse(f"the range {low}-{high} has its ends in the wrong order")
        codes = (ord(low), ord(high))
        wide = ((max(codes[0], 0x80), codes[1]),) if codes[1] >= 0x80 else ()
        return _Characters(frozenset(range(codes[0], min(codes[1], 127) + 1)), wide)

    def _end_of_range(self) -> str | _Characters:
        """One character, or a class such as `\\d`."""
        if self.at >= len(self.pattern):
            raise self._refuse("a '[' has no ']'; write \\[ for the character")
        each = self.pattern[self.at]
        self.at += 1
        if each != "\\":
            if "\udc80" <= each <= "\udcff":
                raise self._refuse("inside of brackets, only characters that are UTF-8 can be")
            return each
        if self.at >= len(self.pattern):
            raise self._refuse("a '[' has no ']'; write \\[ for the character")
        each = self.pattern[self.at]
        if each in "dDwWsS":
            self.at += 1
            return _class(each)
        if each == "b":  # a backspace, where anything else would be a mistake
            self.at += 1
            return "\b"
        return self._escaped()
