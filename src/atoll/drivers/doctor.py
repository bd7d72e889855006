"""What this machine supports, as `atoll doctor` shows it: each fact with the command that fixes it.

Owns the wording and the fixes, and the installation of distribution packages for `atoll doctor --fix`: that is the
script `os-packages`, with the list `os-packages.txt`, which `make` uses too (both are in `scripts/`, and linked here to
be in the wheel). Not here: reading the machine (`machine.py`), which drivers exist (`registry.py`).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from atoll.contract.driver import Diagnostic
from atoll.contract.errors import LaunchFailed, RuntimeUnavailable
from atoll.drivers import storage
from atoll.drivers.cgroups import Cgroups
from atoll.drivers.machine import (
    APPARMOR_RESTRICTION,
    KEEPER,
    Machine,
    find_program,
    own_cgroup,
    sysctl,
)
from atoll.settings import program_environment

_USER_NAMESPACES = "sysctl -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1"
_APPARMOR_PROFILE = Path("/etc/apparmor.d/atoll-keeper")
_SYSTEMD = Path("/run/systemd/system")
"""There while systemd is the service manager."""
_ID_RANGE = "apt-get install uidmap && usermod --add-subuids 100000-165535 --add-subgids 100000-165535"

_OS_PACKAGES = Path(__file__).with_name("os-packages")
_USED_SECTION = "runtime"
"""Of the list: what sandboxes use, and neither builds nor tests."""
_FILE_SYSTEMS = Path("/proc/filesystems")
_FILE_MAX = Path("/proc/sys/fs/file-max")
_OPEN_FILE_BYTES = 240
"""What an open file takes of the memory limit of its sandbox (measured with 986,248 of them on Linux 6.18)."""


def examine(
    state_dir: Path,
    machine: Machine,
    packages: Mapping[str, str],
    by_name: Collection[str] = (),
    older: Mapping[str, str] | None = None,
) -> list[Diagnostic]:
    """What the machine supports.

    `packages` maps the program of each runtime to the Debian package that installs it. Those in `by_name` are used only
    if they are requested by name. `older` has the programs that are installed in an old version, and what those lack.
    """
    older = older or {}
    return [
        *(_program(name, package, name in by_name, older.get(name)) for name, package in packages.items()),
        _installed_packages(),
        _kernel(machine),
        _user_namespaces(machine),
        _cgroups(machine),
        *([_systemd(machine)] if _SYSTEMD.is_dir() else []),
        _overlay(),
        _ids(machine),
        _open_files(),
        _disk_limits(state_dir, machine),
    ]


def _program(name: str, package: str, by_name: bool, lacks: str | None) -> Diagnostic:
    path = find_program(name)
    detail = f"{path}{_version(path)}" if path else "not installed"
    detail += "; used only if it is requested by name" if by_name else ""
    fix = None if path else f"apt-get install {package}"
    if path and lacks:
        detail += f", which is old and lacks: {lacks}"
        backports = f"{_codename()}-backports"
        fix = (
            f"on Debian, add the suite {backports} to the sources of apt, then: "
            f"apt-get update && apt-get install {package}/{backports}"
        )
    return Diagnostic(topic=name, ok=path is not None, detail=detail, fix=fix)


def _installed_packages() -> Diagnostic:
    missing = [_described(each) for each in missing_packages()]
    return Diagnostic(
        topic="packages",
        ok=not missing,
        detail=f"not installed: {', '.join(missing)}" if missing else "all that Atoll uses are installed",
        fix="atoll doctor --fix" if missing else None,
    )


def _described(package: str) -> str:
    """`runsc>=2024` as people read it."""
    name, _, least = package.partition(">=")
    return f"{name} of {least} or newer" if least else name.partition("|")[0]


def missing_packages() -> list[str]:
    """The distribution packages that Atoll uses and that are not installed, as the list writes them."""
    return _run_os_packages("missing", _USED_SECTION).split()


def package_commands(packages: Sequence[str]) -> list[str]:
    """The commands that `install_packages` runs.

    Raises:
        RuntimeUnavailable: this is neither Debian nor Ubuntu; the message names the packages.
    """
    return _run_os_packages("plan", *packages).splitlines()


def install_packages(packages: Sequence[str]) -> None:
    """Install distribution packages with apt, as root or with sudo. What it does is said on standard error.

    What the distribution does not have, or only in an old version, is no error: `examine` tells.

    Raises:
        RuntimeUnavailable: they could not be installed. The reason was said on standard error.
    """
    _run_os_packages("install", *packages)


def _run_os_packages(does: str, *words: str) -> str:
    command = ["sh", str(_OS_PACKAGES), does, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=program_environment(), check=False)
    if done.returncode != 0:
        raise RuntimeUnavailable(f"distribution packages could not be installed: {', '.join(words)}")
    return done.stdout


def _version(program: str) -> str:
    """What a program says of its version, as in `, version 1.8.1`; empty: nothing."""
    said = subprocess.run(
        [program, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=program_environment(),
        check=False,
    ).stdout.decode(errors="replace")
    found = re.search(r"\d\S*", said.partition("\n")[0])
    return f", version {found[0]}" if found else ""


def _codename() -> str:
    """Of the distribution's release, as in `bookworm`."""
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "CODENAME")
    return "CODENAME"


def _kernel(machine: Machine) -> Diagnostic:
    recent = machine.kernel >= (5, 19)
    return Diagnostic(
        topic="kernel",
        ok=recent,
        detail=f"Linux {'.'.join(map(str, machine.kernel))}" + ("" if recent else "; id-mapped overlays need 5.19"),
        fix=None if recent else "install a newer kernel",
    )


def _user_namespaces(machine: Machine) -> Diagnostic:
    allowed = machine.user_namespaces
    detail = "this user may create them" if allowed else "this user may not create them"
    fix = None if allowed else _USER_NAMESPACES
    if not allowed and sysctl("user/max_user_namespaces") not in ("0", None) and sysctl(APPARMOR_RESTRICTION) == "1":
        detail = "AppArmor denies them to programs without a profile"
        profile = f"abi <abi/4.0>,\\nprofile atoll-keeper {KEEPER} flags=(unconfined) {{\\n  userns,\\n}}\\n"
        fix = (
            f"printf '{profile}' >{_APPARMOR_PROFILE} && apparmor_parser -r {_APPARMOR_PROFILE}"
            f" (for this program alone), or sysctl -w {APPARMOR_RESTRICTION.replace('/', '.')}=0 (for all)"
        )
    return Diagnostic(topic="user namespaces", ok=allowed, detail=detail, fix=fix)


def _cgroups(machine: Machine) -> Diagnostic:
    missing = sorted({"memory", "cpu", "pids"} - machine.controllers)
    detail = f"{machine.cgroup_mode}; limits can be set on {', '.join(sorted(machine.controllers)) or 'nothing'}"
    fix = "run as root for limits on " + ", ".join(missing)
    if not machine.root and machine.controllers:
        detail += f", in {machine.cgroup_parent}"
        fix = "systemctl edit user@.service, and add Delegate=cpu memory pids to its section [Service]"
    elif not machine.root and machine.cgroup_mode == "v2" and _SYSTEMD.is_dir():
        fix = f"loginctl enable-linger {os.geteuid()}, or run as root"
    if machine.controllers:
        try:
            Cgroups(machine).try_out()
        except LaunchFailed as error:  # permissions do not tell: processes may be in the way
            return Diagnostic(
                topic="cgroups", ok=False, detail=f"{machine.cgroup_mode}; {error.message}", fix=error.hint
            )
    return Diagnostic(topic="cgroups", ok=not missing, detail=detail, fix=fix if missing else None)


def _systemd(machine: Machine) -> Diagnostic:
    """Whether sandboxes outlive the unit whose process has created them."""
    if machine.controllers:
        return Diagnostic(topic="systemd", ok=True, detail="sandboxes outlive the unit that creates them")
    unit = own_cgroup().rpartition("/")[2]
    of = unit if unit.endswith(".service") else "the service"
    return Diagnostic(
        topic="systemd",
        ok=False,
        detail=f"sandboxes end together with {of} that creates them",
        fix=f"KillMode=process in that service, or loginctl enable-linger {os.geteuid()}",
    )


def _overlay() -> Diagnostic:
    if "overlay" in _FILE_SYSTEMS.read_text().split():
        return Diagnostic(topic="overlay", ok=True, detail="in the kernel")
    modprobe = find_program("modprobe")
    dry_run = [modprobe or "modprobe", "-n", "overlay"]
    if modprobe and not subprocess.run(dry_run, capture_output=True, env=program_environment(), check=False).returncode:
        return Diagnostic(topic="overlay", ok=True, detail="a module, loaded when first used")
    return Diagnostic(topic="overlay", ok=False, detail="not loaded", fix="modprobe overlay")


def _ids(machine: Machine) -> Diagnostic:
    if machine.root:
        return Diagnostic(topic="ids", ok=True, detail="each sandbox has its own range of user ids")
    ranged = not machine.single_id and find_program("newuidmap") is not None
    detail = "a range from /etc/subuid" if ranged else "one user id for all users inside"
    return Diagnostic(topic="ids", ok=ranged, detail=detail, fix=None if ranged else f"{_ID_RANGE} {os.getuid()}")


def _open_files() -> Diagnostic:
    """Whether memory limits bind before one sandbox has taken all open files of the machine. With systemd they do."""
    most = int(_FILE_MAX.read_text())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ample = most >= memory_bytes // _OPEN_FILE_BYTES
    detail = "limited by memory alone"
    if not ample:
        taken_with = most * _OPEN_FILE_BYTES // 2**20
        detail = f"{most} for all of this machine: a sandbox can take all of them with {taken_with} MiB of memory"
    fix = None if ample else "sysctl -w fs.file-max=9223372036854775807"
    return Diagnostic(topic="open files", ok=ample, detail=detail, fix=fix)


def _disk_limits(state_dir: Path, machine: Machine) -> Diagnostic:
    facts = storage.probe(state_dir / "layers", root=machine.root)
    detail = "what a sandbox writes can be limited" if facts.limits else str(facts.missing)
    if facts.filesystem not in detail:
        detail = f"{facts.filesystem}; {detail}"
    return Diagnostic(topic="disk limits", ok=facts.limits, detail=detail, fix=facts.fix)
