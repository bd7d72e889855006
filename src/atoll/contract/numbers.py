"""Numbers with names, such as those of a protocol: what is used of `enum.IntEnum`, without the time that it takes.

`IntEnum` takes 10 µs for each member, and `atoll exec` defines 160 before it can say anything: an eighth of its time.
Type checkers see the real one. Used by `protocol.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

__all__ = ["IntEnum"]

if TYPE_CHECKING:
    from enum import IntEnum
else:

    class _NumberType(type):
        """Makes each number in the body of a class an instance of the class."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
            made = super().__new__(cls, name, bases, body)
            made.by_number = {}
            for key, number in body.items():
                if type(number) is int:
                    member = made.by_number[number] = int.__new__(made, number)
                    member.name = key
                    setattr(made, key, member)
            return made

        def __call__(cls, number: int) -> Any:
            try:
                return cls.by_number[number]
            except KeyError:
                raise ValueError(f"{number!r} is not a {cls.__name__}") from None

        def __iter__(cls) -> Iterator[Any]:
            return iter(cls.by_number.values())

    class IntEnum(int, metaclass=_NumberType):
        """The base of a class of numbers."""

        name: str

        @property
        def value(self) -> int:
            return int(self)

        def __repr__(self) -> str:
            return f"<{type(self).__name__}.{self.name}: {int(self)}>"
