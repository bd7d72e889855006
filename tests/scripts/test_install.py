"""What users install: the wheel, in a virtual environment of its own, and what `scripts/install` makes and removes.

Nothing is fetched: the dependencies come from the virtual environment of these tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.testing.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]
PROGRAMS = ("guest", "keeper", "statx.so")


def run(*command: str | Path, status: int = 0, **env: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal, and without the environment of these tests' own virtual environment."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "VIRTUAL_ENV", "PIP_"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        env={**clean, **{name: str(value) for name, value in env.items()}},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == status, done
    return done


def make_venv(path: Path) -> Path:
    """A virtual environment without Atoll that has the dependencies: those of these tests, for what is not in it."""
    venv.create(path, symlinks=True)
    (site,) = path.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return path


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` leaves in dist/."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    env = {**os.environ, "ATOLL_BUILD_GUEST": "0"}
    subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, check=True)
    return directory


@pytest.fixture
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `atoll` of a virtual environment that has the wheel."""
    place = make_venv(tmp_path_factory.mktemp("wheel") / "venv")
    (wheel,) = dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", place / "bin/python", "install", "--no-deps", wheel)
    return place / "bin/atoll"


def test_the_wheel_is_for_any_python_on_this_kind_of_machine_and_needs_no_compiler(wheel: Path) -> None:
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    with zipfile.ZipFile(wheel) as archive:
        modes = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
        assert not [name for name in modes if name.endswith((".c", ".h"))]
        for program in PROGRAMS:
            assert modes[f"atoll/_bin/{program}"] & 0o111, "it can be run"
            content = archive.read(f"atoll/_bin/{program}")
            assert content[:4] == b"\x7fELF"
            assert b"/ld-linux" not in content, "static: it needs no library of the machine"
        pages = CHECKOUT / "src/atoll/surfaces/web"
        files = [path for path in pages.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {f"atoll/{path.relative_to(CHECKOUT / 'src/atoll')}" for path in files} <= set(modes)


def test_the_source_distribution_has_all_that_builds_the_wheel_and_nothing_built(dist: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert not (source / "src/atoll/_bin").exists()
    assert (source / "src/atoll/guest/main.c").exists()
    assert "[runtime]" in (source / "src/atoll/drivers/os-packages.txt").read_text()


def test_a_sandbox_runs_with_nothing_but_the_wheel(installed: Path, make_state_dir: Callable[[], Path]) -> None:
    shown = run(installed.with_name("python"), "-c", "import atoll; print(atoll.__file__)").stdout
    assert shown.startswith(str(installed.parents[1])), "not the sources of these tests"
    state_dir = make_state_dir()
    assert run(installed, "run", "--", "echo", "hi", ATOLL_STATE_DIR=state_dir).stdout == "hi\n"
    found = json.loads(run(installed, "doctor", "--json", ATOLL_STATE_DIR=state_dir).stdout)
    assert "packages" in {each["topic"] for each in found["diagnostics"]}, "the list of packages is in the wheel"


def test_doctor_shows_the_commands_and_installs_nothing_without_a_yes(installed: Path, tmp_path: Path) -> None:
    """With a list that has a package which is not installed, as on a new machine."""
    place = shutil.copytree(installed.parents[1], tmp_path / "venv", symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages/atoll/drivers/os-packages.txt")
    packages.write_text("[runtime]\nno-such-package  no-such-program\n")
    doctor = [str(place / "bin/python"), "-m", "atoll", "doctor"]
    found = json.loads(run(*doctor, "--json", ATOLL_STATE_DIR=tmp_path / "state").stdout)["diagnostics"]
    (said,) = [each for each in found if each["topic"] == "packages"]
    assert (said["ok"], said["detail"]) == (False, "not installed: no-such-package")
    assert said["fix"] == "atoll doctor --fix"
    asked = run(*doctor, "--fix", status=2, ATOLL_STATE_DIR=tmp_path / "state").stderr
    assert "apt-get install --no-install-recommends --no-remove no-such-package" in asked
    assert "Give --yes" in asked
    other = run(*doctor, "--fix", "--yes", status=1, ATOLL_STATE_DIR=tmp_path / "state", PATH=_without_apt(tmp_path))
    assert "This is not Debian or Ubuntu: install the corresponding packages by hand" in other.stderr


def _without_apt(directory: Path) -> Path:
    """A PATH with what a script needs, and no apt-get. Those that are added to it have none on Debian."""
    programs = directory / "programs"
    programs.mkdir()
    for name in ("awk", "cat", "dirname", "echo", "sed", "sh", "tr"):
        (programs / name).symlink_to(str(shutil.which(name)))
    return programs


# ---------------------------------------------------------------------------------------------------- scripts/install


@pytest.fixture
def checkout(dist: Path, tmp_path: Path) -> Path:
    """A checkout in which `make` has built the wheel, and a PREFIX, `prefix`, whose requirements are installed."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(CHECKOUT / "scripts/install", checkout / "scripts")
    shutil.copy(CHECKOUT / "requirements.txt", checkout)
    shutil.copytree(dist, checkout / "dist")
    place = make_venv(tmp_path / "prefix/lib/atoll")
    summed = subprocess.run(
        ["cksum"], input=(checkout / "requirements.txt").read_bytes(), capture_output=True, check=True
    )
    (place / "requirements.sum").write_bytes(summed.stdout)
    return checkout


def test_installed_again_while_a_sandbox_runs_it_goes_on_and_uninstalled_nothing_is_left(
    checkout: Path, tmp_path: Path, make_state_dir: Callable[[], Path]
) -> None:
    prefix, state_dir = tmp_path / "prefix", make_state_dir()
    command, install = prefix / "bin/atoll", checkout / "scripts/install"

    said = run(install, PREFIX=prefix).stderr
    assert f"{command}, in {prefix}/lib/atoll" in said
    assert f"{prefix}/bin is not on the PATH" in said
    run(command, "create", "box", ATOLL_STATE_DIR=state_dir)
    run(command, "exec", "box", "--detach", "--", "sleep", "1000", ATOLL_STATE_DIR=state_dir)
    run(command, "checkpoint", "box", "first", ATOLL_STATE_DIR=state_dir)
    run(command, "warm", "--count", "1", ATOLL_STATE_DIR=state_dir)

    run(install, PREFIX=prefix)  # an upgrade: keeper and guest are other files now
    assert "sleep 1000" in run(command, "ps", "box", ATOLL_STATE_DIR=state_dir).stdout
    assert run(command, "exec", "box", "--", "echo", "hi", ATOLL_STATE_DIR=state_dir).stdout == "hi\n"

    path = f"{prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    refused = run(install, "--remove", status=1, PREFIX=prefix, ATOLL_STATE_DIR=state_dir, PATH=path).stderr
    question = f"Destroy 2 sandboxes, 1 checkpoint, 0 volumes, and remove {state_dir} with all images?"
    assert f"{question}\natoll: " in refused
    assert f"'make uninstall PREFIX={prefix} YES=1' does not ask" in refused
    assert command.exists()
    run(install, "--remove", "--yes", PREFIX=prefix, ATOLL_STATE_DIR=state_dir, PATH=path)
    assert not state_dir.exists()
    assert not (prefix / "lib/atoll").exists()
    assert list((prefix / "bin").iterdir()) == []
    wait_until(lambda: not _processes_of(state_dir), "the keepers have ended")
    assert str(state_dir) not in Path("/proc/self/mountinfo").read_text()
    assert "nothing is installed" in run(install, "--remove", PREFIX=prefix).stderr
    state_dir.mkdir()  # for the leak check, which looks into it


def test_another_installation_keeps_the_sandboxes_of_one_that_is_uninstalled(
    checkout: Path, tmp_path: Path, make_state_dir: Callable[[], Path]
) -> None:
    prefix, state_dir = tmp_path / "prefix", make_state_dir()
    install, other = checkout / "scripts/install", tmp_path / "other/atoll"
    other.parent.mkdir()
    other.touch(mode=0o755)
    run(install, PREFIX=prefix)
    run(prefix / "bin/atoll", "volumes", "create", "kept", ATOLL_STATE_DIR=state_dir)
    path = f"{prefix}/bin:{other.parent}:/usr/bin:/bin"
    said = run(install, "--remove", "--yes", PREFIX=prefix, ATOLL_STATE_DIR=state_dir, PATH=path).stderr
    assert f"sandboxes stay: {other} uses them" in said
    assert not (prefix / "lib/atoll").exists()
    run(sys.executable, "-m", "atoll", "volumes", "rm", "kept", ATOLL_STATE_DIR=state_dir)


def _processes_of(state_dir: Path) -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return [line for line in found if os.fsencode(state_dir) in line]


def test_what_is_in_the_way_and_not_ours_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir()
    (prefix / "bin/atoll").write_text("another program")
    for words in ([], ["--remove", "--yes"]):
        said = run(checkout / "scripts/install", *words, status=1, PREFIX=prefix).stderr
        assert f"{prefix}/bin/atoll exists, and 'make install' has not made it" in said
    assert (prefix / "bin/atoll").read_text() == "another program"
