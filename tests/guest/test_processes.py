"""Spawning, output, input, attaching, signals."""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import re
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.guest.client import Guest, N, Stream, alive, wait_for

KILL = {"ACTION": N["ACTION_SIGNAL"], "SIGNAL": int(signal.SIGKILL), "TREE": 1}


def test_a_process_returns_its_output_and_exit_code(guest: Guest) -> None:
    stream = guest.shell("echo out; echo err >&2; exit 3")
    end = stream.wait()
    assert (stream.out, stream.err) == (b"out\n", b"err\n")
    assert end["EXIT_CODE"] == 3
    assert (end["OUT_TOTAL"], end["ERR_TOTAL"]) == (4, 4)
    assert end["DURATION_US"] > 0
    assert "KILLED" not in end
    assert stream.events[0]["EVENT"] == N["EVENT_STARTED"]


def test_arguments_arrive_as_bytes(guest: Guest) -> None:
    argument = b"\xff\xfe a\nb \xe2\x82\xac"
    stream = guest.open("SPAWN", ARGV=["/usr/bin/printf", "%s", argument])
    stream.wait()
    assert stream.out == argument


def test_the_environment_is_what_was_given_and_four_names(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/usr/bin/env"], ENV=["A=1", "LOGNAME=me"])
    stream.wait()
    root = pwd.getpwuid(0)
    assert sorted(stream.out.decode().split()) == sorted(
        ["A=1", "LOGNAME=me", f"HOME={root.pw_dir}", "USER=root", f"SHELL={root.pw_shell}"]
    )


def test_a_process_starts_in_its_home_or_in_the_cwd_asked_for(guest: Guest) -> None:
    home = guest.open("SPAWN", ARGV=["/bin/pwd"])
    home.wait()
    assert home.out.decode().strip() == pwd.getpwuid(0).pw_dir
    tmp = guest.open("SPAWN", ARGV=["/bin/pwd"], CWD="/tmp")
    tmp.wait()
    assert tmp.out == b"/tmp\n"


def test_a_missing_cwd_ends_with_an_errno(guest: Guest) -> None:
    end = guest.open("SPAWN", ARGV=["/bin/true"], CWD="/no/such/place").wait()
    assert end["ERRNO"] == 2
    assert b"/no/such/place" in end["MESSAGE"]
    assert "EXIT_CODE" not in end


def test_an_unknown_user_ends_with_an_errno(guest: Guest) -> None:
    assert guest.open("SPAWN", ARGV=["/bin/true"], USER="nobody-of-that-name").wait()["ERRNO"] == 2


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["no-such-program"], 127, b"no-such-program: command not found\n"),
        (["/no/such"], 127, b"/no/such: No such file or directory\n"),
        (["/etc/passwd"], 126, b"/etc/passwd: Permission denied\n"),
        (["/etc"], 126, b"/etc: Permission denied\n"),
    ],
)
def test_what_cannot_be_run_ends_as_in_a_shell(guest: Guest, argv: list[str], code: int, line: bytes) -> None:
    stream = guest.open("SPAWN", ARGV=argv, ENV=["PATH=/usr/bin:/bin"])
    assert stream.wait()["EXIT_CODE"] == code
    assert stream.err == line


def test_a_shell_line_runs_in_bash(guest: Guest) -> None:
    stream = guest.shell('echo "$BASH_VERSION"')
    stream.wait()
    assert re.match(rb"\d+\.", stream.out)


def test_a_process_gets_default_signals_no_mask_and_its_own_session(guest: Guest) -> None:
    stream = guest.shell(
        "cat /proc/self/status; ps -o sid= -p $$; echo $$; umask; cat /proc/self/oom_score_adj; ulimit -Sn"
    )
    stream.wait()
    status, tail = stream.out.decode().rsplit("\n", 1)[0], stream.out.decode().strip().splitlines()[-5:]
    for key in ("SigBlk", "SigIgn"):
        assert [int(mask, 16) for mask in re.findall(key + r":\s+(\w+)", status)] == [0]
    assert tail[0].strip() == tail[1]
    assert tail[2] == "0022"
    assert tail[3] == "500"
    assert int(tail[4]) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_process_holds_only_its_own_descriptors(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/bin/ls", "-l", "/proc/self/fd"], CHANNELS=2)
    stream.wait()
    numbers = sorted(int(line.split()[8]) for line in stream.out.decode().splitlines()[1:])
    assert numbers == [0, 1, 2, 3, 4, 5]  # 5 is the listing itself
    assert "/dev/null" in stream.out.decode()


def test_a_user_gets_its_ids_and_groups(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/usr/bin/id"], USER="nobody")
    stream.wait()
    assert stream.out == b"uid=65534(nobody) gid=65534(nogroup) groups=65534(nogroup)\n"
    stream = guest.open("SPAWN", ARGV=["/usr/bin/id", "-u"], USER="12345")
    stream.wait()
    assert stream.out == b"12345\n"
    stream = guest.open("SPAWN", ARGV=["/usr/bin/id", "-g"], USER="12345:54321")
    stream.wait()
    assert stream.out == b"54321\n"


def test_a_user_of_the_command_line_is_known_without_passwd(binary: str, tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o111)
    guest = Guest(binary, "--user", f"agent:4321:4322:{home}", "--home", f"4321:4322:{home}")
    assert (home.stat().st_uid, home.stat().st_gid) == (4321, 4322)
    stream = guest.shell("id -u; id -g; pwd; echo $USER $HOME", USER="agent")
    stream.wait()
    assert stream.out.decode().split() == ["4321", "4322", str(home), "agent", str(home)]
    guest.run("WRITE", b"x", PATH="mine", USER="agent")
    assert (home / "mine").stat().st_uid == 4321
    guest.close()


def test_stdin_arrives_whole_and_ends(guest: Guest) -> None:
    data = os.urandom(10_000_000)
    stream = guest.open("SPAWN", ARGV=["/usr/bin/md5sum"], STDIN=1)
    stream.send(data)
    stream.eof()
    stream.wait()
    assert stream.out.split()[0].decode() == hashlib.md5(data).hexdigest()


def test_stdin_of_a_process_that_does_not_read_does_not_hang_the_host(guest: Guest) -> None:
    stream = guest.shell("exec 0<&-; echo closed; read x <&3", STDIN=1, CHANNELS=1)
    stream.until_out(b"closed")
    stream.send(b"x" * 1_000_000)
    stream.send(b"go\n", channel=3)
    assert stream.wait()["EXIT_CODE"] == 0


def test_without_stdin_there_is_an_end_of_file(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/bin/cat"])
    assert stream.wait()["EXIT_CODE"] == 0


def test_death_by_a_signal_is_told_as_such(guest: Guest) -> None:
    end = guest.shell("kill -SEGV $$").wait()
    assert end["SIGNAL"] == signal.SIGSEGV
    assert "EXIT_CODE" not in end
    assert "KILLED" not in end


def test_a_background_child_that_holds_stdout_does_not_delay_the_end(guest: Guest) -> None:
    started = time.monotonic()
    stream = guest.shell("echo first; (sleep 1000; echo late) & exit 7")
    assert stream.wait()["EXIT_CODE"] == 7
    assert stream.out == b"first\n"
    assert time.monotonic() - started < 5
    proc = stream.event("STARTED")["PROC"]
    assert guest.run("SIGNAL", PROC=proc, SIGNAL=9, TREE=1).end == {}
    wait_for(lambda: guest.children() == [])


def test_what_a_background_child_prints_later_reaches_who_attaches(guest: Guest, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    stream = guest.shell(f"echo first; (cat {gate}; echo late) & exit 0")
    assert stream.wait()["OUT_TOTAL"] == 6
    proc = stream.event("STARTED")["PROC"]
    gate.write_bytes(b"opened\n")
    wait_for(lambda: guest.records("PROCS")[0]["OUT_TOTAL"] == 18)
    again = guest.open("ATTACH", PROC=proc, OUT_OFFSET=6)
    assert again.wait()["EXIT_CODE"] == 0
    assert again.out == b"opened\nlate\n"


def test_a_child_that_prints_for_ever_does_not_delay_the_end(guest: Guest) -> None:
    stream = guest.shell("yes & sleep 0.1; exit 5")
    stream.discard = True
    assert stream.wait()["EXIT_CODE"] == 5
    proc = stream.event("STARTED")["PROC"]
    assert guest.run("SIGNAL", PROC=proc, SIGNAL=9, TREE=1).end == {}


def test_killing_a_tree_reaches_daemons_that_left_session_and_parent(guest: Guest, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    stream = guest.shell(
        f"(setsid sh -c 'echo $$ >> {pids}; (setsid sleep 1000 & echo $! >> {pids}) ; exec sleep 1000' &) ;"
        f"echo $$ >> {pids}; sleep 1000"
    )
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    members = [int(pid) for pid in pids.read_text().split()]
    stream.control(**KILL)
    end = stream.wait()
    assert end["SIGNAL"] == signal.SIGKILL
    assert end["KILLED"] == 1
    wait_for(lambda: not any(alive(pid) for pid in members))
    wait_for(lambda: guest.children() == [])


def test_killing_a_tree_keeps_what_was_printed(guest: Guest) -> None:
    stream = guest.shell("echo before; sleep 1000; echo after")
    stream.until_out(b"before\n")
    stream.control(**KILL)
    assert stream.wait()["KILLED"] == 1
    assert stream.out == b"before\n"


def test_stopped_processes_are_killed_too(guest: Guest, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    stream = guest.shell(f"(echo $BASHPID >> {pids}; kill -STOP $BASHPID) & echo $$ >> {pids}; kill -STOP $$")
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    stream.control(**KILL)
    assert stream.wait()["SIGNAL"] == signal.SIGKILL
    wait_for(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))


FORK_BOMB = """
import os, resource, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setuid(60123)
resource.setrlimit(resource.RLIMIT_NPROC, (200, 200))
print("armed", flush=True)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

COMET = r"""
#include <unistd.h>
#include <sys/resource.h>
int main(void) {
    struct rlimit limit = {2000, 2000};
    setuid(60124);
    setrlimit(RLIMIT_NPROC, &limit);
    write(1, "armed\n", 6);
    for (;;) {
        pid_t pid = fork();
        if (pid > 0) _exit(0);
        setsid();
    }
}
"""


def processes_of(uid: int) -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid and alive(int(entry.name)):
                count += 1
        except FileNotFoundError:
            continue
    return count


def test_a_fork_bomb_is_ended(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/usr/bin/python3", "-I", "-S", "-c", FORK_BOMB])
    stream.until_out(b"armed")
    wait_for(lambda: processes_of(60123) > 50)
    started = time.monotonic()
    stream.control(**KILL)
    stream.wait()
    wait_for(lambda: processes_of(60123) == 0)
    assert time.monotonic() - started < 5
    wait_for(lambda: guest.children() == [])


def test_what_forks_and_exits_and_leaves_its_session_each_time_is_ended(guest: Guest, tmp_path: Path) -> None:
    source, program = tmp_path / "comet.c", Path("/tmp") / f"atoll-comet-{os.getpid()}"
    source.write_text(COMET)
    try:
        assert os.system(f"cc -O1 -w -static -o {program} {source}") == 0
        program.chmod(0o755)
        stream = guest.open("SPAWN", ARGV=[str(program)])
        assert stream.wait()["EXIT_CODE"] == 0
        proc = stream.event("STARTED")["PROC"]
        assert guest.run("SIGNAL", PROC=proc, SIGNAL=9, TREE=1).end == {}
        assert processes_of(60124) == 0
    finally:
        program.unlink(missing_ok=True)


def test_a_signal_reaches_the_main_process_or_the_whole_tree(guest: Guest) -> None:
    wait = "while :; do sleep 0.05; done"
    script = f"trap 'echo main' USR1; sh -c 'trap \"echo child\" USR1; echo ready; {wait}' & {wait}"
    stream = guest.shell(script)
    stream.until_out(b"ready")
    proc = stream.event("STARTED")["PROC"]
    assert guest.run("SIGNAL", PROC=proc, SIGNAL=int(signal.SIGUSR1)).end == {}
    stream.until_out(b"main")
    assert b"child" not in stream.out
    stream.control(ACTION=N["ACTION_SIGNAL"], SIGNAL=int(signal.SIGUSR1), TREE=1)
    stream.until_out(b"child")
    stream.control(**KILL)
    stream.wait()


def test_a_signal_to_nobody_is_esrch(guest: Guest) -> None:
    assert guest.run("SIGNAL", PROC=999, SIGNAL=15).end["ERRNO"] == 3
    stream = guest.open("SPAWN", ARGV=["/bin/true"])
    stream.wait()
    assert guest.run("SIGNAL", PROC=stream.event("STARTED")["PROC"], SIGNAL=15).end["ERRNO"] == 3


def test_reset_kills_the_tree_unless_it_is_kept(guest: Guest) -> None:
    stream = guest.shell("sleep 1000 & sleep 1000")
    pid = stream.event("STARTED")["PID"]
    stream.reset()
    end = stream.wait()
    assert end["ERRNO"] == 125
    assert end["KILLED"] == 1
    assert not alive(pid)
    wait_for(lambda: guest.children() == [])
    kept = guest.shell("echo here; sleep 1000", KEEP=1)
    pid = kept.event("STARTED")["PID"]
    kept.until_out(b"here")
    kept.reset()
    assert kept.wait()["ERRNO"] == 125
    assert alive(pid)


def test_reset_of_a_process_that_nobody_reads_kills_it(guest: Guest) -> None:
    stream = guest.open("SPAWN", window=10, auto=False, SHELL="yes; exit 1")
    stream.event("STARTED")
    guest.until(lambda: len(stream.out) == 10)
    stream.reset()
    assert stream.wait()["KILLED"] == 1


def test_attach_goes_on_from_an_offset(guest: Guest) -> None:
    stream = guest.shell("printf 0123456789; printf abc >&2; read x; printf more", KEEP=1, STDIN=1)
    stream.until_out(b"0123456789")
    stream.until_out(b"abc", 2)
    proc = stream.event("STARTED")["PROC"]
    stream.reset()
    stream.wait()
    again = guest.open("ATTACH", PROC=proc, OUT_OFFSET=4, STDIN=1)
    again.until_out(b"456789")
    again.until_out(b"abc", 2)
    again.send(b"go\n")
    end = again.wait()
    assert again.out == b"456789more"
    assert end["EXIT_CODE"] == 0
    assert end["OUT_TOTAL"] == 14
    assert not [e for e in again.events if e["EVENT"] == N["EVENT_GAP"]]


def test_only_one_stream_writes_to_a_process(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/bin/cat"], STDIN=1)
    proc = stream.event("STARTED")["PROC"]
    assert guest.open("ATTACH", PROC=proc, STDIN=1).wait()["ERRNO"] == 16
    reader = guest.open("ATTACH", PROC=proc)
    stream.send(b"both\n")
    stream.eof()
    stream.wait()
    reader.wait()
    assert stream.out == reader.out == b"both\n"


def test_what_is_no_longer_kept_is_told_as_a_gap(guest: Guest) -> None:
    stream = guest.shell("head -c 100000 /dev/zero; printf end", KEEP=1, RING=8192)
    stream.wait()
    again = guest.open("ATTACH", PROC=stream.event("STARTED")["PROC"], OUT_OFFSET=1000)
    again.wait()
    (gap,) = [e for e in again.events if e["EVENT"] == N["EVENT_GAP"]]
    assert (gap["CHANNEL"], gap["OFFSET"]) == (1, 100003 - 8192)
    assert len(again.out) == 8192
    assert again.out.endswith(b"end")
    oldest = guest.open("ATTACH", PROC=stream.event("STARTED")["PROC"])
    oldest.wait()
    assert len(oldest.out) == 8192
    assert len(oldest.events) == 1


def test_an_attachment_that_falls_behind_is_left_behind(guest: Guest) -> None:
    stream = guest.shell("read x; head -c 3000000 /dev/zero; printf end", STDIN=1)
    stream.discard = True
    slow = guest.open("ATTACH", PROC=stream.event("STARTED")["PROC"], window=0, auto=False)
    slow.event("STARTED")
    stream.send(b"\n")
    stream.wait()
    assert stream.received == 3000003
    slow.auto = True
    slow.give(1 << 20)
    slow.wait()
    assert any(e["EVENT"] == N["EVENT_GAP"] for e in slow.events)
    assert slow.out.endswith(b"end")
    assert len(slow.out) <= 65536


def test_a_lossless_attachment_holds_the_process_up(guest: Guest) -> None:
    stream = guest.shell("read x; head -c 1000000 /dev/zero", STDIN=1, KEEP=1)
    slow = guest.open("ATTACH", PROC=stream.event("STARTED")["PROC"], window=0, auto=False, LOSSLESS=1)
    slow.event("STARTED")
    stream.discard = True
    stream.send(b"\n")
    guest.until(lambda: stream.received > 0)
    assert stream.received <= 65536
    slow.auto = True
    slow.give(65536)
    assert slow.wait()["OUT_TOTAL"] == 1000000
    assert len(slow.out) == 1000000


def test_a_detached_process_is_never_held_up(guest: Guest) -> None:
    stream = guest.open("SPAWN", window=0, auto=False, SHELL="head -c 5000000 /dev/zero; exit 9", KEEP=1)
    proc = stream.event("STARTED")["PROC"]
    stream.reset()
    stream.wait()
    wait_for(lambda: guest.records("PROCS")[0].get("EXIT_CODE") == 9)
    record = guest.records("PROCS")[0]
    assert record["OUT_TOTAL"] == 5000000
    assert record["PROC"] == proc
    assert record["ENDED_US"] >= record["STARTED_US"]


def test_a_process_is_held_up_when_its_credit_is_used(guest: Guest) -> None:
    stream = guest.open("SPAWN", window=1000, auto=False, SHELL="head -c 2000000 /dev/zero")
    stream.discard = True
    pid = stream.event("STARTED")["PID"]
    guest.until(lambda: stream.received == 1000)
    assert alive(pid)
    assert stream.end is None
    stream.auto = True
    stream.give(100000)
    stream.wait()
    assert stream.received == 2000000


def test_a_hundred_megabytes_pass_a_slow_reader_with_flat_memory(guest: Guest) -> None:
    stream = guest.open("SPAWN", window=1 << 18, auto=False, SHELL="head -c 100000000 /dev/zero")
    stream.discard = True
    given, peak = 1 << 18, 0
    while stream.received < 100_000_000:
        stream.until_received(min(given, 100_000_000))
        peak = max(peak, guest.status("VmRSS"))
        given += 1 << 20
        stream.give(1 << 20)
    assert stream.wait()["OUT_TOTAL"] == 100_000_000
    assert peak < 4096  # kB


def test_a_busy_stream_does_not_starve_another(guest: Guest) -> None:
    busy = guest.shell("yes")
    busy.discard = True
    guest.until(lambda: busy.received > 1_000_000)
    before = busy.received
    stream = guest.shell("echo quick")
    stream.wait()
    assert stream.out == b"quick\n"
    guest.until(lambda: busy.received > before)
    busy.reset()
    busy.wait()


def test_a_terminal_is_a_terminal(guest: Guest) -> None:
    stream = guest.shell(
        "tty; stty size; read line; echo got:$line; echo err >&2; "
        "trap 'stty size; exit 4' WINCH; echo wait; while :; do sleep 0.05; done",
        PTY_ROWS=33,
        PTY_COLS=77,
    )
    stream.until_out(b"33 77")
    stream.send(b"typed\n")
    stream.until_out(b"got:typed")
    stream.until_out(b"err")
    stream.until_out(b"wait")
    stream.control(ACTION=N["ACTION_RESIZE"], PTY_ROWS=40, PTY_COLS=100)
    assert stream.wait()["EXIT_CODE"] == 4
    assert b"/dev/pts/" in stream.out
    assert b"40 100" in stream.out
    assert 2 not in stream.data


def test_the_end_of_input_on_a_terminal_is_an_end_of_transmission(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/bin/cat"], PTY_ROWS=24, PTY_COLS=80)
    stream.send(b"line\n")
    stream.until_out(b"line\r\nline\r\n")
    stream.eof()
    assert stream.wait()["EXIT_CODE"] == 0


def test_a_control_character_interrupts_the_foreground(guest: Guest) -> None:
    stream = guest.shell("echo ready; exec sleep 1000", PTY_ROWS=24, PTY_COLS=80)
    stream.until_out(b"ready")
    stream.send(b"\x03")
    assert stream.wait()["SIGNAL"] == signal.SIGINT


def test_a_terminal_belongs_to_its_user(guest: Guest) -> None:
    stream = guest.shell("stat -c %u $(tty); echo x > /dev/tty", USER="nobody", PTY_ROWS=24, PTY_COLS=80, CWD="/")
    assert stream.wait()["EXIT_CODE"] == 0
    assert stream.out == b"65534\r\nx\r\n"


def test_all_of_a_terminals_output_comes_before_the_end(guest: Guest) -> None:
    stream = guest.shell("for i in $(seq 5000); do echo line $i; done; (sleep 1000 &)", PTY_ROWS=24, PTY_COLS=80)
    stream.wait()
    assert stream.out.endswith(b"line 5000\r\n")
    assert stream.out.count(b"\r\n") == 5000


def test_much_input_passes_a_terminal(guest: Guest) -> None:
    data = b"".join(b"%06d\n" % i for i in range(30000))
    stream = guest.shell("stty -echo; echo ready; sort | md5sum", PTY_ROWS=24, PTY_COLS=80)
    stream.until_out(b"ready")
    stream.send(data)
    stream.eof()
    stream.wait()
    assert hashlib.md5(data).hexdigest().encode() in stream.out


ECHO_CHANNELS = """
import socket
a, b = socket.socket(fileno=3), socket.socket(fileno=4)
while data := a.recv(65536):
    b.sendall(data.upper())
a.sendall(b"last words")
print("printed")
"""


def test_extra_channels_are_apart_from_stdout(guest: Guest) -> None:
    stream = guest.open("SPAWN", ARGV=["/usr/bin/python3", "-I", "-S", "-c", ECHO_CHANNELS], CHANNELS=2)
    stream.send(b"hello", channel=3)
    stream.until_out(b"HELLO", 4)
    data = b"x" * 1_000_000
    stream.send(data, channel=3)
    guest.until(lambda: len(stream.data[4]) == 1_000_005)
    stream.eof(channel=3)
    assert stream.wait()["EXIT_CODE"] == 0
    assert bytes(stream.data[3]) == b"last words"
    assert stream.out == b"printed\n"


def test_extra_channels_are_taken_over_where_they_were_left(guest: Guest) -> None:
    stream = guest.shell("printf one >&3; read x <&3; printf two >&3; read x <&3", CHANNELS=1, KEEP=1)
    stream.until_out(b"one", 3)
    proc = stream.event("STARTED")["PROC"]
    stream.reset()
    stream.wait()
    again = guest.open("ATTACH", PROC=proc, STDIN=1)
    again.send(b"go\n", channel=3)
    again.until_out(b"two", 3)
    assert bytes(again.data[3]) == b"two"
    again.send(b"end\n", channel=3)
    assert again.wait()["EXIT_CODE"] == 0


def test_attach_to_nobody_is_esrch(guest: Guest) -> None:
    assert guest.open("ATTACH", PROC=77).wait()["ERRNO"] == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"ARGV": ["a"], "SHELL": "b"},
        {"SHELL": "x", "CHANNELS": 9},
        {"SHELL": "x", "RING": 1 << 21},
        {"SHELL": "x", "PTY_ROWS": 3},
        {"SHELL": "x", "PTY_ROWS": 3, "PTY_COLS": 70000},
    ],
)
def test_a_wrong_request_ends_with_einval(guest: Guest, wrong: dict) -> None:
    assert guest.open("SPAWN", **wrong).wait()["ERRNO"] == 22


def test_the_last_64_ended_processes_are_remembered(guest: Guest) -> None:
    for code in range(80):
        guest.open("SPAWN", ARGV=["/bin/sh", "-c", f"exit {code}"]).wait()
    wait_for(lambda: not any(r["LIVE"] for r in guest.records("PROCS")))
    listed = guest.records("PROCS")
    assert sorted(r["EXIT_CODE"] for r in listed) == list(range(16, 80))
    assert listed[0]["COMMAND"] == b"/bin/sh -c exit 79"


def test_ps_lists_processes(guest: Guest) -> None:
    stream = guest.shell("echo ready; exec sleep 12345", USER="nobody", CWD="/")
    stream.until_out(b"ready")
    pid = stream.event("STARTED")["PID"]
    wait_for(lambda: any(r["COMMAND"] == b"sleep 12345" for r in guest.records("PS")))
    (record,) = [r for r in guest.records("PS") if r["PID"] == pid]
    assert record["UID"] == 65534
    assert record["STATE"] in (b"S", b"R")
    assert record["RSS_BYTES"] > 0
    assert abs(record["STARTED_US"] / 1e6 - time.time()) < 20


def supervisor_of(guest: Guest, stream: Stream) -> int:
    pid = stream.event("STARTED")["PID"]
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def said(guest: Guest, line: str, *env: str, **fields: Any) -> bytes:
    stream = guest.open("SPAWN", SHELL=line, ENV=["PATH=/usr/bin:/bin", *env], **fields)
    assert stream.wait()["EXIT_CODE"] == 0
    return stream.out


def ppid(guest: Guest, line: str = "echo $PPID", *env: str, **fields: Any) -> int:
    return int(said(guest, line, *env, **fields))


def wait_for_rest(guest: Guest, supervisor: int) -> None:
    """Wait until the only supervisor has an empty tree, and has had the time to report it."""
    wait_for(
        lambda: (
            guest.idle_supervisors() == [supervisor]
            and not Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
        )
    )
    time.sleep(0.2)


def test_a_supervisor_with_nothing_left_takes_the_next_process(guest: Guest) -> None:
    first = ppid(guest, "echo $PPID", "SECRET=1", CHANNELS=3, STDIN=1)
    wait_for_rest(guest, first)
    # What it got for the first is gone: descriptors, environment, user.
    assert said(guest, "echo $PPID $SECRET; ls /proc/self/fd") == f"{first}\n0\n1\n2\n3\n".encode()
    wait_for_rest(guest, first)
    assert said(guest, "echo $PPID; id -u", USER="nobody", CWD="/") == f"{first}\n65534\n".encode()
    wait_for_rest(guest, first)
    refused = guest.shell("true", USER="nobody-of-that-name")
    assert refused.wait()["ERRNO"] == 2
    wait_for_rest(guest, first)
    terminal = guest.shell("tty && echo $PPID", PTY_ROWS=24, PTY_COLS=80)
    assert terminal.wait()["EXIT_CODE"] == 0
    assert str(first).encode() in terminal.out
    wait_for_rest(guest, first)


def test_a_supervisor_with_something_left_takes_nothing_else(guest: Guest) -> None:
    first = ppid(guest, "sleep 1000 >&- 2>&- & echo $PPID")
    assert ppid(guest) != first


def test_an_idle_supervisor_that_is_killed_or_stopped_holds_nothing_up(guest: Guest) -> None:
    first = ppid(guest)
    wait_for_rest(guest, first)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: guest.idle_supervisors() == [])
    second = ppid(guest)
    assert second != first
    wait_for_rest(guest, second)
    os.kill(second, signal.SIGSTOP)
    assert ppid(guest) == second


def test_a_request_too_long_for_an_idle_supervisor_gets_a_new_one(guest: Guest) -> None:
    first = ppid(guest)
    wait_for_rest(guest, first)
    large = "x" * 100_000
    assert said(guest, "echo $PPID ${#LARGE}", f"LARGE={large}").split()[1] == b"100000"


def test_few_of_many_supervisors_stay_idle_and_one_is_kept(guest: Guest) -> None:
    streams = [guest.shell("echo ready; read x", STDIN=1) for _ in range(20)]
    for stream in streams:
        stream.until_out(b"ready")
    for stream in streams:
        stream.eof()
        stream.wait()
    wait_for(lambda: guest.children() == [] and 1 <= len(guest.idle_supervisors()) <= 8)
    wait_for(lambda: len(guest.idle_supervisors()) == 1)


def test_a_killed_supervisor_is_reported_and_its_orphans_are_ended(guest: Guest, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    other = guest.shell("echo ready; sleep 1000")
    other.until_out(b"ready")
    stream = guest.shell(f"setsid sleep 1000 & echo $! >> {pids}; echo $$ >> {pids}; echo ready; sleep 1000")
    stream.until_out(b"ready")
    os.kill(supervisor_of(guest, stream), signal.SIGKILL)
    end = stream.wait()
    assert end["ERRNO"] == 10
    assert "EXIT_CODE" not in end
    assert "SIGNAL" not in end
    wait_for(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))
    assert alive(other.event("STARTED")["PID"])
    wait_for(lambda: len(guest.children()) == 1)


def test_a_stopped_supervisor_does_not_save_its_tree(guest: Guest) -> None:
    stream = guest.shell("echo ready; sleep 1000")
    stream.until_out(b"ready")
    os.kill(supervisor_of(guest, stream), signal.SIGSTOP)
    stream.control(**KILL)
    assert stream.wait()["KILLED"] == 1


def test_no_process_of_the_guests_can_be_looked_into(guest: Guest) -> None:
    """As another user; root is stopped by its missing capability (see the container test)."""
    stream = guest.shell("echo ready; sleep 1000", USER="nobody", CWD="/")
    stream.until_out(b"ready")
    probe = "for p in {} {}; do ls /proc/$p/fd 2>&1; cat /proc/$p/mem 2>&1; ls -ld /proc/$p/mem; done"
    look = guest.shell(probe.format(guest.pid, supervisor_of(guest, stream)), USER="nobody", CWD="/")
    look.wait()
    text = look.out.decode()
    assert text.count("Permission denied") == 4


def test_many_processes_leave_nothing_behind(guest: Guest) -> None:
    def descriptors() -> list[str]:
        directory = Path(f"/proc/{guest.pid}/fd")
        return sorted(os.readlink(each) for each in directory.iterdir())

    guest.shell("true").wait()
    wait_for(lambda: guest.children() == [])
    guest.run("STAT", PATH="/")
    before = descriptors()  # with an idle worker, and perhaps one that the first command has not closed yet
    streams = [guest.shell("echo x", CHANNELS=2, STDIN=1) for _ in range(30)]
    for stream in streams:
        stream.wait()
    for _ in range(30):
        guest.run("STAT", PATH="/")
        guest.run("READ", PATH="/etc/passwd")
        guest.run("READ", PATH="/etc/nothing-there")
    guest.open("SPAWN", SHELL="true", PTY_ROWS=2, PTY_COLS=2).wait()
    wait_for(lambda: guest.children() == [])
    try:
        wait_for(lambda: (guest.run("STAT", PATH="/"), len(descriptors()))[1] <= len(before))
    except AssertionError:
        pytest.fail(f"before: {before}\nafter: {descriptors()}")


def test_the_end_of_the_host_is_the_end_of_everything(binary: str) -> None:
    guest = Guest(binary)
    stream = guest.shell("setsid sleep 1000 & echo $!; sleep 1000")
    guest.until(lambda: stream.out.endswith(b"\n"))
    pids = [int(stream.out), stream.event("STARTED")["PID"]]
    assert guest.close() == 0
    assert not any(alive(pid) for pid in pids)


def test_the_guests_death_is_the_death_of_what_it_started(binary: str) -> None:
    guest = Guest(binary)
    stream = guest.shell("echo ready; sleep 1000")
    stream.until_out(b"ready")
    pid = stream.event("STARTED")["PID"]
    guest.process.kill()
    guest.process.wait()
    wait_for(lambda: not alive(pid))
    guest.close()


def test_only_its_own_processes_are_touched(binary: str, tmp_path: Path) -> None:
    """A child that the guest had before it became the guest is not its to end."""
    note = tmp_path / "pid"
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"#!/bin/sh\nsleep 1000 </dev/null >/dev/null 2>&1 &\necho $! > {note}\nexec {binary}\n")
    wrapper.chmod(0o755)
    guest = Guest(str(wrapper))
    foreign = int(note.read_text())
    try:
        stream = guest.shell("echo ready; sleep 1000")
        stream.until_out(b"ready")
        os.kill(supervisor_of(guest, stream), signal.SIGKILL)
        assert stream.wait()["ERRNO"] == 10
        guest.run("STAT", PATH="/")
        assert guest.close() == 0
        assert alive(foreign)
    finally:
        subprocess.run(["kill", "-9", str(foreign)], check=False)


def test_a_namespace_with_a_single_user_is_enough(binary: str, tmp_path: Path) -> None:
    """As without root on the host: one id is mapped, and setgroups is denied for good."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"#!/bin/sh\nexec unshare -r {binary}\n")
    wrapper.chmod(0o755)
    guest = Guest(str(wrapper))
    stream = guest.shell("id -u; cat /proc/self/setgroups")
    assert stream.wait()["EXIT_CODE"] == 0
    assert stream.out == b"0\ndeny\n"
    assert guest.run("WRITE", b"x", PATH=str(tmp_path / "file"), USER="root").end == {"SIZE": 1}
    assert "ERRNO" in guest.shell("true", USER="12345").wait()
    guest.close()


def test_a_termination_of_everything_inside_spares_the_supervisors(guest: Guest) -> None:
    stream = guest.shell("echo ready; sleep 1000")
    stream.until_out(b"ready")
    supervisor = supervisor_of(guest, stream)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        os.kill(supervisor, number)
    stream.control(ACTION=N["ACTION_SIGNAL"], SIGNAL=int(signal.SIGTERM), TREE=1)
    assert stream.wait()["SIGNAL"] == signal.SIGTERM


@pytest.mark.parametrize("idle", [False, True], ids=["new supervisor", "idle supervisor"])
@pytest.mark.parametrize("channels", [0, 8])
@pytest.mark.parametrize("limit", [9, 11, 12, 14, 16, 18, 20, 22, 24, 28, 32, 48, 64, 100, 101])
def test_with_few_descriptors_a_process_has_all_of_its_output_or_does_not_run(
    guest: Guest, limit: int, channels: int, idle: bool
) -> None:
    if idle:
        guest.shell("true").wait()
        (supervisor,) = guest.idle_supervisors()
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (limit, limit))
    resource.prlimit(guest.pid, resource.RLIMIT_NOFILE, (limit, limit))
    stream = guest.shell("echo out; echo err >&2; exit 3", CHANNELS=channels or None)
    end = stream.wait()
    if "ERRNO" in end:
        assert "EXIT_CODE" not in end
        assert limit < 48
        return
    # The shell itself may need more than there are, and says so.
    assert stream.err
    assert (stream.out, end["EXIT_CODE"]) == (b"out\n", 3) or b"too many open files" in stream.err.lower()


def test_a_supervisor_that_is_short_of_descriptors_refuses_and_goes_on(guest: Guest) -> None:
    guest.shell("true").wait()
    before: dict[int, tuple[int, int]] = {}
    end: dict[str, Any] = {}

    def is_refused() -> bool:
        nonlocal end
        # A supervisor that the guest does not yet know to be idle gets no job: another is started then.
        for pid in guest.idle_supervisors():
            before.setdefault(pid, resource.prlimit(pid, resource.RLIMIT_NOFILE))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (5, before[pid][1]))
        end = guest.shell("echo out").wait()
        return "ERRNO" in end

    wait_for(is_refused)
    assert end["ERRNO"] == errno.EMFILE
    assert b"limit on open files" in end["MESSAGE"]
    wait_for(lambda: set(before) <= set(guest.idle_supervisors()))
    for pid, limit in before.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    stream = guest.shell("echo out")
    assert stream.wait()["EXIT_CODE"] == 0
    assert stream.out == b"out\n"


def test_stderr_is_stdout_when_merged(guest: Guest) -> None:
    line = "echo a; echo b >&2; echo c; set -- /proc/$$/fd/*; echo $#"
    stream, plain = guest.shell(line, MERGE=1), guest.shell(line)
    plain.wait()
    end = stream.wait()
    assert (stream.out, stream.err) == (plain.out.replace(b"a\n", b"a\nb\n"), b"")
    assert (end["OUT_TOTAL"], end["ERR_TOTAL"]) == (len(stream.out), 0)
