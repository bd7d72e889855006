"""`export` and `import`."""

from __future__ import annotations

import signal

from tests.cli.driving import Atoll


def test_a_sandbox_goes_through_a_file(atoll: Atoll) -> None:
    name, copy = atoll.box(), atoll.new_name()
    atoll.text("exec", name, "-c", "echo then > f")
    atoll.text("checkpoint", name, "then")
    atoll.text("exec", name, "-c", "echo now > f")
    done = atoll("export", name, cwd=atoll.scratch)
    assert done.stdout.decode() == f"{name}.tar.zst\n"
    assert b"exporting" in done.stderr or not done.stderr
    file = str(atoll.scratch / f"{name}.tar.zst")
    assert atoll.text("import", file, copy) == f"{copy}\n"
    assert atoll.text("exec", copy, "cat", "f") == "now\n"
    told = atoll.json("export", name, file, "--checkpoint", "then", "--json")
    assert (told["file"], told["sandbox"], told["checkpoint"], told["image"]) == (file, name, "then", "host")
    assert told["without_processes"] is False
    other = atoll.new_name()
    made = atoll.json("import", file, other, "--json", "--memory", "100m", "--limit", "1g")
    assert (made["name"], made["status"], made["limits"]["memory_bytes"]) == (other, "running", 100 * 2**20)
    assert atoll.text("exec", other, "cat", "f") == "then\n"
    assert b"exists already" in atoll("import", file, status=1).stderr
    atoll.text("checkpoints", name, "--delete", "then")


def test_a_sandbox_goes_through_a_pipe(atoll: Atoll) -> None:
    name, copy = atoll.box(), atoll.new_name()
    atoll.text("exec", name, "-c", "head -c 3000000 /dev/urandom > f; sha256sum f > sum")
    exporting = atoll.start("export", name, "-")
    assert atoll.text("import", "-", copy, stdin=exporting.process.stdout) == f"{copy}\n"
    assert exporting.wait() == 0
    assert atoll.text("exec", copy, "sha256sum", "-c", "sum") == "f: OK\n"
    # A reader that has had enough ends it quietly.
    unread = atoll.start("export", name, "-")
    unread.read_until(b"(\xb5/\xfd")
    unread.stop_reading()
    assert unread.wait() == 128 + signal.SIGPIPE
    assert b"error" not in unread.errors()


def test_what_cannot_be_exported_or_imported_is_said(atoll: Atoll) -> None:
    name = atoll.box()
    whole = atoll("export", name, "-").stdout
    error = atoll.json("import", "-", "--json", input=whole[:-20], status=1)["error"]
    assert (error["code"], error["details"]["reason"]) == ("archive_refused", "truncated")
    assert b"cannot be imported" in atoll("import", "/etc/passwd", status=1).stderr
    assert b"No such file" in atoll("import", "/nowhere", status=1).stderr
    assert b"directory" in atoll("import", "/etc", status=1).stderr
    assert b"No such file" in atoll("export", name, "/nowhere/f", status=1).stderr
    assert b"no sandbox is named" in atoll("export", "nobody", "-", status=1).stderr
    assert b"no checkpoint" in atoll("export", name, "-", "--checkpoint", "none", status=1).stderr
    assert b"--json and -" in atoll("export", name, "-", "--json", status=2).stdout
    terminal = atoll.terminal("export", name, "-")
    assert terminal.wait() == 2
    assert b"is a terminal" in terminal.seen
    # A sandbox that nothing was written in is one too.
    copy = atoll.new_name()
    assert atoll.text("import", "-", copy, input=whole) == f"{copy}\n"
    assert atoll.text("exec", copy, "echo", "alive") == "alive\n"
