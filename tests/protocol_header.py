"""The lists of `guest/protocol.h`, as the C preprocessor expands them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

HEADER = Path(__file__).resolve().parents[1] / "src" / "atoll" / "guest" / "protocol.h"

PREFIXES = {
    "PROTOCOL_LIMITS": "",
    "FRAME_TYPES": "FRAME_",
    "OPERATIONS": "OP_",
    "EVENT_KINDS": "EVENT_",
    "CONTROL_ACTIONS": "ACTION_",
    "FREEZE_ACTIONS": "FREEZE_",
    "CHANGES": "CHANGE_",
    "FILE_TYPES": "KIND_",
    "FIELD_TAGS": "TAG_",
}
"""Each list and what its names begin with in C."""


class Row(NamedTuple):
    name: str
    number: int
    type: str | None
    """Of fields alone."""


def read_lists() -> dict[str, list[Row]]:
    """All lists of the header, by name. A list that `PREFIXES` lacks is there too, so that a test can notice it."""
    names = re.findall(r"^#define (\w+)\(X\)", HEADER.read_text(), re.MULTILINE)
    program = [f'#include "{HEADER}"']
    for name in names:
        program += [f"#define ROW_{name}(...) @{name}, __VA_ARGS__;", f"{name}(ROW_{name})"]
    done = subprocess.run(["cc", "-E", "-P", "-"], input="\n".join(program), capture_output=True, text=True, check=True)
    lists: dict[str, list[Row]] = {name: [] for name in names}
    for found in re.findall(r"@([^;]+);", done.stdout):
        name, member, number, *type_ = (part.strip() for part in found.split(","))
        lists[name].append(Row(member, int(number), type_[0] if type_ else None))
    return lists


def read_numbers() -> dict[str, int]:
    """Every number by its name in C: FRAME_HELLO, OP_SPAWN, TAG_PATH, MAX_PAYLOAD."""
    return {PREFIXES[name] + row.name: row.number for name, rows in read_lists().items() for row in rows}
