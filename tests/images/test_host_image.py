"""The host image: the machine's programs, and nothing that is anyone's business."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from atoll.runtime.images.host import Skeleton, build
from atoll.runtime.images.store import ImageStore


@pytest.fixture(scope="module")
async def host(host_images: Path) -> tuple[ImageStore, dict[str, tuple[Path, ...]]]:
    """A store with the host image, and its layers by where they stand inside."""
    store = ImageStore(host_images, rootless=os.geteuid() != 0)
    layers = await store.resolve("host")
    assert layers.filesystems[0].target == "/"
    owners = [[layer.owner for layer in filesystem.layers] for filesystem in layers.filesystems]
    assert owners == [[0]] + [[0, "machine"]] * len(layers.filesystems[1:])
    return store, {
        filesystem.target: tuple(layer.path for layer in filesystem.layers) for filesystem in layers.filesystems
    }


Host = tuple[ImageStore, dict[str, tuple[Path, ...]]]


async def test_programs_are_used_in_place_and_everything_else_is_a_directory_of_the_store(host: Host):
    _, layers = host
    (skeleton,) = layers["/"]
    assert layers["/usr"] == (skeleton.parent / "usr", Path("/usr"))
    for name in ("bin", "sbin", "lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            assert os.readlink(skeleton / name) == os.readlink(path)
        elif path.exists():
            assert layers[f"/{name}"][-1] == path


async def test_nothing_in_the_skeleton_is_private_on_the_machine(host: Host):
    _, layers = host
    (skeleton,) = layers["/"]
    seen = 0
    for path in skeleton.rglob("*"):
        original = Path("/") / path.relative_to(skeleton)
        if path.is_symlink() or not path.is_file() or not original.is_file():
            continue
        if path.read_bytes() == original.read_bytes() and path.stat().st_size:
            seen += 1
            assert original.stat().st_mode & stat.S_IROTH, original
            for parent in original.parents:
                assert parent.stat().st_mode & stat.S_IXOTH, original
    assert seen > 50


async def test_files_that_hold_secrets_by_nature_are_not_there(host: Host):
    _, layers = host
    (skeleton,) = layers["/"]
    names = {str(path.relative_to(skeleton)) for path in skeleton.rglob("*")}
    for name in (
        *("etc/shadow", "etc/gshadow", "etc/ssh", "etc/ssl/private", "etc/sudoers", "etc/machine-id", "etc/crontab"),
        *("etc/hostname", "etc/gitconfig", "etc/pip.conf", "etc/npmrc", "etc/docker", "etc/wgetrc", "etc/krb5.keytab"),
        *("etc/apt/auth.conf.d", "etc/apt/sources.list", "root/.ssh", "root/.bashrc", "var/lib/dpkg/lock", "boot"),
    ):
        assert name not in names
    assert os.listdir(skeleton / "root") == []
    assert os.listdir(skeleton / "home") == ["user"]
    assert os.listdir(skeleton / "var/log") == ["apt"]
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in (skeleton / "etc/ssl").rglob("*") if path.is_file())


async def test_the_accounts_are_ours_alone(host: Host):
    _, layers = host
    (skeleton,) = layers["/"]
    accounts = [line.split(":") for line in (skeleton / "etc/passwd").read_text().splitlines()]
    assert [account[0] for account in accounts] == [
        *("root", "daemon", "bin", "sys", "man", "mail", "www-data", "_apt", "nobody", "user")
    ]
    assert accounts[-1][2:6] == ["1000", "1000", "user", "/home/user"]
    assert all(len(line.split(":")) == 4 for line in (skeleton / "etc/group").read_text().splitlines())


async def test_modes_and_owners_are_as_inside(host: Host):
    _, layers = host
    (skeleton,) = layers["/"]
    modes = {"": 0o755, "tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "home/user": 0o755, "etc/passwd": 0o644}
    assert {name: stat.S_IMODE((skeleton / name).stat().st_mode) for name in modes} == modes
    if os.geteuid() == 0:
        owners = {path: path.lstat().st_uid for path in skeleton.rglob("*")}
        assert {path.relative_to(skeleton).parts[:2] for path, uid in owners.items() if uid} == {("home", "user")}
        assert (skeleton / "home/user/.profile").stat().st_uid == 1000


async def test_what_common_programs_expect_is_there(host: Host):
    _, layers = host
    (skeleton,) = layers["/"]
    for name in ("alternatives", "ld.so.cache", "ssl/certs", "os-release", "services", "protocols", "localtime"):
        if os.path.lexists(f"/etc/{name}"):
            assert os.path.lexists(skeleton / "etc" / name), name
    if Path("/var/lib/dpkg/status").exists():
        assert (skeleton / "var/lib/dpkg/status").read_bytes() == Path("/var/lib/dpkg/status").read_bytes()


async def test_the_programs_directories_are_roots_and_there_is_nothing_else(host: Host):
    _, layers = host
    layer = layers["/usr"][0]
    found = {path: path.lstat() for path in layer.rglob("*")}
    others = {path for path, status in found.items() if not stat.S_ISDIR(status.st_mode)}
    markers = {path for path in others if path.name == "EXTERNALLY-MANAGED" and path.parent.name.startswith("python3")}
    assert others - markers - {layer / "bin/python", layer / "local/bin/python"} == {layer / "local/etc"}
    assert {status.st_uid for status in found.values()} == {os.geteuid()}
    for name in ("bin", "lib", "share", "local/bin"):
        if Path("/usr", name).is_dir():
            assert (layer / name).is_dir()


async def test_the_host_image_is_resolved_again_in_less_than_a_millisecond_and_built_once(host: Host):
    store, _ = host
    first = await store.resolve("host")
    durations = []
    for _ in range(30):
        start = time.perf_counter()
        assert await store.resolve("host") == first
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.001
    assert [image.digest for image in await store.list()] == [first.digest]
    assert (await store.pull("host")).digest == first.digest


# --- machines that are made up ------------------------------------------------------------------------------------


class Machine:
    """The root directory of a machine, with what a test puts there."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "machine"
        self.root.mkdir()
        self.root.chmod(0o755)
        self._directory = directory
        self._count = 0
        for name in ("etc", "usr", "usr/bin", "usr/local", "var", "var/lib"):
            self.directory(name)

    def directory(self, path: str, mode: int = 0o755) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)
        (self.root / path).chmod(mode)

    def file(self, path: str, content: str = "x", mode: int = 0o644) -> None:
        for parent in reversed(Path(path).parents[:-1]):
            if not (self.root / parent).exists():
                self.directory(str(parent))
        (self.root / path).write_text(content)
        (self.root / path).chmod(mode)

    def link(self, path: str, target: str) -> None:
        (self.root / path).symlink_to(target)

    def build(self) -> tuple[Skeleton, Path]:
        self._count += 1
        built = self._directory / f"built-{self._count}"
        built.mkdir()
        skeleton = build(built, rootless=os.geteuid() != 0, machine=self.root, check=lambda: None)
        return skeleton, built

    def is_current(self, skeleton: Skeleton) -> bool:
        return skeleton.is_current(rootless=os.geteuid() != 0, machine=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_only_what_everyone_may_read_is_copied(machine: Machine):
    machine.file("etc/ssl/certs/public.pem")
    machine.file("etc/ssl/certs/private.pem", mode=0o640)
    machine.file("etc/ssl/certs/closed/inside.pem")
    machine.directory("etc/ssl/certs/closed", 0o750)
    machine.file("etc/ssl/private/key.pem")
    machine.file("etc/fonts/fonts.conf")
    machine.directory("etc/fonts", 0o700)
    machine.file("etc/unknown.conf")
    _, built = machine.build()
    assert os.listdir(built / "root/etc/ssl/certs") == ["public.pem"]
    assert os.listdir(built / "root/etc/ssl") == ["certs"]
    assert not (built / "root/etc/fonts").exists()
    assert not (built / "root/etc/unknown.conf").exists()


def test_a_key_among_the_certificates_is_left_out(machine: Machine):
    machine.file("etc/ssl/certs/mistake.pem", "-----BEGIN RSA PRIVATE KEY-----\n")
    _, built = machine.build()
    assert os.listdir(built / "root/etc/ssl/certs") == []


def test_only_links_into_what_is_inside_are_reproduced(machine: Machine):
    machine.file("secret", "secret")
    machine.directory("etc/alternatives")
    links = {
        "good": "/usr/bin/vim",
        "near": "good",
        "up": "../../usr/bin/vim",
        "out": "/secret",
        "home": "/home/me/x",
        "climb": "../../usr/../secret",
    }
    for name, target in links.items():
        machine.link(f"etc/alternatives/{name}", target)
    machine.link("etc/localtime", "/secret")
    _, built = machine.build()
    assert sorted(os.listdir(built / "root/etc/alternatives")) == ["good", "near", "up"]
    assert not os.path.lexists(built / "root/etc/localtime")


def test_pipes_devices_and_giants_are_left_out(machine: Machine):
    machine.directory("etc/perl")
    os.mkfifo(machine.root / "etc/perl/pipe", 0o644)
    machine.file("etc/perl/giant")
    os.truncate(machine.root / "etc/perl/giant", 100 * 1024 * 1024)
    _, built = machine.build()
    assert os.listdir(built / "root/etc/perl") == []


def test_over_the_programs_stands_a_layer_of_directories_that_are_roots(machine: Machine):
    machine.file("usr/bin/program", mode=0o4755)
    machine.link("usr/link", "bin")
    machine.directory("usr/share/deep/below")
    for path, mode in {"usr/local/fonts": 0o2775, "usr/share/sticky": 0o1777, "usr/share/fixed": 0o555}.items():
        machine.directory(path, mode)
    if os.geteuid() == 0:
        os.chown(machine.root / "usr/local/fonts", 33, 50)
    before = os.umask(0o077)
    try:
        _, built = machine.build()
    finally:
        os.umask(before)
    found = {str(path.relative_to(built)): path.lstat() for path in (built / "usr", *(built / "usr").rglob("*"))}
    found.pop("usr/local/etc")
    assert all(stat.S_ISDIR(status.st_mode) for status in found.values())
    assert set(found) == {str(path.relative_to(machine.root)) for path in _directories(machine.root / "usr")}
    assert {(status.st_uid, status.st_gid) for status in found.values()} == {(os.geteuid(), os.getegid())}
    modes = dict.fromkeys(found, 0o755) | {"usr/local/fonts": 0o775, "usr/share/sticky": 0o1777}
    assert {path: stat.S_IMODE(status.st_mode) for path, status in found.items()} == modes


def _directories(top: Path) -> list[Path]:
    return [Path(path) for path, _, _ in os.walk(top)]


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o751, 0o754])
def test_a_directory_of_programs_that_not_everyone_may_enter_is_left_to_nobody(machine: Machine, mode: int):
    machine.directory("usr/share/rules/open/below")
    machine.directory("usr/share/rules", mode)
    _, built = machine.build()
    assert sorted(os.listdir(built / "usr")) == ["bin", "local", "share"]
    assert os.listdir(built / "usr/share") == []


@pytest.mark.parametrize("content", [None, "token"])
def test_settings_of_administrators_are_hidden_also_when_they_come_later(machine: Machine, content: str | None):
    if content is not None:
        machine.file("usr/local/etc/npmrc", content)
    _, built = machine.build()
    found = (built / "usr/local/etc").lstat()
    assert stat.S_ISCHR(found.st_mode)
    assert found.st_rdev == 0


def test_without_a_place_for_settings_the_place_is_watched(machine: Machine):
    (machine.root / "usr/local").rmdir()
    skeleton, built = machine.build()
    assert os.listdir(built / "usr") == ["bin"]
    assert machine.is_current(skeleton)
    machine.file("usr/local/etc/npmrc", "token")
    assert not machine.is_current(skeleton)


@pytest.mark.parametrize("directory", ["usr/bin", "usr/local/bin"])
def test_a_machine_with_python3_alone_has_python_inside(machine: Machine, directory: str):
    machine.file(f"{directory}/python3", mode=0o755)
    skeleton, built = machine.build()
    assert os.readlink(built / directory / "python") == "python3"
    assert machine.is_current(skeleton)
    (machine.root / directory / "python").symlink_to("python3.11")
    assert not machine.is_current(skeleton)
    _, built = machine.build()
    assert not os.path.lexists(built / directory / "python")


@pytest.mark.parametrize("programs", [[], ["usr/bin/python3", "usr/local/bin/python"], ["usr/sbin/python3"]])
def test_a_machine_with_a_python_of_its_own_or_none_gets_no_link(machine: Machine, programs: list[str]):
    for program in programs:
        machine.file(program, mode=0o755)
    skeleton, built = machine.build()
    assert not list(built.rglob("python"))
    machine.file("usr/bin/python3", "another", mode=0o755)
    assert not machine.is_current(skeleton)


def test_directories_that_come_with_a_package_are_roots_at_the_next_build(machine: Machine):
    machine.file("var/lib/dpkg/status", "1")
    first, _ = machine.build()
    machine.directory("usr/bin/later")
    assert machine.is_current(first), "as if a user had made it: it merely belongs to nobody"
    machine.file("var/lib/dpkg/status", "1, 2")
    assert not machine.is_current(first)
    second, built = machine.build()
    assert (built / "usr/bin/later").is_dir()
    assert second.digest != first.digest


def test_top_level_directories_are_used_in_place_and_links_reproduced(machine: Machine):
    machine.directory("bin/below")
    machine.link("lib", "usr/lib")
    skeleton, built = machine.build()
    assert skeleton.trees == ("usr", "bin")
    assert (built / "root/bin").is_dir()
    assert os.listdir(built / "bin") == ["below"]
    assert os.readlink(built / "root/lib") == "usr/lib"


@pytest.mark.parametrize(
    "change",
    ["ld.so.cache", "alternatives/vim", "ssl/certs/new.pem", "java-21-openjdk/security/java.policy", "timezone"],
)
def test_a_change_of_the_machine_is_noticed_and_what_stays_the_same_has_the_same_digest(machine: Machine, change: str):
    machine.file("etc/ld.so.cache", "1")
    machine.file("etc/alternatives/old")
    machine.file("etc/ssl/certs/old.pem")
    first, _ = machine.build()
    assert machine.is_current(first)
    assert machine.build()[0].digest == first.digest
    machine.file("etc/new-and-not-public")
    assert machine.is_current(first)
    machine.file(f"etc/{change}", "changed")
    assert not machine.is_current(first)
    second, _ = machine.build()
    assert second.digest != first.digest
    assert machine.is_current(second)


def test_a_build_can_be_ended_from_outside(machine: Machine, tmp_path: Path):
    class Ended(Exception):
        pass

    def check() -> None:
        raise Ended

    (tmp_path / "ended").mkdir()
    with pytest.raises(Ended):
        build(tmp_path / "ended", rootless=True, machine=machine.root, check=check)
