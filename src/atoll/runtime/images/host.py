"""The host image: this machine's programs without this machine's secrets.

Owns which of the machine's files may be seen inside, and builds from them a *skeleton*: a root directory with a clean
`/etc`, `/home`, `/root` and `/var`, into which the machine's own `/usr` is mounted, which is used in place. `PUBLIC`
lists what is copied; all else does not exist inside, so a file that was not thought of stays outside. Settings that
administrators are known to put passwords into (`/etc/profile`, `gitconfig`, `pip.conf`, `npmrc`, `environment`, sources
of package managers) are generated or left out.

Files that are used in place belong to no user inside, so that the kernel shows only what all users may read. For root
inside to add, replace and delete files there, a layer of directories that belong to root is put above them:
`docs/design/0003-host-image.md`.

Not here: where the result is stored (`store.py`), and how it is mounted (the driver).
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path, PurePosixPath

from atoll.runtime.images.overlay import HOSTS, RESOLV_CONF
from atoll.runtime.state.records import StoredRecord
from atoll.runtime.state.store import now

RECIPE = 6
"""Raise it when the code below makes something else from the same inputs: all skeletons are then built again."""

TREES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Top-level directories of programs. Each is used in place if it is a directory, or reproduced if it is a link."""

PUBLIC = (
    # Loader, alternatives and the identity of the distribution.
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "os-release", "lsb-release", "debian_version"),
    *("alpine-release", "arch-release", "fedora-release", "redhat-release", "system-release", "SuSE-release"),
    # Certificate authorities; public certificates and keys only.
    *("ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf", "crypto-policies"),
    *("pki/ca-trust", "pki/java", "pki/tls/certs", "pki/tls/cert.pem", "pki/tls/openssl.cnf"),
    *("apt/trusted.gpg", "apt/trusted.gpg.d", "apt/keyrings"),
    # Time, language, terminals and names of things.
    *("localtime", "timezone", "locale.alias", "locale.conf", "locale.gen", "default/locale", "inputrc", "terminfo"),
    *("protocols", "services", "rpc", "ethertypes", "netconfig", "gai.conf", "bindresvport.blacklist", "xattr.conf"),
    *("mime.types", "mailcap", "mailcap.order", "magic", "magic.mime", "papersize", "libaudit.conf"),
    # Adding users and packages inside.
    *("login.defs", "adduser.conf", "deluser.conf", "default/useradd", "debconf.conf", "ucf.conf", "dpkg"),
    # Languages and tools.
    *("python", "python2*", "python3*", "perl", "texmf", "emacs", "vim", "nanorc", "gdb", "gprofng.rc", "groff"),
    *("java", "java-*", "maven/m2.conf", "maven/logging", "R/Renviron", "R/Makeconf", "R/ldpaths", "R/javaconf"),
    *("R/repositories", "fonts", "ghostscript", "ImageMagick-*", "OpenCL", "glvnd", "vulkan", "manpath.config"),
    *("xml", "sgml", "bash_completion", "bash_completion.d", "gtk-2.0", "gtk-3.0", "chromium.d"),
    *("X11/app-defaults", "X11/rgb.txt", "X11/xkb"),
)
"""What is copied from the machine's `/etc`, if all users may read it. `*` only in the first component."""

PUBLIC_STATE = (
    *("var/lib/dpkg/status", "var/lib/dpkg/arch", "var/lib/dpkg/diversions", "var/lib/dpkg/alternatives"),
    *("var/lib/dpkg/info", "var/lib/ca-certificates"),
)
"""What is copied from elsewhere.

Of dpkg's database the parts that say what is installed, so that `dpkg -l`, `-L`, `-S` and dependencies work: which
packages a machine has can be seen in `/usr/share/doc` anyway. The scripts of the machine's packages are left out,
and so is `statoverride`: dpkg refuses to install anything when it names a group that does not exist.
"""

HIDDEN = ("usr/local/etc",)
"""Settings of administrators within the trees of programs, often readable for all. They do not exist inside."""
EXTERNALLY_MANAGED = re.compile(r"usr/(local/)?lib(64)?/python3(\.\d+)?")
"""Directories whose `EXTERNALLY-MANAGED` does not exist inside. It keeps pip from changing what the machine's package
manager looks after (PEP 668). Inside nothing is the machine's, and `pip install` is what people and models type."""

PYTHONS = ("usr/bin", "usr/local/bin", "bin", "usr/sbin", "usr/local/sbin", "sbin")
"""Where `python` is looked for. A machine that has only `python3` gets a link to it inside, beside the first that is
found in one of the first two: models and scripts call it `python`, and Debian has that name only in a package."""

PACKAGES = ("var/lib/rpm/rpmdb.sqlite", "usr/lib/sysimage/rpm/rpmdb.sqlite", "var/lib/pacman/local", "lib/apk/db")
"""What changes when packages are installed, and with them directories come and go. dpkg's is in `PUBLIC_STATE`."""

_LINKS_INTO = ("/etc", "/var/lib/ca-certificates", "/proc/self/mounts", *(f"/{tree}" for tree in TREES))
_FILE_LIMIT_BYTES = 16 * 1024 * 1024
_TOTAL_LIMIT_BYTES = 256 * 1024 * 1024
_READABLE = stat.S_IROTH
_ENTERABLE = stat.S_IROTH | stat.S_IXOTH

InputStamp = tuple[int, int, int, int] | None
"""Time of modification, size, inode and mode: when one differs, the input has changed. None: it does not exist."""


class Skeleton(StoredRecord):
    """The record of what `build` has made, and from which inputs."""

    VERSION = 1

    digest: str
    """Of its content: `sha256:` and 64 hexadecimal digits."""
    size_bytes: int
    built_at: datetime
    recipe: int
    rootless: bool
    trees: tuple[str, ...]
    """The directories of programs that are used in place, each under the layer of the same name that was built."""
    names: tuple[str, ...]
    """What the machine's `/etc` had of the first components in `PUBLIC`."""
    inputs: dict[str, InputStamp]

    def is_current(self, *, rootless: bool, machine: Path = Path("/")) -> bool:
        """Whether `build` would make the same again. About 100 calls of `lstat`, well below a millisecond.

        Changes of a file in place, in a directory that is copied whole, go unnoticed; package managers, `ldconfig`,
        `update-alternatives` and `update-ca-certificates` all replace files, which shows in their directory. So does a
        directory of programs that no package manager made: it belongs to no user inside until the next build.
        """
        return (
            self.recipe == RECIPE
            and self.rootless == rootless
            and self.names == _matching_names(machine)
            and all(_stamp(path) == stamp for path, stamp in self.inputs.items())
        )


def build(destination: Path, *, rootless: bool, machine: Path = Path("/"), check: Callable[[], None]) -> Skeleton:
    """Build in the existing, empty directory `destination`: `root/`, and beside it `usr/` and so on, of directories.

    Files have the owners that they have inside, or with `rootless` the caller, which is root inside. Files that not all
    users of the machine may read are left out, also if the caller can read them, and so are links that lead to a path
    that is not inside.

    Runs in a thread and takes less than a second. `check` is called repeatedly, and may raise to end it.

    Raises:
        OSError: the disk is full or the directory cannot be written.
    """
    builder = _Builder(destination / "root", rootless=rootless, machine=machine, check=check)
    return builder.build(destination)


class _Builder:
    def __init__(self, root: Path, *, rootless: bool, machine: Path, check: Callable[[], None]) -> None:
        self._root = root
        self._rootless = rootless
        self._machine = machine
        self._check = check
        self._inputs: dict[str, InputStamp] = {}
        self._content = hashlib.sha256(f"{RECIPE} {rootless}\n".encode())
        self._written_bytes = 0

    def build(self, destination: Path) -> Skeleton:
        names = _matching_names(self._machine)
        self._root.mkdir()
        self._directory("", 0o755)
        self._trees_as_links()
        self._own_files()
        for path in _expand(names):
            self._copy_public(f"etc/{path}")
        for path in PUBLIC_STATE:
            self._copy_public(path)
        trees = tuple(tree for tree in TREES if self._is_directory(tree))
        for tree in trees:
            self._cover(tree, destination)
        self._name_python(destination)
        for path in PACKAGES:
            self._inputs[str(self._machine / path)] = _stamp(self._machine / path)
        return Skeleton(
            digest=f"sha256:{self._content.hexdigest()}",
            size_bytes=self._written_bytes,
            built_at=now(),
            recipe=RECIPE,
            rootless=self._rootless,
            trees=trees,
            names=names,
            inputs=self._inputs,
        )

    # --- generated files --------------------------------------------------------------------------------------

    def _trees_as_links(self) -> None:
        for tree in TREES:
            path = self._machine / tree
            self._inputs[str(path)] = _stamp(path)
            if path.is_symlink():
                self._link(tree, os.readlink(path))
            elif path.is_dir():
                self._directory(tree, 0o755)

    def _own_files(self) -> None:
        has_bash = (self._machine / "bin/bash").exists() or (self._machine / "usr/bin/bash").exists()
        shell = "/bin/bash" if has_bash else "/bin/sh"
        for path, mode in _DIRECTORIES.items():
            self._directory(path, mode)
        for path, text in _FILES.items():
            self._file(path, text.format(shell=shell).encode() if path == "etc/passwd" else text.encode())
        for path, target in _LINKS.items():
            self._link(path, target)
        for path in ("home/user", "etc/skel"):
            for name, text in _SKEL.items():
                self._file(f"{path}/{name}", text.encode())
        if not self._rootless:
            for path in ("home/user", *(f"home/user/{name}" for name in _SKEL)):
                os.chown(self._root / path, 1000, 1000)

    # --- copied files -----------------------------------------------------------------------------------------

    def _copy_public(self, path: str) -> None:
        """Copy one entry of the allow-list, if the machine has it and all users may reach it."""
        self._inputs[str(self._machine / path)] = _stamp(self._machine / path)
        for parent in reversed(PurePosixPath(path).parents):
            found = _lstat(self._machine / parent)
            if found is None or not stat.S_ISDIR(found.st_mode) or found.st_mode & _ENTERABLE != _ENTERABLE:
                return
        self._copy(path)

    def _copy(self, path: str) -> None:
        self._check()
        source = self._machine / path
        found = _lstat(source)
        if found is None or os.path.lexists(self._root / path):
            return
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(source)
            if _leads_inside(path, target):
                self._parents(path)
                self._link(path, target)
        elif stat.S_ISREG(found.st_mode) and found.st_mode & _READABLE:
            content = self._read_public(source)
            if content is not None:
                self._parents(path)
                self._file(path, content, executable=bool(found.st_mode & stat.S_IXOTH))
        elif stat.S_ISDIR(found.st_mode) and found.st_mode & _ENTERABLE == _ENTERABLE:
            self._inputs[str(source)] = _stamp(source)
            self._parents(path)
            self._directory(path, 0o755)
            for name in sorted(os.listdir(source)):
                if path == "var/lib/dpkg/info" and not (name == "format" or name.endswith(".list")):
                    continue
                self._copy(f"{path}/{name}")

    def _read_public(self, source: Path) -> bytes | None:
        """The content of a file, or None if it must not be copied: the last check, on the opened file itself."""
        try:
            fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or not found.st_mode & _READABLE or found.st_size > _FILE_LIMIT_BYTES:
                return None
            content = file.read(_FILE_LIMIT_BYTES)
        if self._written_bytes + len(content) > _TOTAL_LIMIT_BYTES:
            return None
        # A second line of defence for a private key that was put among the certificates, readable for all by mistake.
        return None if b"PRIVATE KEY-----" in content else content

    # --- the layer above the trees that are used in place ------------------------------------------------------

    def _cover(self, tree: str, destination: Path) -> None:
        """Make the layer that gives root the directories of `tree`: in an overlay the owner of the upper one counts.

        Directories that not all users may enter are left out, with all below them. There are about 15,000 directories:
        hence strings instead of `Path`, and no `lstat` of other files.
        """
        machine, covers = os.path.join(self._machine, ""), os.path.join(destination, "")
        layer = destination / tree
        layer.mkdir()
        top = layer.lstat()
        umask = 0o777 & ~top.st_mode
        layer.chmod(0o755)
        device = os.lstat(machine + tree).st_dev
        modes = {tree: 0o755}
        ahead = [tree]
        while ahead:
            self._check()
            path = ahead.pop()
            for name, status in _public_directories(machine + path):
                below = f"{path}/{name}"
                if below in HIDDEN:
                    continue
                mode = modes[below] = status.st_mode & 0o1777 | 0o700
                os.mkdir(covers + below, mode)
                if mode & umask:
                    os.chmod(covers + below, mode)
                if status.st_dev == device:  # a mounted file system is not part of the overlay
                    ahead.append(below)
        for path in HIDDEN:
            parent = os.path.dirname(path)
            self._inputs[machine + parent] = _stamp(machine + parent)
            if parent in modes:
                # A whiteout, which hides the path also if it is created later.
                os.mknod(covers + path, stat.S_IFCHR, os.makedev(0, 0))
        for path in filter(EXTERNALLY_MANAGED.fullmatch, modes):
            os.mknod(f"{covers}{path}/EXTERNALLY-MANAGED", stat.S_IFCHR, os.makedev(0, 0))
        self._written_bytes += len(modes) * top.st_blocks * 512
        self._note("cover", tree, repr(sorted(modes.items())).encode())

    def _name_python(self, destination: Path) -> None:
        """Link `python` to `python3` in the layer above the programs, if the machine has only the latter."""
        places = [f"{directory}/{name}" for name in ("python", "python3") for directory in PYTHONS]
        for path in places:
            self._inputs[str(self._machine / path)] = _stamp(self._machine / path)
        if any(os.path.lexists(self._machine / path) for path in places[: len(PYTHONS)]):
            return
        for directory in PYTHONS[:2]:
            if (self._machine / directory / "python3").exists() and (destination / directory).is_dir():
                os.symlink("python3", destination / directory / "python")
                self._note("cover link", f"{directory}/python", b"python3")
                return

    # --- writing ----------------------------------------------------------------------------------------------

    def _is_directory(self, path: str) -> bool:
        found = _lstat(self._machine / path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def _parents(self, path: str) -> None:
        for parent in list(reversed(PurePosixPath(path).parents))[1:]:
            if not (self._root / parent).exists():
                self._directory(str(parent), 0o755)

    def _directory(self, path: str, mode: int) -> None:
        target = self._root / path
        target.mkdir(exist_ok=True)
        target.chmod(mode)
        self._note("directory", path, oct(mode).encode())

    def _file(self, path: str, content: bytes, *, executable: bool = False) -> None:
        target = self._root / path
        target.write_bytes(content)
        self._written_bytes += len(content)
        target.chmod(0o755 if executable else 0o644)
        self._note("program" if executable else "file", path, content)

    def _link(self, path: str, target: str) -> None:
        os.symlink(target, self._root / path)
        self._note("link", path, os.fsencode(target))

    def _note(self, kind: str, path: str, content: bytes) -> None:
        self._content.update(b"%s %s %d\n" % (kind.encode(), os.fsencode(path), len(content)))
        self._content.update(content)


def _public_directories(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """The directories in `path` that all users may list and enter."""
    try:
        entries = os.scandir(path)
    except OSError:  # it was removed, or something else than its mode denies access
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found = _lstat(entry.path)
                if found is not None and stat.S_ISDIR(found.st_mode) and found.st_mode & _ENTERABLE == _ENTERABLE:
                    yield entry.name, found


def _matching_names(machine: Path) -> tuple[str, ...]:
    try:
        present = os.listdir(machine / "etc")
    except OSError:
        return ()
    return tuple(sorted(name for name in present if name in _NAMES or _PATTERNS.fullmatch(name)))


def _expand(names: tuple[str, ...]) -> Iterator[str]:
    for path in PUBLIC:
        if "*" in path:
            yield from fnmatch.filter(names, path)
        elif path.partition("/")[0] in names:
            yield path


def _leads_inside(path: str, target: str) -> bool:
    place = os.path.normpath(os.path.join("/", os.path.dirname(path), target))
    return any(place == base or place.startswith(f"{base}/") for base in _LINKS_INTO)


def _lstat(path: str | Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _stamp(path: str | Path) -> InputStamp:
    found = _lstat(path)
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode)


_NAMES = frozenset(path.partition("/")[0] for path in PUBLIC)
_PATTERNS = re.compile("|".join(fnmatch.translate(path) for path in PUBLIC if "*" in path))

_DIRECTORIES: dict[str, int] = {
    "dev": 0o755,
    "etc": 0o755,
    **{f"etc/{name}": 0o755 for name in ("apt", "default", "pam.d", "profile.d", "skel", "ssl")},
    **{f"etc/apt/{name}": 0o755 for name in ("apt.conf.d", "preferences.d", "sources.list.d")},
    "home": 0o755,
    "home/user": 0o755,
    "media": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "srv": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "var": 0o755,
    **{f"var/{name}": 0o755 for name in ("backups", "cache", "lib", "local", "log", "mail", "opt", "spool")},
    "var/tmp": 0o1777,
    **{f"var/cache/{name}": 0o755 for name in ("apt", "apt/archives", "apt/archives/partial", "debconf")},
    **{f"var/lib/{name}": 0o755 for name in ("apt", "apt/lists", "apt/lists/partial", "misc", "dpkg")},
    **{f"var/lib/dpkg/{name}": 0o755 for name in ("parts", "triggers", "updates")},
    "var/log/apt": 0o755,
}

_LINKS = {
    "etc/hosts": HOSTS,
    "etc/mtab": "../proc/self/mounts",
    "var/run": "/run",
    "var/lock": "/run/lock",
    "var/spool/mail": "../mail",
}

# The ids below 100 are the same on every Debian; elsewhere these are unused names.
_FILES = {
    "etc/passwd": """\
root:x:0:0:root:/root:{shell}
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
man:x:6:12:man:/var/cache/man:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
_apt:x:42:65534::/nonexistent:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:{shell}
""",
    "etc/group": """\
root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
adm:x:4:
tty:x:5:
disk:x:6:
mail:x:8:
man:x:12:
sudo:x:27:
www-data:x:33:
src:x:40:
shadow:x:42:
utmp:x:43:
video:x:44:
staff:x:50:
users:x:100:
nogroup:x:65534:
user:x:1000:
""",
    "etc/host.conf": "multi on\n",
    "etc/nsswitch.conf": """\
passwd:    files
group:     files
shadow:    files
hosts:     files dns
networks:  files
protocols: files
services:  files
ethers:    files
rpc:       files
""",
    "etc/resolv.conf": RESOLV_CONF,
    "etc/environment": "",
    "etc/shells": "/bin/sh\n/bin/bash\n/usr/bin/sh\n/usr/bin/bash\n",
    "etc/fstab": "",
    # A setuid program gives no rights inside, so only root can use su and runuser.
    "etc/pam.d/other": """\
auth     sufficient pam_rootok.so
auth     required   pam_deny.so
account  required   pam_permit.so
password required   pam_deny.so
session  required   pam_permit.so
""",
    "etc/profile": """\
if [ "$(id -u)" -eq 0 ]; then
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else
  PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games
fi
export PATH
if [ -n "${PS1-}" ] && [ -n "${BASH-}" ] && [ -r /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi
for script in /etc/profile.d/*.sh; do
  if [ -r "$script" ]; then . "$script"; fi
done
unset script
""",
    "etc/bash.bashrc": """\
[ -z "${PS1-}" ] && return
shopt -s checkwinsize
PS1='\\u@\\h:\\w\\$ '
""",
    "var/lib/dpkg/available": "",
}

_SKEL = {
    # `npm install -g` then puts programs where `pip install` does; /usr is not the user's.
    ".npmrc": "prefix=${HOME}/.local\n",
    ".profile": """\
if [ -n "${BASH_VERSION-}" ] && [ -r "$HOME/.bashrc" ]; then . "$HOME/.bashrc"; fi
for directory in "$HOME/bin" "$HOME/.local/bin"; do
  if [ -d "$directory" ]; then PATH="$directory:$PATH"; fi
done
unset directory
""",
    ".bashrc": """\
case $- in *i*) ;; *) return ;; esac
HISTCONTROL=ignoreboth
alias ls='ls --color=auto'
alias grep='grep --color=auto'
""",
}
