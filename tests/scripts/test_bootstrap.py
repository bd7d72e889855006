"""Which runsc `scripts/bootstrap` installs, and what it changes in apt for it.

With the real apt, in a copy of this machine's root (an overlay in a mount namespace) whose only package source is a
repository made here. Nothing is installed on the machine and nothing is fetched.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
OLD, NEW = "0.0~20221219.0-2", "0.0~20240729.0-4"
DEB822 = """\
# The machine's mirror, and one that it does not use.
Types: deb deb-src
Enabled: no
URIs: file:/nowhere
Suites: trout
Components: main

# Another comment.

Types: deb
URIs: file:{mirror}
# A comment inside.
Suites: trout-updates
 trout
Components: main
Trusted: yes
"""
ONE_LINE = """\
# The machine's mirror.

deb [trusted=yes] file:{mirror} trout-updates main
deb [trusted=yes] file:{mirror} trout main # and a comment
"""
CHANGED = "/etc/apt/sources.list.d/atoll-backports.sources /etc/apt/sources.list.d/atoll-backports.list \
/etc/apt/preferences.d/atoll-backports"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a copy of the root file system: needs root"),
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt"),
]


@dataclass
class Outcome:
    status: int
    version: str
    """Of runsc, installed afterwards."""
    changed: str
    """The contents of the files that bootstrap may have added to the configuration of apt."""
    said: str
    other: str
    """The version of another package that apt would install, of which the backports have a newer one."""


class Mirror:
    """A package repository for a distribution with the code name `trout`, and copies of this machine that use it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / "mirror"
        (directory / "work").mkdir()
        self._checkout()

    def _checkout(self) -> None:
        """A checkout that needs no package but runsc, and whose virtual environment is there."""
        checkout = self._directory / "checkout"
        (checkout / "scripts").mkdir(parents=True)
        for name in ("bootstrap", "os-packages"):
            shutil.copy(CHECKOUT / "scripts" / name, checkout / "scripts")
        lines = (CHECKOUT / "scripts/os-packages.txt").read_text().splitlines()
        (line,) = [n for n, line in enumerate(lines) if line.startswith("runsc")]
        (checkout / "scripts/os-packages.txt").write_text("\n".join(["[python]", *lines[line : line + 2], ""]))
        for name in ("requirements.txt", "requirements-build.txt", "requirements-dev.txt", "pyproject.toml"):
            (checkout / name).touch()
        python = checkout / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
        (checkout / ".venv/.atoll").mkdir()
        (checkout / ".venv/.atoll/place").write_text(f"{checkout}\n")

    def publish(self, suite: str, **versions: str) -> None:
        """A suite with these packages. The command of a new runsc lists the flag that old ones do not know."""
        index = "".join(self._build(name, version) for name, version in versions.items()).encode()
        packages = self.path / "dists" / suite / "main/binary-amd64/Packages"
        packages.parent.mkdir(parents=True)
        packages.write_bytes(index)
        automatic = "NotAutomatic: yes\nButAutomaticUpgrades: yes\n" if suite.endswith("-backports") else ""
        (self.path / "dists" / suite / "Release").write_text(
            f"Origin: Debian\nCodename: {suite}\nSuite: {suite}\nComponents: main\nArchitectures: amd64\n{automatic}"
            "Date: Thu, 01 Jan 2026 00:00:00 UTC\n"
            f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} main/binary-amd64/Packages\n"
        )

    def _build(self, name: str, version: str) -> str:
        tree = self._directory / "build" / f"{name}-{version}"
        command = tree / "usr/bin" / name
        command.parent.mkdir(parents=True, exist_ok=True)
        command.write_text(f"#!/bin/sh\necho '  -root string\n{'  -directfs' if version == NEW else ''}' >&2\n")
        command.chmod(0o755)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: a <a@b>\nDescription: none\n"
        (tree / "DEBIAN").mkdir(exist_ok=True)
        (tree / "DEBIAN/control").write_text(control)
        deb = self.path / "pool" / f"{name}-{version}.deb"
        deb.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["dpkg-deb", "-Znone", "--root-owner-group", "--build", tree, deb], check=True, capture_output=True
        )
        sha256 = hashlib.sha256(deb.read_bytes()).hexdigest()
        return f"{control}Filename: pool/{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {sha256}\n\n"

    def bootstrap(self, sources: str, *, before: str = ":", user: str = "0") -> Outcome:
        """Run it in a new copy of this machine that has these package sources, after the commands `before`."""
        here, kind = self._directory, "sources" if "Types:" in sources else "list"
        (here / "sources").write_text(sources.format(mirror=self.path))
        (here / "inside").write_text(f"""
            export DEBIAN_FRONTEND=noninteractive
            {before}
            cd {here}/checkout
            setpriv --reuid={user} --regid={user} --clear-groups scripts/bootstrap check 2>{here}/said
            echo $? >{here}/status
            dpkg-query -W -f '${{Version}}' runsc >{here}/version 2>/dev/null
            cat {CHANGED} >{here}/changed 2>/dev/null
            apt-get -qq update >/dev/null 2>&1
            apt-cache policy other | sed -n 's/^ *Candidate: //p' >{here}/other
        """)
        outside = f"""
            set -e
            mount -t tmpfs tmpfs {here}/work
            cd {here}/work
            mkdir upper work root
            mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
            mkdir -p root{here}
            mount --bind {here} root{here}
            mount --rbind /dev root/dev
            mount -t proc proc root/proc
            rm -rf root/etc/apt/sources.list* root/etc/apt/preferences* root/var/lib/apt/lists root/etc/os-release
            mkdir -p root/etc/apt/sources.list.d root/etc/apt/preferences.d root/var/lib/apt/lists/partial
            cp {here}/sources root/etc/apt/sources.list.d/machine.{kind}
            echo VERSION_CODENAME=trout >root/etc/os-release
            chroot root dpkg --force-all --purge runsc >/dev/null 2>&1 || true
            rm -f root/usr/bin/runsc root/usr/local/bin/runsc
            exec chroot root sh {here}/inside
        """
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", outside]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert (here / "status").exists(), done.stderr
        read: Callable[[str], str] = lambda name: (here / name).read_text().strip()  # noqa: E731
        return Outcome(int(read("status")), read("version"), read("changed"), read("said"), read("other"))


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with tempfile.TemporaryDirectory(prefix="atoll-apt-") as directory:
        Path(directory).chmod(0o755)  # for apt's own user, and for bootstrap as another one
        yield Mirror(Path(directory))


def publish_own(mirror: Mirror, version: str = OLD) -> None:
    mirror.publish("trout", runsc=version, other="1", libc6="1")
    mirror.publish("trout-updates", libc6="1")


@pytest.mark.parametrize("sources", [DEB822, ONE_LINE], ids=["deb822", "one line"])
@pytest.mark.parametrize("installed", [False, True], ids=["absent", "an older one installed"])
def test_a_newer_runsc_comes_from_the_backports_and_nothing_else_does(
    mirror: Mirror, sources: str, installed: bool
) -> None:
    publish_own(mirror)
    mirror.publish("trout-backports", runsc=NEW, other="2", libc6="1")
    before = "apt-get -qq update && apt-get -qq install -y runsc >/dev/null" if installed else ":"
    done = mirror.bootstrap(sources, before=before)
    assert (done.status, done.version, done.other) == (0, NEW, "1"), done
    assert "adding the suite trout-backports" in done.said
    assert f"file:{mirror.path}" in done.changed, "the machine's own mirror"
    assert "rusted" in done.changed, "with the options of the machine's own source"
    assert "trout-updates" not in done.changed


def test_where_the_distribution_has_a_newer_runsc_apt_is_left_alone(mirror: Mirror) -> None:
    publish_own(mirror, NEW)
    done = mirror.bootstrap(DEB822)
    assert (done.status, done.version, done.changed) == (0, NEW, ""), done


def test_backports_that_the_machine_uses_already_are_used_as_they_are(mirror: Mirror) -> None:
    publish_own(mirror)
    mirror.publish("trout-backports", runsc=NEW, other="2", libc6="1")
    done = mirror.bootstrap(ONE_LINE + "deb [trusted=yes] file:{mirror} trout-backports main\n")
    assert (done.status, done.version, done.changed) == (0, NEW, ""), done


def test_without_backports_the_older_runsc_is_installed_and_what_it_lacks_is_said(mirror: Mirror) -> None:
    publish_own(mirror)
    done = mirror.bootstrap(DEB822)
    assert (done.status, done.version, done.changed) == (0, OLD, ""), done
    assert "An older one works, and lacks: saving processes" in done.said
    assert "apt-get install runsc/trout-backports" in done.said


def test_who_may_not_install_keeps_an_older_runsc_and_is_told_the_commands(mirror: Mirror) -> None:
    publish_own(mirror)
    mirror.publish("trout-backports", runsc=NEW, libc6="1")
    before = (
        f"apt-get -qq update && apt-get -qq install -y runsc >/dev/null; chmod -R a+rwX {mirror.path.parent}/checkout"
    )
    done = mirror.bootstrap(DEB822, before=f"{before}; rm -f /usr/bin/sudo", user="65534")
    assert (done.status, done.version, done.changed) == (0, OLD, ""), done
    assert "apt-get install runsc/trout-backports" in done.said
