"""Reading and changing the host's files: its secrets, its other directories, Atoll's state, the shared image."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.runtime.images.host import TREES
from atoll.runtime.interface import Engine
from atoll.runtime.sandbox import Sandbox
from tests.attacks.programs import shell

MARKER = f"atoll-marker-{secrets.token_hex(8)}"
_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_SKELETON = {"dev", "etc", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "var"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can put files where this looks")


@pytest.fixture(scope="module")
def marked() -> Iterator[list[Path]]:
    """Files of the host, readable for all, in the places that every machine has for such."""
    paths = [Path(place, MARKER) for place in _PLACES if os.access(place, os.W_OK)]
    for path in paths:
        path.write_text(MARKER)
        path.chmod(0o644)
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


async def test_the_root_directory_holds_only_what_an_image_has(prey: Sandbox) -> None:
    names = {entry.name for entry in await prey.files.list("/", user="root")}
    assert names <= _SKELETON | set(TREES)


@pytest.mark.parametrize("user", ["user", "root"])
async def test_files_of_the_host_are_not_found_by_name(prey: Sandbox, marked: list[Path], user: str) -> None:
    assert marked
    prune = r"\( -path /proc -o -path /sys -o -path /usr \) -prune -o"
    said = await shell(prey, f"find / {prune} -name '{MARKER}*' -print; cat {' '.join(map(str, marked))}", user=user)
    assert said.stdout == ""


async def test_the_state_directory_is_not_there(prey: Sandbox, engine: Engine) -> None:
    said = await shell(prey, f"find {engine.state_dir} /var/lib/atoll", user="root")
    assert said.stdout == ""
    assert not said.ok


async def test_mounts_do_not_tell_where_the_state_directory_is(prey: Sandbox, engine: Engine) -> None:
    said = await shell(
        prey, "cat /proc/self/mountinfo /proc/self/mounts /proc/1/mountinfo /proc/self/maps", user="root"
    )
    assert str(engine.state_dir) not in said.stdout


async def test_secrets_below_etc_are_not_there(prey: Sandbox) -> None:
    private = "shadow shadow- gshadow sudoers sudoers.d ssh machine-id hostname krb5.keytab ssl/private crypttab"
    said = await shell(
        prey, f"cd /etc && for f in {private}; do [ -e $f ] && echo $f; done; cat shadow gshadow", user="root"
    )
    assert set(said.stdout.split()) <= {"hostname"}, "only the sandbox's own name may be there"
    users = (await shell(prey, "cut -d: -f1 /etc/passwd")).stdout.split()
    people = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines() if ":/home/" in line}
    assert not (people - {"user"}) & set(users)


async def test_homes_are_not_there(prey: Sandbox) -> None:
    said = await shell(prey, "find /root /home", user="root")
    skeleton = {"/root", "/home", "/home/user", "/home/user/.npmrc", "/home/user/.profile", "/home/user/.bashrc"}
    assert set(said.stdout.split()) <= skeleton, "nothing of any home of the host"


async def test_variable_data_of_the_host_is_not_there(prey: Sandbox) -> None:
    """The skeleton makes empty directories below /var; what the host keeps in them stays outside."""
    said = await shell(prey, "find /var -xdev -type f -not -path '/var/lib/dpkg/*' -size +0", user="root")
    assert said.stdout == ""


@as_root
async def test_what_only_root_may_read_among_the_programs_is_hidden_also_when_it_came_later(
    engine: Engine, bystander: Sandbox
) -> None:
    """The programs of the host are used in place, and inside root may read what belongs to root."""
    secret = Path("/usr/local/share", MARKER)
    descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, MARKER.encode())
        os.close(descriptor)
        async with await engine.create() as fresh:
            for sandbox in (fresh, bystander):
                said = await shell(sandbox, f"cat {secret}", user="root")
                assert MARKER not in said.stdout, "created before" if sandbox is bystander else "created after"
    finally:
        secret.unlink()


@pytest.mark.parametrize("path", ["/usr/bin/env", "/usr/lib/os-release", "/etc/passwd"])
async def test_a_changed_image_file_changes_nowhere_else(sandbox: Sandbox, bystander: Sandbox, path: str) -> None:
    """Root inside may put something else in the place of any program; it is the sandbox's own copy that changes."""
    outside = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    before = hashlib.sha256(await bystander.files.read_bytes(path)).hexdigest()
    poison = f"printf poisoned > {path}.new && chmod 4777 {path}.new && mv {path}.new {path} && cat {path}"
    said = await shell(sandbox, poison, user="root")
    assert said.stdout == "poisoned"
    assert hashlib.sha256(await bystander.files.read_bytes(path)).hexdigest() == before
    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == outside


async def test_deleting_everything_deletes_nothing_elsewhere(sandbox: Sandbox, bystander: Sandbox) -> None:
    count = len(os.listdir("/usr/bin"))
    await sandbox.exec(["rm", "-rf", "/usr/bin/", "/etc", "/var", "/home"], user="root", timeout_s=30)
    assert not await sandbox.files.exists("/usr/bin/env", user="root")
    assert len(os.listdir("/usr/bin")) == count
    assert await bystander.files.exists("/usr/bin/env")


async def test_the_guests_program_cannot_be_replaced(prey: Sandbox) -> None:
    """It is the host's file: who could write it would be in every sandbox, and on the host at the next build."""
    said = await shell(
        prey,
        "for f in /run/atoll/guest /proc/1/exe /proc/self/root/run/atoll/guest; do "
        "(printf x >> $f) && echo WROTE; (: > $f) && echo CUT; chmod 777 $f && echo CHMOD; rm -f $f && echo GONE; "
        "mv $f /tmp/moved && echo MOVED; ln $f /tmp/linked && echo LINKED; cp /bin/true $f && echo COPIED; done",
        user="root",
    )
    assert said.stdout == ""


async def test_a_lock_on_an_image_file_is_not_felt_by_the_neighbour(sandbox: Sandbox, bystander: Sandbox) -> None:
    async with await sandbox.spawn(
        ["flock", "/usr/bin/env", "sh", "-c", "echo locked; sleep 60"], keep=False
    ) as process:
        await anext(process)
        said = await bystander.exec(["flock", "--nonblock", "/usr/bin/env", "echo", "mine too"], timeout_s=10)
    assert said.stdout == "mine too\n"
