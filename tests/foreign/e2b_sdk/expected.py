"""What a suite of others is compared with: a list of its tests that do not pass, each with the reason.

Used by `test_suite.py` here and in `e2b_code_interpreter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase


def problems(outcomes: Mapping[str, Mapping[str, str]], reasons: Mapping[str, str]) -> list[str]:
    """What differs from the list. Its names may be patterns: `sync/env_vars/test_r.py::*`."""
    found = []
    for name, told in outcomes.items():
        rows = [row for row in reasons if row == name or fnmatchcase(name, row)]
        if told["outcome"] == "passed" and rows:
            found.append(f"{name} passed, but not_passing.toml says that it does not: {rows[0]}")
        elif told["outcome"] != "passed" and not rows:
            found.append(f"{name} did not pass ({told['outcome']}), and is not in not_passing.toml:\n{told['text']}")
    return found
