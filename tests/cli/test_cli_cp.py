"""`cp`: both ways, whole trees, odd names, and nothing that leads astray."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from tests.cli.driving import Atoll

ODD_NAMES = ["a b", "-dash", "new\nline", "qu'o\"te", "caf\u00e9", "star*", ":colon", "$HOME", "\\back"]


def tree(root: Path) -> dict[str, object]:
    """What is below a directory, as it would be after a faithful copy."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = "directory"
        else:
            found[name] = (path.read_bytes(), path.stat().st_mode & 0o777)
    return found


def plant(root: Path) -> None:
    (root / "deep" / "er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "deep" / "er" / "script").write_bytes(b"#!/bin/sh\n")
    (root / "deep" / "er" / "script").chmod(0o755)
    (root / "secret").write_bytes(b"\x00\xff")
    (root / "secret").chmod(0o600)
    (root / "link").symlink_to("deep/er/script")
    for name in ODD_NAMES:
        (root / name).write_text(name)


def test_a_file_goes_in_and_comes_out_the_same(atoll: Atoll, box: str) -> None:
    source, target = atoll.scratch / "source", atoll.scratch / "target"
    source.write_bytes(random.Random(2).randbytes(5_000_000))
    source.chmod(0o750)
    atoll("cp", str(source), f"{box}:dir/in")
    assert atoll.text("exec", box, "-c", "stat -c '%a %U' dir/in") == "750 user\n"
    atoll("cp", f"{box}:dir/in", str(target))
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o750


def test_a_tree_goes_in_and_comes_out_the_same(atoll: Atoll, box: str) -> None:
    source, target = atoll.scratch / "source", atoll.scratch / "target"
    plant(source)
    atoll("cp", str(source), f"{box}:there")
    assert atoll.text("exec", box, "--", "cat", "there/link") == "#!/bin/sh\n"
    atoll("cp", f"{box}:there", str(target))
    assert tree(target) == tree(source)


def test_into_a_directory_it_comes_under_its_own_name(atoll: Atoll, box: str) -> None:
    source = atoll.scratch / "source"
    plant(source)
    atoll("exec", box, "--", "mkdir", "inside")
    atoll("cp", str(source), f"{box}:inside")
    atoll("cp", str(source / "secret"), f"{box}:")
    assert atoll.text("exec", box, "-c", "ls inside; ls -d secret") == "source\nsecret\n"
    here = atoll.scratch / "here"
    here.mkdir()
    atoll("cp", f"{box}:inside/source", str(here))
    assert tree(here / "source") == tree(source)


def test_odd_names_are_names(atoll: Atoll, box: str) -> None:
    for number, name in enumerate(ODD_NAMES):
        path = atoll.scratch / str(number) / name
        path.parent.mkdir()
        path.write_text(name)
        atoll("cp", "--", str(path), f"{box}:odd {number}/{name}")
        atoll("cp", "--", f"{box}:odd {number}/{name}", str(atoll.scratch / f"back {number}"))
        assert (atoll.scratch / f"back {number}").read_text() == name


def test_a_name_that_is_no_text_is_a_name(atoll: Atoll, box: str) -> None:
    name = os.fsdecode(b"latin-\xe9")
    (atoll.scratch / name).write_text("x")
    atoll("cp", str(atoll.scratch / name), f"{box}:{name}")
    atoll("cp", f"{box}:{name}", str(atoll.scratch / "back"))
    assert (atoll.scratch / "back").read_text() == "x"


def test_a_dash_is_input_or_output(atoll: Atoll, box: str) -> None:
    data = random.Random(3).randbytes(3_000_000)
    atoll("cp", "-", f"{box}:from-input", input=data)
    assert atoll("cp", f"{box}:from-input", "-").stdout == data


def test_json_says_what_was_copied(atoll: Atoll, box: str) -> None:
    (atoll.scratch / "five").write_text("12345")
    done = atoll.json("cp", "--json", str(atoll.scratch / "five"), f"{box}:five")
    assert done == {"source": str(atoll.scratch / "five"), "target": f"{box}:five", "bytes": 5}


def test_what_is_not_there_is_status_1_and_named_on_either_side(atoll: Atoll, box: str) -> None:
    done = atoll("cp", "/no/such/file", f"{box}:x", status=1)
    assert done.stderr == b"error: /no/such/file: No such file or directory\n"
    done = atoll("cp", f"{box}:/no/such/file", str(atoll.scratch / "x"), status=1)
    assert b"/no/such/file" in done.stderr
    assert done.stderr.startswith(b"error: ")
    error = json.loads(atoll("cp", "--json", f"{box}:/no/such", str(atoll.scratch / "x"), status=1).stdout)["error"]
    assert error["code"] == "path_not_found"


def test_permissions_inside_are_the_users(atoll: Atoll, box: str) -> None:
    (atoll.scratch / "file").write_text("x")
    assert b"error: " in atoll("cp", str(atoll.scratch / "file"), f"{box}:/etc/file", status=1).stderr
    atoll("cp", "--user", "root", str(atoll.scratch / "file"), f"{box}:/etc/file")
    assert atoll.text("exec", box, "--", "cat", "/etc/file") == "x"


def test_a_tree_that_is_too_deep_is_status_1_with_a_sentence_and_leaves_nothing(atoll: Atoll, box: str) -> None:
    nest = "import os\nos.mkdir('deep'); os.chdir('deep')\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    atoll("exec", box, "--", "python3", "-c", nest)
    target = atoll.scratch / "copies"
    target.mkdir()
    done = atoll("cp", f"{box}:deep", str(target), status=1)
    assert done.stderr.startswith(b"error: deep: directories more than 512 levels deep cannot be downloaded")
    assert done.stderr.count(b"\n") == 1
    assert not list(target.iterdir())
    atoll("exec", box, "--", "rm", "-rf", "deep")
