"""Noise against the guest: its parsers under libFuzzer, and the whole of it under sanitizers."""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.testing.plugin import STRICT
from tests.guest.client import INTEGER_TAGS, SOURCE, TAG_NAMES, N, build, encode, field_bytes, frame

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("ATOLL_FUZZ_SECONDS", "3"))
OPS = [value for name, value in N.items() if name.startswith("OP_")]
INTS = [-(1 << 63), -1, 0, 1, 2, 9, 15, 77, 4096, 65536, 1 << 20, 1 << 31, (1 << 63) - 1]

needs_clang = pytest.mark.skipif(not shutil.which("clang") and not STRICT, reason="clang builds the fuzzers")


def seeds(directory: Path) -> None:
    opened = encode(OP=7, WINDOW=5000, PATH="/x")
    hello = frame("HELLO", 0, encode(VERSION=1, EPOCH=5))
    examples = {
        "stream": b"\0" + frame("OPEN", 1, opened) + frame("DATA", 1, b"\1hello") + frame("CREDIT", 1, b"\1\0\0\0", 1),
        "epoch": b"\0" + frame("OPEN", 1, opened) + hello + frame("OPEN", 1, opened) + frame("RESET", 1),
        "fields": b"\1" + opened + encode(USER="x", PORT=3),
        "glob": b"\2src/**/*.{ts,tsx,[a-z]?}\0name.ts",
        "tar": b"\3" + b"27 mtime=1700000000.123456\n12 path=a/b\n",
        "ring": b"\4" + bytes(range(1, 60)),
    }
    for name, data in examples.items():
        (directory / name).write_bytes(data)


@needs_clang
def test_the_parsers_withstand_libfuzzer(tmp_path: Path) -> None:
    fuzzer = tmp_path / "fuzz_frames"
    parts = [str(SOURCE / name) for name in ("frame.c", "match.c", "tarhead.c", "ring.c")]
    flags = ["-g", "-O1", "-std=gnu11", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run(["clang", *flags, f"-I{SOURCE}", "-o", str(fuzzer), str(HERE / "fuzz_frames.c"), *parts], check=True)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    seeds(corpus)
    limits = ["-runs=200000", f"-max_total_time={max(1, int(SECONDS))}", "-max_len=700", "-seed=1"]
    done = subprocess.run(
        [str(fuzzer), *limits, f"-artifact_prefix={tmp_path}/", str(corpus)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=16"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def ask(
    user: str = "root", *, argv: tuple[str, ...] = ("ls",), env: tuple[str, ...] = ("A=1",), flags: int = 0
) -> bytes:
    """A request to `sudo`, as guest/sudo.h has it, with a first byte for the harness."""
    head = struct.pack("=IIQIIII", flags, 0o22, 0, len(argv), len(env), 1, 0)
    return b"\0" + head + b"".join(each.encode() + b"\0" for each in (user, "", *argv, *env, "B=2"))


@needs_clang
def test_requests_to_sudo_withstand_libfuzzer(tmp_path: Path) -> None:
    fuzzer = tmp_path / "fuzz_sudo"
    flags = ["-g", "-O1", "-std=gnu11", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run(["clang", *flags, f"-I{SOURCE}", "-o", str(fuzzer), str(HERE / "fuzz_sudo.c")], check=True)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    examples = [ask(flags=flags) for flags in (0, 1, 2, 4, 8, 16, 31)]
    examples += [ask("daemon:daemon", argv=("sh", "-c", "id"), env=("HOME=/", "A=1", "A=2", "=", "USER=x")), ask("!")]
    for number, example in enumerate(examples):
        (corpus / str(number)).write_bytes(example)
    limits = ["-runs=200000", f"-max_total_time={max(1, int(SECONDS))}", "-max_len=700", "-seed=1"]
    done = subprocess.run(
        [str(fuzzer), *limits, f"-artifact_prefix={tmp_path}/", str(corpus)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=16"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


class Noise:
    """Mostly proper frames with improper contents; now and then a frame that breaks a rule."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.random = random.Random(seed)
        self.epoch = 0
        self.last = 0
        self.paths = [
            str(directory),
            str(directory / "a"),
            str(directory / "b/c"),
            "/etc/passwd",
            "/proc",
            "",
            ".",
            "/dev/null",
        ]

    def value(self, name: str) -> Any:
        pick: Any = self.random.choice
        if name not in INTEGER_TAGS:
            texts = {
                "PATH": self.paths, "TO": self.paths, "CWD": self.paths, "TARGET": self.paths,
                "SHELL": ["true", "echo x; exit 3", "cat", "sleep 5 & exit 1", "yes | head -c 300000", "kill -9 $$"],
                "ARGV": ["/bin/echo", "cat", "nonesuch", "-", ""], "ENV": ["PATH=/usr/bin:/bin", "=", "A"],
                "PATTERN": ["**", "*.{a,b}", "a(b|c)*", "[", "x{1,300}", "\\", ""], "INCLUDE": ["*", "[a", "{a,b}"],
                "HOST": ["127.0.0.1", "::1", "8.8.8.8"], "USER": ["root", "0", "0:0", "1:2:3", "nobody", "9:x"],
            }  # fmt: skip
            return pick(texts.get(name, [b"", b"x", b"\xff" * 300]))
        small = {"PORT": [0, 0, 1, 65536], "CHANNELS": [0, 1, 8, 9], "PROC": list(range(8)), "CONN": list(range(5))}
        return pick(small.get(name, INTS))

    def fields(self) -> bytes:
        names = self.random.choices(list(TAG_NAMES.values()), k=self.random.randrange(8))
        usual = [
            "PATH",
            "WINDOW",
            "SHELL",
            "PROC",
            "SIGNAL",
            "PATTERN",
            "STDIN",
            "KEEP",
            "TREE",
            "PARENTS",
            "RECURSIVE",
        ]
        names += self.random.sample(usual, self.random.randrange(len(usual)))
        return b"".join(field_bytes(N["TAG_" + name], self.value(name)) for name in names)

    def likely(self) -> bytes:
        """An OPEN that the guest will take."""
        pick: Any = self.random.choice
        spawn = {"SHELL": self.value("SHELL"), "ENV": "PATH=/usr/bin:/bin", "STDIN": pick([0, 1]), "KEEP": pick([0, 1])}
        spawn |= pick([{}, {}, {"CHANNELS": pick([1, 8])}, {"PTY_ROWS": 5, "PTY_COLS": 50}, {"RING": pick([0, 5000])}])
        path = {"PATH": pick(self.paths[:5])}
        fields = pick(
            [
                ("SPAWN", spawn),
                ("SPAWN", spawn),
                ("ATTACH", {"PROC": self.random.randrange(20), "STDIN": pick([0, 1]), "LOSSLESS": pick([0, 1])}),
                ("WRITE", path | {"ATOMIC": pick([0, 1]), "PARENTS": 1}),
                ("TAR_OUT", path | {"INSIDE": pick([0, 1])}),
                ("TAR_IN", {"PATH": self.paths[2]}),
                ("GREP", path | {"PATTERN": pick(["root", "a.*b", "^$"])}),
                ("GLOB", path | {"PATTERN": pick(["**", "*/*"])}),
                ("WATCH", {"PATH": self.paths[0], "RECURSIVE": 1}),
                ("LISTEN", {"PORT": 0}),
                ("PS", {}),
                ("SIGNAL", {"PROC": self.random.randrange(20), "SIGNAL": pick([9, 15, 19]), "TREE": pick([0, 1])}),
            ]
        )
        self.last += 1
        return frame("OPEN", self.last, encode(OP=N["OP_" + fields[0]], WINDOW=pick([0, 10, 1 << 20]), **fields[1]))

    def open(self) -> bytes:
        if self.random.random() < 0.5:
            return self.likely()
        op = self.random.choice([*OPS, N["OP_SPAWN"], N["OP_SPAWN"], 0, 999])
        self.last += 1
        return frame("OPEN", self.last, encode(OP=op) + self.fields())

    def next(self) -> bytes:
        kind = self.random.choices(
            ["OPEN", "DATA", "EOF", "CREDIT", "RESET", "CONTROL", "HELLO", "raw"], [300, 150, 20, 200, 100, 60, 4, 0.5]
        )[0]
        stream, channel = (
            max(1, self.last - self.random.randrange(40)),
            self.random.choice([0, 0, 1, 2, 3, 10, 11, 255]),
        )
        if kind == "OPEN":
            return self.open()
        if kind == "DATA":
            return frame("DATA", stream, self.random.randbytes(self.random.choice([1, 10, 3000])), channel)
        if kind == "EOF":
            return frame("EOF", stream, channel=channel)
        if kind == "CREDIT":
            return frame("CREDIT", stream, struct.pack("<I", self.random.choice([1, 70000, 0xFFFFFFFF])), channel)
        if kind == "RESET":
            return frame("RESET", stream)
        if kind == "CONTROL":
            return frame("CONTROL", stream, encode(ACTION=self.random.choice([1, 2, 3])) + self.fields())
        if kind == "HELLO":
            self.epoch += 1
            return frame("HELLO", 0, encode(VERSION=1, EPOCH=self.epoch))
        return self.random.randbytes(30)


@needs_clang
def test_the_whole_guest_withstands_noise_under_sanitizers() -> None:
    """As root of a user namespace of nobody's, so that no noise can harm the machine."""
    root = Path("/tmp") / f"atoll-fuzz-{os.getpid()}"
    root.mkdir(mode=0o755)
    try:
        guest = build(
            root / "guest",
            "-g",
            "-O1",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=undefined",
            compiler="clang",
        )
        guest.chmod(0o755)
        logs, playground = root / "logs", root / "playground"
        for directory in (logs, playground):
            directory.mkdir()
            directory.chmod(0o777)
        endings: list[int] = []
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            endings.append(run_noise(guest, len(endings), logs, playground, deadline))
        reports = "\n".join(log.read_text(errors="replace") for log in sorted(logs.iterdir()))
        assert not reports, reports[:4000]
        assert all(ending in (0, 70) for ending in endings), endings
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run_noise(guest: Path, seed: int, logs: Path, playground: Path, deadline: float) -> int:
    options = f"log_path={logs}/report:detect_leaks=0:allocator_may_return_null=1:handle_abort=1"
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "unshare", "-r", "--kill-child"]
    ours, theirs = socket.socketpair()
    process: Any = subprocess.Popen(
        [*drop, str(guest)],
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        stderr=subprocess.PIPE,
        cwd=playground,
        env={"PATH": "/usr/bin:/bin", "ASAN_OPTIONS": options, "UBSAN_OPTIONS": options + ":print_stacktrace=1"},
    )
    theirs.close()
    noise, waiting = Noise(seed, playground), b""
    try:
        while time.monotonic() < deadline and process.poll() is None:
            waiting = waiting or b"".join(noise.next() for _ in range(20))
            readable, writable, _ = select.select([ours], [ours], [], 0.1)
            if readable and not ours.recv(1 << 20):
                break
            if writable:
                waiting = waiting[ours.send(waiting, socket.MSG_DONTWAIT) :]
    except (BrokenPipeError, ConnectionResetError, BlockingIOError):
        pass
    finally:
        ours.close()
        ending = process.wait(20)
        text = process.stderr.read().decode(errors="replace")
        process.stderr.close()
    assert not re.search("ERROR|runtime error", text), text[-4000:]
    return ending
