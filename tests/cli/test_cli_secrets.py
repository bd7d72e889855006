"""`--secret` and `--secret-env`: values come from where nobody sees them, and are shown to nobody."""

from __future__ import annotations

import os

import pytest

from tests import searching
from tests.cli.driving import Atoll

VALUE, SHOWN = "sk-live-7c1d0a55e9", "tk-inside-1f0b44c2"


def test_a_secret_is_a_placeholder_inside_and_nowhere_a_value(atoll: Atoll) -> None:
    atoll.env |= {"OURS": VALUE, "TOKEN": SHOWN}
    name = atoll.new_name()
    made = atoll("create", name, "--secret", "API_KEY=OURS@api.test:x-api-key", "--secret-env", "TOKEN", "--json")
    printed, token = atoll.text("exec", name, "-c", "echo $API_KEY $TOKEN").split()
    assert printed.startswith("atoll_secret_")
    assert token == SHOWN
    listed = atoll("ls", "--json")
    for value in (VALUE, SHOWN):
        assert value.encode() not in made.stdout + made.stderr + listed.stdout + listed.stderr
    if os.geteuid() == 0:
        # The variables of whoever made it are not those of what runs it.
        (id,) = [info["id"] for info in atoll.json("ls", "--json") if info["name"] == name]
        assert not [pid for pid in searching.processes_of(id) if searching.in_memory(pid, VALUE.encode())]


def test_a_value_may_come_from_standard_input_or_a_file(atoll: Atoll) -> None:
    (atoll.scratch / "value").write_text(f"{SHOWN}\n")
    name = atoll.new_name()
    options = ("--secret-env", f"A=file:{atoll.scratch}/value", "--secret-env", "B=-")
    atoll("create", name, *options, input=b"from standard input\n")
    assert atoll.text("exec", name, "-c", "echo $A $B") == f"{SHOWN} from standard input\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--secret", f"KEY={VALUE}@api.test"],
        ["--secret", f"KEY={VALUE}"],
        ["--secret-env", f"KEY={VALUE}"],
        ["--secret-env", "A=-", "--secret-env", "B=-"],
    ],
)
def test_a_value_on_the_command_line_is_refused_and_not_repeated(atoll: Atoll, words: list[str]) -> None:
    done = atoll("create", *words, status=None)
    assert done.returncode in (1, 2)
    assert VALUE.encode() not in done.stderr
    assert b"Traceback" not in done.stderr
