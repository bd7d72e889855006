"""The grammar of the command line: parameters as functions declare them, and how words become their values.

A command is a function. Its parameters are annotated with `Annotated[TYPE, Option(…)]` or `Argument(…)`; a type is str,
int, float, bool, Path, or a list of str or int. Owns reading these declarations, parsing, and what is said about words
that cannot be parsed. Not here: help (`usage.py`), completion (`completion.py`), what Atoll's commands have in common
(`command.py`), how single values are written (`values.py`).

A library would do this too, and was used before: importing one and reading the declarations took longer than all else
that `atoll exec` does. So this imports nothing heavy, and reads only the declarations of the command that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

HELP = ("-h", "--help")
_WANTED: Mapping[str, str] = {
    "str": "text",
    "Path": "a path",
    "int": "a whole number",
    "float": "a number",
}
"""What a word has to be for a parameter of this type."""


class UsageError(Exception):
    """The words cannot be parsed. `command_path` is the command that they are for, `option` one that it has not."""

    def __init__(self, message: str, command_path: str, option: str | None = None) -> None:
        super().__init__(message)
        self.command_path = command_path
        self.option = option


Completes = Literal[
    "sandbox", "checkpoint", "volume", "image", "runtime", "place", "approval", "trace", "namespace", ""
]
"""What a shell offers for a word. A place is a file, or one in a sandbox. Empty: files."""


class Option:
    """An option: its names, and how it is described. `parser` makes the value of a word."""

    def __init__(
        self,
        *names: str,
        help: str,
        metavar: str = "",
        parser: Callable[[str], Any] | None = None,
        completes: Completes = "",
    ) -> None:
        self.names = names
        self.help = help
        self.metavar = metavar
        self.parser = parser
        self.completes = completes


class Argument:
    """An argument: a word that is known by its position, or the words from there on. Of a list of words, `leaves_last`
    leaves the last one to the argument that follows."""

    def __init__(self, *, metavar: str, help: str, completes: Completes = "", leaves_last: bool = False) -> None:
        self.metavar = metavar
        self.help = help
        self.completes = completes
        self.leaves_last = leaves_last


class Parameter:
    """A parameter of a command."""

    def __init__(self, name: str, kind: Any, declared: Option | Argument, default: Any, *, required: bool) -> None:
        self.name = name
        self.declared = declared
        self.default = default
        self.required = required
        self.help = declared.help
        members = [each for each in get_args(kind) if each is not NoneType] if isinstance(kind, UnionType) else [kind]
        self.type: Any = members[0]
        self.is_flag = self.type is bool
        self.is_list = get_origin(self.type) is list
        self.leaves_last = isinstance(declared, Argument) and declared.leaves_last
        self.names: tuple[str, ...] = ()
        self.negative_names: tuple[str, ...] = ()
        if isinstance(declared, Option):
            # `--stdin/--no-stdin`: the part behind the slash sets it to False.
            pairs = [name.split("/") for name in declared.names]
            self.names = tuple(pair[0] for pair in pairs)
            self.negative_names = tuple(pair[1] for pair in pairs if len(pair) > 1)

    @property
    def takes_value(self) -> bool:
        return not self.is_flag

    @property
    def title(self) -> str:
        """What messages call it."""
        if isinstance(self.declared, Argument):
            return f"'{self.declared.metavar}'"
        return " / ".join(f"'{name}'" for name in self.names)

    def parse(self, words: Sequence[str], command_path: str) -> Any:
        values = [self._parse_word(word, command_path) for word in words]
        return values if self.is_list else values[-1]

    def _parse_word(self, word: str, command_path: str) -> Any:
        parser = self.declared.parser if isinstance(self.declared, Option) else None
        convert = get_args(self.type)[0] if self.is_list else self.type
        try:
            return parser(word) if parser is not None else convert(word)
        except ValueError as error:
            reason = f"{error}" if parser is not None else f"{word!r} is not {_WANTED[convert.__name__]}"
            raise UsageError(f"Invalid value for {self.title}: {reason}", command_path) from None


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters that a function declares as options and arguments, in their order. All others are left out."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = code.co_varnames[: code.co_argcount]
    defaults = {
        **dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False)),
        **(function.__kwdefaults__ or {}),
    }
    found = {}
    for name in names:
        annotation = function.__annotations__.get(name)
        if isinstance(annotation, str):
            annotation = eval(annotation, function.__globals__)  # noqa: S307 - our own code
        if get_origin(annotation) is not Annotated:
            continue
        kind, declared = get_args(annotation)
        found[name] = Parameter(name, kind, declared, defaults.get(name), required=name not in defaults)
    return found


class Parser:
    """Parses the words of one command."""

    def __init__(self, parameters: Sequence[Parameter], command_path: str) -> None:
        self._path = command_path
        self._arguments = [each for each in parameters if isinstance(each.declared, Argument)]
        self._options = {name: each for each in parameters for name in (*each.names, *each.negative_names)}
        self._parameters = parameters
        self._words: dict[str, list[str]] = {}
        self._flags: dict[str, bool] = {}
        self.wants_help = False

    def split(self, words: Sequence[str], leading: int | None) -> tuple[list[str], list[str]]:
        """Take the options out of `words`. Returns the other words, and the rest that was not looked at.

        `leading`: the rest begins with the word behind so many that are not options. None: all words are looked at.
        Behind `--` there are no options.
        """
        found: list[str] = []
        rest = list(words)
        while rest:
            word = rest[0]
            if word == "--":
                return (found, rest[1:]) if leading is not None else ([*found, *rest[1:]], [])
            if word.startswith("--"):
                self._take_long(rest)
            elif word.startswith("-") and len(word) > 1:
                self._take_short(rest)
            elif leading is None or len(found) < leading:
                found.append(rest.pop(0))
            else:
                break
        return found, rest

    def values(self, words: Sequence[str]) -> dict[str, Any]:
        """The values of all parameters, `words` being those of the arguments."""
        rest = list(words)
        for argument in self._arguments:
            count = max(len(rest) - argument.leaves_last, 1) if argument.is_list else 1
            taken, rest = rest[:count], rest[count:]
            if taken:
                self._words[argument.name] = taken
        values = {}
        for each in self._parameters:
            if each.name in self._flags:
                values[each.name] = self._flags[each.name]
            elif each.name in self._words:
                values[each.name] = each.parse(self._words[each.name], self._path)
            elif each.required:
                what = "argument" if isinstance(each.declared, Argument) else "option"
                self._refuse(f"Missing {what} {each.title}.")
            else:
                values[each.name] = each.default
        if rest:
            self._refuse(f"Got unexpected extra argument(s) ({' '.join(rest)})")
        return values

    def _take_long(self, rest: list[str]) -> None:
        name, equals, value = rest.pop(0).partition("=")
        if not self._take_option(name, value if equals else None, rest):
            self._refuse(f"No such option: {name}{self._possible(name)}", name)

    def _take_short(self, rest: list[str]) -> None:
        word = rest.pop(0)
        for position, letter in enumerate(word[1:], start=2):
            option = self._options.get(f"-{letter}")
            attached = word[position:] if option is not None and option.takes_value else ""
            if not self._take_option(f"-{letter}", attached or None, rest):
                self._refuse(f"No such option: -{letter}", f"-{letter}")
            if attached:
                return

    def _take_option(self, name: str, value: str | None, rest: list[str]) -> bool:
        """Take one option, with the word behind it if it needs a value. False: there is no such option."""
        if name in HELP and name not in self._options:
            self.wants_help = True
            return True
        option = self._options.get(name)
        if option is None:
            return False
        if option.is_flag:
            if value is not None:
                self._refuse(f"Option '{name}' does not take a value.")
            self._flags[option.name] = name in option.names
            return True
        if value is None:
            if not rest or rest[0] == "--":
                self._refuse(f"Option '{name}' requires an argument.")
            value = rest.pop(0)
        self._words.setdefault(option.name, []).append(value)
        return True

    def _possible(self, name: str) -> str:
        near = similar(name, [known for known in (*self._options, *HELP) if known.startswith("--")])
        return f" (Possible options: {', '.join(sorted(near))})" if near else ""

    def _refuse(self, message: str, option: str | None = None) -> NoReturn:
        raise UsageError(message, self._path, option)


def similar(word: str, known: Sequence[str]) -> list[str]:
    """Those of `known` that may have been meant."""
    from difflib import get_close_matches

    return get_close_matches(word, known)
