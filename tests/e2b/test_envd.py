"""A sandbox's own plane, through the newest E2B SDK: commands, terminals, files, watches and signed URLs."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    SandboxException,
    TimeoutException,
)
from e2b.sandbox.commands.command_handle import PtySize

from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S


@pytest.fixture(scope="module")
def box(server: RunningServer) -> Iterator[Sandbox]:
    made = Sandbox.create(
        timeout=600, envs={"GREETING": "hello"}, api_key=server.key, api_url=server.url, sandbox_url=server.url
    )
    yield made
    made.kill()


def wait_for(condition) -> None:
    end = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------- commands


def test_a_command_has_output_an_environment_and_an_exit_code(box: Sandbox) -> None:
    ran = box.commands.run("echo $GREETING $E2B_SANDBOX; whoami; pwd; echo oops >&2", envs={"X": "1"})
    assert (ran.stdout, ran.stderr, ran.exit_code) == ("hello true\nuser\n/home/user\n", "oops\n", 0)
    assert box.commands.run("whoami", user="root", cwd="/").stdout == "root\n"
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("echo out; exit 3")
    assert (failed.value.exit_code, failed.value.stdout) == (3, "out\n")
    with pytest.raises(InvalidArgumentException, match="cwd"):
        box.commands.run("true", cwd="/nowhere")
    with pytest.raises(AuthenticationException):
        box.commands.run("true", user="nobody-of-this-name")


def test_the_user_has_sudo_without_a_password(box: Sandbox) -> None:
    assert box.commands.run("sudo -n id -u").stdout == "0\n"
    assert box.commands.run("echo line | sudo tee -a /etc/of-root; stat -c %U /etc/of-root").stdout == "line\nroot\n"
    # As at E2B, a command's own variables are not root's.
    assert box.commands.run('sudo sh -c "echo [$OWN][\\$OWN]"', envs={"OWN": "1"}).stdout == "[1][]\n"
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("sudo sh -c 'exit 4'")
    assert failed.value.exit_code == 4
    with pytest.raises(TimeoutException):
        box.commands.run("sudo bash -c 'exec -a late-of-root sleep 1000'", timeout=0.5)
    wait_for(lambda: "late-of-root 1000" not in box.commands.run("ps -eo args").stdout)


def test_a_time_out_kills_the_command(box: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        box.commands.run("exec -a late sleep 1000", timeout=0.5)
    wait_for(lambda: "late" not in box.commands.run("ps -eo args").stdout)


def test_a_client_that_goes_away_leaves_its_command_running(box: Sandbox) -> None:
    handle = box.commands.run("sleep 1; echo done > /tmp/left", background=True, timeout=0)
    handle.disconnect()
    wait_for(lambda: box.files.exists("/tmp/left"))


def test_a_late_connect_gets_the_end(box: Sandbox) -> None:
    handle = box.commands.run("exit 7", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as ended:
        box.commands.connect(handle.pid).wait()
    assert ended.value.exit_code == 7


def test_a_command_is_listed_fed_and_killed(box: Sandbox) -> None:
    handle = box.commands.run("cat", background=True, stdin=True)
    assert [each.args for each in box.commands.list() if each.pid == handle.pid] == [["-l", "-c", "cat"]]
    box.commands.send_stdin(handle.pid, "one\n")
    box.commands.stream_input(handle.pid, ["two\n", "three\n"])
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\nthree\n"
    endless = box.commands.run("sleep 1000", background=True)
    assert endless.kill()
    with pytest.raises(CommandExitException) as killed:
        endless.wait()
    assert (killed.value.exit_code, killed.value.error) == (-1, "signal: killed")
    assert not box.commands.kill(endless.pid)
    with pytest.raises(SandboxException):
        box.commands.send_stdin(endless.pid, "x")


def test_output_comes_while_the_command_runs(box: Sandbox) -> None:
    came: list[str] = []
    go = threading.Event()

    def on_stdout(text: str) -> None:
        came.append(text)
        if not go.is_set():
            go.set()
            box.files.write("/tmp/go", "")

    ran = box.commands.run(
        "rm -f /tmp/go; echo first; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo second", on_stdout=on_stdout
    )
    assert came[0] == "first\n"
    assert ran.stdout == "first\nsecond\n"


def test_a_command_whose_sandbox_is_killed_says_so(server: RunningServer) -> None:
    made = Sandbox.create(timeout=60)
    running = made.commands.run("sleep 1000", background=True)
    made.kill()
    with pytest.raises(TimeoutException, match="The sandbox was killed or reached its end of life"):
        running.wait()


def test_a_terminal_can_be_typed_in_and_resized(box: Sandbox) -> None:
    output = bytearray()
    terminal = box.pty.create(PtySize(rows=24, cols=80))
    reading = threading.Thread(target=lambda: terminal.wait(on_pty=output.extend))
    reading.start()
    box.pty.send_stdin(terminal.pid, b"echo size $(stty size)\n")
    wait_for(lambda: b"size 24 80" in output)
    box.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    box.pty.send_stdin(terminal.pid, b"echo size $(stty size)\n")
    wait_for(lambda: b"size 30 100" in output)
    box.pty.send_stdin(terminal.pid, b"exit\n")
    reading.join(BOUND_S)
    assert not reading.is_alive()


# ---------------------------------------------------------------------------------------------------------------- files


def test_files_are_written_and_read_in_all_forms(box: Sandbox) -> None:
    written = box.files.write("dir/one.txt", "héllo")
    assert (written.name, written.path) == ("one.txt", "/home/user/dir/one.txt")
    assert box.files.read("dir/one.txt") == "héllo"
    assert box.files.read("~/dir/one.txt", format="bytes") == "héllo".encode()
    assert b"".join(box.files.read("dir/one.txt", format="stream")) == "héllo".encode()
    assert box.files.read("dir/one.txt", gzip=True) == "héllo"
    big = bytes(range(256)) * 20_000
    box.files.write("big", io.BytesIO(big))
    assert box.files.read("big", format="bytes") == big
    box.files.write("packed", big, gzip=True)
    assert box.files.read("packed", format="bytes") == big
    several = box.files.write_files([{"path": f"/tmp/many/{i}", "data": f"{i}"} for i in range(3)])
    assert [each.path for each in several] == [f"/tmp/many/{i}" for i in range(3)]
    assert box.files.read("/tmp/many/2") == "2"


def test_names_have_attributes(box: Sandbox) -> None:
    assert box.files.make_dir("tree/a/b")
    assert not box.files.make_dir("tree/a/b")
    box.files.write("tree/a/file", "12345")
    box.commands.run("chmod 600 tree/a/file; ln -s file tree/a/link")
    info = box.files.get_info("tree/a/file")
    assert (info.type, info.size, info.mode, info.permissions) == (FileType.FILE, 5, 0o600, "-rw-------")
    assert (info.owner, info.group, info.path) == ("user", "user", "/home/user/tree/a/file")
    assert box.files.get_info("tree/a/link").symlink_target == "/home/user/tree/a/file"
    assert [each.name for each in box.files.list("tree")] == ["a"]
    assert [each.name for each in box.files.list("tree", depth=2)] == ["a", "b", "file", "link"]
    assert box.files.rename("tree/a/file", "tree/moved/there").path == "/home/user/tree/moved/there"
    assert box.files.exists("tree/moved/there")
    assert not box.files.exists("tree/a/file")
    box.files.remove("tree")
    assert not box.files.exists("tree")


def test_files_fail_as_the_sdk_expects(box: Sandbox) -> None:
    with pytest.raises(NotFoundException):
        box.files.read("missing")
    with pytest.raises(NotFoundException):
        box.files.list("missing")
    with pytest.raises(NotFoundException):
        box.files.rename("missing", "other")
    with pytest.raises(InvalidArgumentException):
        box.files.read("/tmp")
    box.files.write("plain", "")
    with pytest.raises(InvalidArgumentException):
        box.files.list("plain")
    with pytest.raises(InvalidArgumentException):
        box.files.make_dir("plain")
    with pytest.raises(SandboxException, match="501"):
        box.files.write("/proc/self/comm", "", metadata={"a": "b"})
    box.files.write("/proc/self/comm", "name")


@pytest.mark.parametrize("use_octet_stream", [False, True])
def test_metadata_stay_with_a_file_until_it_is_written_again(box: Sandbox, use_octet_stream: bool) -> None:
    metadata = {"author": "someone", "text": 'printable, with spaces & = / "quotes"'}
    large = "x" * 2_000_000
    box.files.remove("renamed")
    for content in ("small", large):
        written = box.files.write("described", content, metadata=metadata, use_octet_stream=use_octet_stream)
        assert written.metadata == metadata
        assert box.files.get_info("described").metadata == metadata
    assert box.files.rename("described", "renamed/described").metadata == metadata
    assert [each.metadata for each in box.files.list("renamed")] == [metadata]
    box.commands.run(
        "ln -s described renamed/link; setfattr -n user.e2b.more -v one renamed/described || "
        'python3 -c \'import os; os.setxattr("renamed/described", "user.e2b.more", b"one")\''
    )
    assert box.files.get_info("renamed/link").metadata == {**metadata, "more": "one"}
    box.files.write("renamed/described", "", metadata={"author": "another"})
    assert box.files.get_info("renamed/described").metadata == {"author": "another"}
    assert box.files.write("renamed/described", "").metadata is None
    assert box.files.get_info("renamed/described").metadata is None
    roots = box.files.write("/opt/described", "x", metadata=metadata)
    assert (roots.metadata, box.files.get_info("/opt/described").owner) == (metadata, "user")


def test_metadata_that_programs_inside_have_made_no_text_are_not_shown(box: Sandbox) -> None:
    code = (
        "import os; p = '/dev/shm/odd'; open(p, 'w').close(); e = b'user.e2b.'\n"
        "for name, value in ((b'no-text', b'\\xff'), (b'\\xff', b'v'), (b'large', b'x' * 20000), (b'fine', b'v')):\n"
        "    os.setxattr(p, e + name, value)"
    )
    box.files.write("/tmp/odd.py", code)
    box.commands.run("python3 /tmp/odd.py")
    assert box.files.get_info("/dev/shm/odd").metadata == {"fine": "v"}
    assert [each.metadata for each in box.files.list("/dev/shm") if each.name == "odd"] == [{"fine": "v"}]


def test_metadata_are_limited_and_checked_before_anything_is_written(box: Sandbox, server: RunningServer) -> None:
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": str(box._envd_access_token)}
    headers["Content-Type"] = "application/octet-stream"
    for name, value in (
        ("X-Metadata-", "no key"),
        ("X-Metadata-" + "k" * 247, "v"),
        ("X-Metadata-Key", "v" * 4096),
        ("X-Metadata-Key", "not ascii: \xe9"),
        ("X-Metadata-Key", "a\tb"),
    ):
        given = [(key.encode(), each.encode("latin-1")) for key, each in [*headers.items(), (name, value)]]
        answer = httpx2.post(f"{server.url}/files?path=unwritten", content=b"x", headers=given, timeout=BOUND_S)
        assert answer.status_code == 400, (name, answer.text)
    assert not box.files.exists("unwritten")


def test_files_are_put_together_in_order(box: Sandbox, server: RunningServer) -> None:
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": str(box._envd_access_token)}

    def compose(*sources: str, destination: str, **more: str) -> httpx2.Response:
        body = {"source_paths": sources, "destination": destination, **more}
        return httpx2.post(f"{server.url}/files/compose", json=body, headers=headers, timeout=BOUND_S)

    parts = {f"part-{i}": bytes([65 + i]) * 700_000 for i in range(3)}
    for name, content in parts.items():
        box.files.write(name, content)
    box.files.write("whole/file", "before", metadata={"a": "b"})
    answer = compose(*parts, destination="whole/file")
    assert answer.json() == {"path": "/home/user/whole/file", "name": "file", "type": "file"}
    assert box.files.read("whole/file", format="bytes") == b"".join(parts.values())
    assert box.files.get_info("whole/file").metadata is None
    assert not any(map(box.files.exists, parts))
    box.files.write("one", "1")
    assert compose("one", destination="/opt/composed/file").status_code == 200
    assert box.files.get_info("/opt/composed/file").owner == "user"
    for sources, destination, status in (
        (["whole/file", "missing"], "other", 404),
        (["whole"], "other", 400),
        (["whole/file"], "whole/file", 400),
        ([], "other", 400),
        (["whole/file"], "", 400),
    ):
        assert compose(*sources, destination=destination).status_code == status
    assert compose("whole/file", destination="other", username="nobody-here").status_code == 401
    assert (box.files.exists("whole/file"), box.files.exists("other")) == (True, False)


def test_what_is_roots_can_be_written_and_is_then_the_users(box: Sandbox) -> None:
    box.files.write("/opt/mine/file", "x")
    info = box.files.get_info("/opt/mine/file")
    assert (info.owner, box.files.get_info("/opt/mine").owner) == ("user", "user")


def test_changes_are_watched_as_at_e2b(box: Sandbox) -> None:
    box.files.make_dir("watched")
    watch = box.files.watch_dir("watched", recursive=True)
    seen: list[tuple[str, str]] = []

    def has_seen(*wanted: tuple[str, str]) -> bool:
        seen.extend((each.type.value, each.name) for each in watch.get_new_events())
        return seen[-len(wanted) :] == [*wanted]

    box.files.write("watched/new", "x")
    wait_for(lambda: has_seen(("create", "new"), ("chmod", "new"), ("write", "new")))
    assert len(seen) == 3
    inode = box.commands.run("stat -c %i watched/new").stdout
    box.files.write("watched/new", "other")
    wait_for(lambda: has_seen(("chmod", "new"), ("write", "new"), ("write", "new")))
    assert box.commands.run("stat -c %i watched/new").stdout == inode
    box.files.make_dir("watched/below")
    box.files.write("watched/below/one", "x" * 2_000_000)
    wait_for(lambda: has_seen(("chmod", "below/one"), ("write", "below/one")))
    assert ("create", "below") in seen
    assert ("create", "below/one") in seen
    watch.stop()
    with pytest.raises(NotFoundException):
        box.files.watch_dir("missing")


# -------------------------------------------------------------------------------------------------------- who may do it


def test_signed_urls_are_for_one_file_one_operation_one_sandbox_and_a_time(box: Sandbox, server: RunningServer) -> None:
    box.files.write("signed", "secret")
    url = box.download_url("signed", use_signature_expiration=60)
    assert httpx2.get(url, timeout=BOUND_S).text == "secret"
    uploaded = httpx2.post(box.upload_url("up"), files={"file": ("up", b"sent")}, timeout=BOUND_S)
    assert uploaded.status_code == 200
    assert box.files.read("up") == "sent"
    for changed in (
        url.replace("path=signed", "path=up"),
        url.replace("signature=v1_", "signature=v1_A"),
        url.replace("signature_expiration=", "signature_expiration=9"),
        url + "&username=root",
    ):
        assert httpx2.get(changed, timeout=BOUND_S).json()["message"] == "invalid signature", changed
    assert httpx2.post(url, files={"file": ("signed", b"x")}, timeout=BOUND_S).status_code == 401
    box.commands.run("echo of root > /root/signed", user="root")
    as_root = {"Authorization": "Basic " + base64.b64encode(b"root:").decode()}
    assert httpx2.get(url, headers=as_root, timeout=BOUND_S).text == "secret"
    sent = httpx2.post(box.upload_url("up"), files={"file": ("up", b"again")}, headers=as_root, timeout=BOUND_S)
    assert sent.json()[0]["path"] == "/home/user/up"
    assert box.files.get_info("up").owner == "user"
    past = box.download_url("signed", use_signature_expiration=-1)
    assert httpx2.get(past, timeout=BOUND_S).json()["message"] == "signature is already expired"
    bare = httpx2.get(f"{server.url}/files?path=signed", timeout=BOUND_S)
    assert (bare.status_code, bare.json()["message"]) == (401, "missing signature query parameter")
    other = Sandbox.create(timeout=60)
    other.files.write("signed", "another")
    named = httpx2.get(url, headers={"E2b-Sandbox-Id": other.sandbox_id}, timeout=BOUND_S)
    assert (named.status_code, named.json()["message"]) == (401, "invalid signature")
    other.kill()
    assert httpx2.get(other.download_url("signed"), timeout=BOUND_S).status_code in (401, 502)


def test_a_sandbox_is_used_with_its_own_token_only(box: Sandbox, server: RunningServer) -> None:
    other = Sandbox.create(timeout=60)
    path = "/process.Process/List"
    with httpx2.Client(base_url=server.url, timeout=BOUND_S) as client:
        tokens = [None, "wrong", other._envd_access_token, server.key]
        for token in tokens:
            headers = {"E2b-Sandbox-Id": box.sandbox_id, **({"X-Access-Token": token} if token else {})}
            assert client.post(path, json={}, headers=headers).status_code == 401
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": box._envd_access_token or ""}
        assert client.post(path, json={}, headers=headers).status_code == 200
        host = {"Host": f"49983-{box.sandbox_id}.atoll.localhost", "X-Access-Token": box._envd_access_token or ""}
        assert client.post(path, json={}, headers=host).status_code == 200
        assert client.post(path, json={}, headers={**host, "X-Access-Token": ""}).status_code == 401
        unknown = client.get("/health", headers={"E2b-Sandbox-Id": "atoll0000000000000000"})
        assert (unknown.status_code, unknown.json()["message"]) == (502, "The sandbox was not found")
    other.kill()


def test_a_paused_sandbox_is_resumed_by_a_request_if_it_was_asked_for() -> None:
    made = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    made.files.write("kept", "x")
    made.pause()
    assert made.files.read("kept") == "x"
    made.kill()
    other = Sandbox.create(timeout=60)
    running = other.commands.run("sleep 1000", background=True)
    other.pause()
    with pytest.raises(TimeoutException):
        other.commands.run("true")
    other.connect()
    assert running.pid in [each.pid for each in other.commands.list()]
    other.kill()


def test_a_timeout_ends_a_sandbox_or_pauses_it() -> None:
    kept = Sandbox.create(timeout=2, lifecycle={"on_timeout": "pause"})
    gone = Sandbox.create(timeout=2)
    kept.files.write("kept", "x")
    wait_for(lambda: not gone.is_running() and not kept.is_running())
    assert kept.connect(timeout=60).files.read("kept") == "x"
    kept.kill()
    with pytest.raises(NotFoundException):
        gone.get_info()


def test_ports_are_reached_by_host_name_and_by_a_token_if_they_are_not_public(server: RunningServer) -> None:
    def ask(made: Sandbox, port: int = 8000, *, token: str | None = None) -> httpx2.Response:
        sent = {"Host": made.get_host(port), **({"E2B-Traffic-Access-Token": token} if token else {})}
        return httpx2.get(f"{server.url}/hello", headers=sent, timeout=BOUND_S)

    public, closed = Sandbox.create(timeout=60), Sandbox.create(timeout=60, network={"allow_public_traffic": False})
    for made in (public, closed):
        made.files.write("site/hello", "hi")
        made.commands.run("exec python3 -m http.server 8000 -d site", background=True, timeout=0)
    wait_for(lambda: ask(public).status_code == 200)
    assert ask(public).text == "hi"
    refused = ask(public, 8001)
    assert refused.status_code == 502
    assert "port is not open" in refused.json()["message"]
    assert ask(closed).status_code == 403
    assert ask(closed, token=public._envd_access_token).status_code == 403
    wait_for(lambda: ask(closed, token=closed.traffic_access_token).text == "hi")
    public.kill()
    assert ask(public).json()["message"] == "The sandbox was not found"
    closed.kill()
