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


def test_several_files_are_copied_into_a_directory(atoll: Atoll, box: str) -> None:
    for name in ("one", "two", "three"):
        (atoll.scratch / name).write_text(name)
    here = [str(atoll.scratch / name) for name in ("one", "two")]
    atoll("cp", *here, f"{box}:in/")
    assert atoll.text("exec", box, "--", "ls", "in") == "one\ntwo\n"
    assert b"is not a directory" in atoll("cp", *here, f"{box}:in/one", status=2).stderr
    assert b"is not a directory" in atoll("cp", *here, f"{box}:nowhere", status=2).stderr
    copied = atoll.json("cp", "--json", f"{box}:in/one", f"{box}:in/two", f"{atoll.scratch}/out/")
    assert [(each["source"], each["bytes"]) for each in copied] == [(f"{box}:in/one", 3), (f"{box}:in/two", 3)]
    assert tree(atoll.scratch / "out").keys() == {"one", "two"}


def test_wildcards_are_matched_in_the_sandbox(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "-c", "mkdir -p d/e; touch d/a.txt d/b.txt d/c.log d/e/f.txt 'd/[x].txt' /tmp/g.txt")
    target = atoll.scratch / "out"
    target.mkdir()
    atoll("cp", f"{box}:d/*.txt", f"{box}:d/e/?.txt", f"{box}:/tmp/[g].txt", str(target))
    assert tree(target).keys() == {"a.txt", "b.txt", "[x].txt", "f.txt", "g.txt"}
    atoll("cp", f"{box}:d/[x].txt", str(atoll.scratch / "single"))
    assert (atoll.scratch / "single").is_file()
    atoll("cp", f"{box}:d/*.log", str(atoll.scratch / "log"))
    assert (atoll.scratch / "log").is_file()
    assert b"d/*.none: nothing matches" in atoll("cp", f"{box}:d/*.none", str(target), status=1).stderr
    assert b"several" in atoll("cp", f"{box}:d/*.txt", "-", status=2).stderr


def test_files_and_trees_go_from_one_sandbox_to_another(atoll: Atoll, box: str) -> None:
    other = atoll.box()
    atoll("exec", box, "-c", "mkdir -p d/e; echo 1 > d/e/f; ln -s e/f d/link; chmod 750 d/e/f")
    atoll("cp", f"{box}:d", f"{other}:")
    assert atoll.text("exec", other, "-c", "cat d/link; stat -c %a d/e/f") == "1\n750\n"
    atoll("cp", f"{box}:d/e/f", f"{other}:new")
    atoll("cp", f"{other}:new", f"{other}:d/e/")
    assert atoll.text("exec", other, "-c", "cat new; stat -c %a new; ls d/e") == "1\n750\nf\nnew\n"
    for target in ("d/e/x", "d", "."):
        assert b"into itself" in atoll("cp", f"{other}:d", f"{other}:{target}", status=2).stderr
    assert f"{box}:none: no such file".encode() in atoll("cp", f"{box}:none", f"{other}:", status=1).stderr
    assert f"{box}:none: no such file".encode() in atoll("cp", f"{box}:none", ".", status=1).stderr


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


def test_a_tree_that_is_too_deep_is_status_2_with_a_sentence_and_leaves_nothing(atoll: Atoll, box: str) -> None:
    nest = "import os\nos.mkdir('deep'); os.chdir('deep')\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    atoll("exec", box, "--", "python3", "-c", nest)
    target = atoll.scratch / "copies"
    target.mkdir()
    done = atoll("cp", f"{box}:deep", str(target), status=2)
    assert done.stderr.startswith(b"error: deep: directories more than 512 levels deep cannot be downloaded")
    assert done.stderr.count(b"\n") == 1
    assert not list(target.iterdir())
    atoll("exec", box, "--", "rm", "-rf", "deep")


def test_what_a_copy_may_write_here_can_be_limited(atoll: Atoll, box: str) -> None:
    atoll("exec", box, "--", "truncate", "-s", "100M", "sparse")
    target = atoll.scratch / "limited"
    done = atoll("cp", "--limit", "10m", f"{box}:sparse", str(target), status=2)
    assert b"more than 10485760 bytes" in done.stderr
    assert not target.exists()
    atoll("cp", "--limit", "100m", f"{box}:sparse", str(target))
    assert target.stat().st_size == 100 << 20
    assert target.stat().st_blocks * 512 < 1 << 20
    assert b"--limit is for copies to files" in atoll("cp", "--limit", "1m", f"{box}:sparse", "-", status=2).stderr
