"""The core of this suite again, as an unprivileged user: once with a range of ids in /etc/subuid, once with none.

Root makes the user, and a private mount namespace in which the user can reach Python, its packages and this checkout,
wherever they are. Run by an unprivileged user, these tests have nothing to add: the whole suite is rootless then.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from atoll.testing.waiting import wait_until
from tests.conftest import REPORTED

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 240

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="not root: the whole suite runs as an unprivileged user"),
    pytest.mark.timeout(BOUND_S + 30),
]


RUNC_FILES = "test_lifecycle or test_exec or test_limits or test_sharing"
RUNSC_FILES = "test_sleep or test_export or (test_lifecycle and destroy)"


@contextmanager
def ordinary_user(*, with_ids: bool) -> Iterator[str]:
    """A user that exists only here."""
    name = f"atoll-{secrets.token_hex(4)}"
    options = ["--create-home", "--shell", "/bin/sh", "--home-dir", f"/home/{name}"]
    subprocess.run(["useradd", *options, "-K", "SUB_UID_COUNT=0", "-K", "SUB_GID_COUNT=0", name], check=True)
    try:
        if with_ids:
            # Far above what `useradd` gives to people by itself, and above what sandboxes of root take.
            start = 0x7800_0000 + 0x1_0000 * secrets.randbelow(1000)
            ids = f"{start}-{start + 65535}"
            subprocess.run(["usermod", "--add-subuids", ids, "--add-subgids", ids, name], check=True)
        yield name
    finally:
        subprocess.run(["userdel", "--remove", name], check=True, capture_output=True)
        for path in (Path("/etc/subuid"), Path("/etc/subgid")):
            assert not any(line.startswith(f"{name}:") for line in path.read_text().splitlines())


def is_reachable(path: Path) -> bool:
    """Whether everybody on the machine can get there."""
    return all(parent.stat().st_mode & 0o005 == 0o005 for parent in (path, *path.parents))


def run_as(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on this checkout as a user."""
    with tempfile.TemporaryDirectory(prefix="atoll-as-user-") as scratch:
        Path(scratch).chmod(0o755)
        commands: list[str] = []

        def reachable(path: Path) -> Path:
            if is_reachable(path):
                return path
            place = Path(scratch) / f"{len(commands)}"
            place.mkdir()
            commands.append(f"mount --bind {shlex.quote(str(path))} {place}")
            return place

        checkout = reachable(ROOT)
        python = reachable(Path(sys.base_prefix))
        packages = reachable(Path(sysconfig.get_path("purelib")))
        interpreter = python / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        env = {
            "PATH": os.environ["PATH"],
            "HOME": f"/home/{name}",
            "USER": name,
            "LOGNAME": name,
            "LANG": "C.UTF-8",
            "TMPDIR": f"/home/{name}",
            "PYTHONPATH": f"{checkout / 'src'}:{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LD_LIBRARY_PATH": str(python / "lib"),
            **{key: os.environ[key] for key in ("ATOLL_STRICT", "CI") if key in os.environ},
        }
        command = [
            *("setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups", "--inh-caps=-all", "--"),
            *("env", "-i", *(f"{key}={value}" for key, value in env.items())),
            *(str(interpreter), "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--no-header"),
            *("-c", str(checkout / "pyproject.toml"), "--rootdir", str(checkout)),
            *arguments,
            str(checkout / "tests" / "conformance"),
            str(checkout / "src" / "atoll" / "testing" / "conformance"),
        ]
        commands.append(f"cd {shlex.quote(str(checkout))} && exec {shlex.join(command)}")
        return subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(commands)],
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )


@pytest.mark.parametrize(
    ("with_ids", "runtimes"),
    [
        (True, f"crun or (bwrap and test_lifecycle) or (runc and ({RUNC_FILES})) or (runsc and ({RUNSC_FILES}))"),
        (False, "crun or (bwrap and test_sleep)"),
    ],
    ids=["with a range of ids", "with a single id"],
)
def test_the_core_of_the_suite_holds_for_an_ordinary_user(
    with_ids: bool, runtimes: str, record_property: Callable[[str, object], None]
) -> None:
    left = ""

    def is_alone() -> bool:
        nonlocal left
        left = subprocess.run(["pgrep", "-u", name, "-a"], capture_output=True, text=True, check=False).stdout
        return not left

    with ordinary_user(with_ids=with_ids) as name:
        done = run_as(name, "-m", "core", "-k", runtimes, "--maxfail=20")
        with suppress(AssertionError):
            wait_until(is_alone, "no process of the user is left")
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    assert done.returncode == 0, f"as an unprivileged user:\n{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
    assert " passed" in summary, f"nothing was run: {summary}"
    assert not left, f"processes of the user live on:\n{left}"
    for line in done.stdout.splitlines():
        if line == summary or line.startswith("SKIPPED "):
            record_property(REPORTED, line)


def test_the_tools_that_this_needs_are_there() -> None:
    missing = [tool for tool in ("useradd", "usermod", "userdel", "setpriv", "unshare") if shutil.which(tool) is None]
    assert not missing, f"missing: {missing}; apt-get install passwd util-linux"
