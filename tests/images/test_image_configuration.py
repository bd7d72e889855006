"""What an image's configuration says of processes holds in sandboxes: USER, WORKDIR and ENV."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll import Engine, PathNotFound, PermissionDenied, Sandbox, UserNotFound
from atoll.contract.errors import InvalidRequest
from atoll.contract.model import Output
from atoll.tools.coding import coding_tools
from atoll.tools.workspace import workspace_tools
from tests.images.registry import entry, file, make_layout, rootfs

pytestmark = pytest.mark.runtimes("crun", "runsc")

ACCOUNTS = "root:x:0:0:root:/root:/bin/sh\napp:x:1500:1600:app:/opt/app:/bin/sh\n"
GROUPS = "root:x:0:\napp:x:1600:\nstaff:x:1700:\nextra:x:1800:app\n"
ENTRIES = rootfs(
    file("etc/group", GROUPS.encode()),
    entry("opt", tarfile.DIRTYPE, mode=0o755),
    entry("opt/app", tarfile.DIRTYPE, mode=0o755, uid=1500, gid=1600),
    entry("srv", tarfile.DIRTYPE, mode=0o777),
    entry("root", tarfile.DIRTYPE, mode=0o700),
    accounts=ACCOUNTS,
)
WHO = "busybox id -u; busybox id -g; busybox pwd"

Make = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
async def make(programs: None, engine: Engine, tmp_path: Path):
    """Creates a sandbox of an image with this USER and WORKDIR."""
    made: list[str] = []
    references: list[str] = []

    async def create(user: str | None, workdir: str | None, /, **options) -> Sandbox:
        number = len(references)
        layout = make_layout(tmp_path / f"layout{number}", ENTRIES, user=user, workdir=workdir, env=["SAYS=hello"])
        references.append(f"configured/{tmp_path.name.lower().strip('-_')}:{number}")
        await engine.images.import_(layout, references[-1])
        sandbox = await engine.create(image=references[-1], **options)
        made.append(sandbox.name)
        return sandbox

    yield create
    for name in made:
        await engine.destroy(name)
    for reference in references:
        await engine.images.remove(reference)


async def identity(sandbox: Sandbox, **options) -> list[str]:
    ran = await sandbox.exec(WHO, **options)
    assert ran.ok, ran
    return ran.stdout.split()


async def test_commands_and_files_get_the_image_s_user_directory_and_variables(make: Make, engine: Engine):
    sandbox = await make("app", "/srv")
    assert await identity(sandbox) == ["1500", "1600", "/srv"]
    assert (sandbox.info.user, sandbox.info.cwd) == ("app", "/srv")
    assert (await sandbox.exec("echo $SAYS $HOME")).stdout == "hello /opt/app\n"
    await sandbox.exec("echo made > by-command; busybox mkdir sub")
    assert await sandbox.files.read_text("by-command") == "made\n"
    await sandbox.files.write_text("sub/by-file", "x")
    status = await sandbox.files.stat("/srv/sub/by-file")
    assert (status.uid, status.gid) == (1500, 1600)
    assert await identity(sandbox, cwd="sub") == ["1500", "1600", "/srv/sub"]
    (listed,) = await engine.list(sandbox.name)
    assert (listed.user, listed.cwd) == ("app", "/srv")
    async with await sandbox.shell(command=WHO) as process:
        assert b"".join([event.data async for event in process if isinstance(event, Output)]).split()[2] == b"/srv"


async def test_what_a_call_says_wins_over_create_and_create_over_the_image(make: Make):
    sandbox = await make("app", "/srv", user="user", cwd="/home/user/project")
    assert await identity(sandbox) == ["1000", "1000", "/home/user/project"]
    assert await identity(sandbox, user="root", cwd="/tmp") == ["0", "0", "/tmp"]
    assert await identity(sandbox, user="app") == ["1500", "1600", "/home/user/project"]
    await sandbox.files.write_text("f", "")
    assert (await sandbox.files.stat("/home/user/project/f")).uid == 1000
    await sandbox.files.remove("/home/user/project", recursive=True)
    with pytest.raises(PathNotFound):  # not silently run elsewhere
        await sandbox.exec("true")


@pytest.mark.runtimes("crun")  # the guest finds them, the same program in every runtime
@pytest.mark.parametrize(
    ("user", "uid", "gid"),
    [
        (None, 1000, 1000),
        ("", 1000, 1000),
        ("root", 0, 0),
        ("0:0", 0, 0),
        ("1500", 1500, 1600),
        ("4321", 4321, 0),
        ("4321:77", 4321, 77),
        ("app:staff", 1500, 1700),
        ("app:5", 1500, 5),
        ("4321:staff", 4321, 1700),
    ],
)
async def test_every_form_of_user_is_understood(make: Make, user: str | None, uid: int, gid: int):
    sandbox = await make(user, None)
    assert (await identity(sandbox))[:2] == [str(uid), str(gid)]
    await sandbox.files.write_text("/tmp/f", "")
    status = await sandbox.files.stat("/tmp/f")
    assert status.uid == uid


@pytest.mark.runtimes("crun")  # the guest finds them, the same program in every runtime
@pytest.mark.parametrize(
    ("user", "workdir", "directory"),
    [
        (None, None, "/home/user"),
        (None, "/", "/home/user"),  # what builders write if none was set
        (None, "srv", "/home/user"),  # the specification asks for an absolute path
        (None, "/srv/../srv/.", "/srv"),
        (None, "/root", "/home/user"),  # `user` cannot enter it
        ("root", "/root", "/root"),
        (None, "/missing", "/home/user"),
        (None, "/etc/passwd", "/home/user"),
        ("app", None, "/opt/app"),
    ],
)
async def test_the_image_s_directory_counts_if_its_user_can_enter_it(
    make: Make, user: str | None, workdir: str | None, directory: str
):
    sandbox = await make(user, workdir)
    assert (await identity(sandbox))[2] == directory
    await sandbox.exec("> here", user="root", cwd=directory)
    assert (await sandbox.files.stat("here")).kind == "file"


@pytest.mark.parametrize("user", ["nobody-here", "app:nogroup-here", "app:"])
async def test_a_user_that_the_image_does_not_have_is_refused_at_create(make: Make, user: str, engine: Engine):
    with pytest.raises(InvalidRequest, match="user") as caught:
        await make(user, None, name="refused")
    assert "name another user" in str(caught.value)
    assert [each.name for each in await engine.list()] == []


@pytest.mark.runtimes("crun")  # the kernel of runsc has all ids
async def test_an_id_beyond_those_of_a_sandbox_is_refused_at_create(make: Make):
    with pytest.raises(InvalidRequest, match="65535"):
        await make("70000", None)


async def test_naming_another_user_helps_with_an_image_whose_own_does_not_exist(make: Make):
    sandbox = await make("nobody-here", None, user="user")
    assert (await identity(sandbox))[0] == "1000"
    with pytest.raises(UserNotFound):
        await sandbox.exec("true", user="nobody-here")


async def test_a_directory_that_cannot_be_made_is_refused_at_create(make: Make, engine: Engine):
    with pytest.raises(PermissionDenied):
        await make(None, None, cwd="/etc/mine")
    for wrong in ("relative", "", "/x\0y"):
        with pytest.raises(InvalidRequest, match=r"the working directory is .* absolute path"):
            await engine.create(cwd=wrong)
    assert await engine.list() == []


async def test_forks_checkpoints_and_sleep_keep_user_and_directory(make: Make, engine: Engine, tmp_path: Path):
    sandbox = await make("app", "/srv")
    await sandbox.checkpoint("before")
    forks = [*await sandbox.fork(), *await sandbox.fork(checkpoint="before")]
    for fork in forks:
        assert await identity(fork) == ["1500", "1600", "/srv"]
        await fork.destroy()
    await sandbox.restore("before")
    assert await identity(sandbox) == ["1500", "1600", "/srv"]
    await sandbox.sleep()
    assert await identity(sandbox) == ["1500", "1600", "/srv"]
    for checkpoint in await sandbox.checkpoints():
        await engine.delete_checkpoint(checkpoint.id)
    await sandbox.export(tmp_path / "archive")
    imported = await engine.import_(tmp_path / "archive", "imported")
    async with imported:
        assert await identity(imported) == ["1500", "1600", "/srv"]
        assert (imported.info.user, imported.info.cwd) == ("app", "/srv")


async def test_a_warm_sandbox_gets_what_its_create_says(make: Make, engine: Engine):
    image = (await make("app", "/srv")).info.image
    await engine.warm(1, image=image)
    try:
        async with await engine.create(image=image) as plain:
            assert await identity(plain) == ["1500", "1600", "/srv"]
        await engine.warm(1, image=image)
        async with await engine.create(image=image, user="user", cwd="/home/user/x") as other:
            assert await identity(other) == ["1000", "1000", "/home/user/x"]
    finally:
        await engine.warm(0, image=image)


async def test_an_image_that_was_fetched_before_users_were_used_works(make: Make, engine: Engine):
    """Its record is that of today: it has had USER and WORKDIR from the first version on."""
    sandbox = await make("app", "/srv")
    (found,) = [image for image in await engine.images.list() if image.reference.endswith(sandbox.info.image)]
    record = engine.state_dir / "images/unpacked" / found.digest.removeprefix("sha256:") / "image.json"
    stored = json.loads(record.read_text())
    assert (stored["version"], stored["user"], stored["working_directory"]) == (1, "app", "/srv")


async def test_tools_start_in_the_image_s_directory(make: Make):
    sandbox = await make("app", "/srv")
    tools = sandbox.tools()
    ran = await tools.handle_tool_call("shell", {"command": "busybox pwd > note; busybox pwd"})
    assert ran.structured is not None
    assert ran.structured["stdout"] == "/srv\n"
    read = await tools.handle_tool_call("read_file", {"path": "note"})
    assert read.structured is not None
    assert read.structured["content"] == "/srv\n"
    found = await tools.handle_tool_call("glob", {"pattern": "no*"})
    assert found.structured == {"files": ["note"]}
    assert (await coding_tools(sandbox).handle_tool_call("read", {"path": "note"})).text == "     1\t/srv\n"


async def test_a_pool_describes_them_and_its_tools_use_them(make: Make, engine: Engine):
    sandbox = await make("app", "/srv")
    async with engine.pool("configured", image=sandbox.info.image, temporary=True) as pool:
        about = await pool.describe()
        assert (about.user, about.cwd, about.image) == ("app", "/srv", sandbox.info.image)
        tools = workspace_tools(pool)
        ran = await tools.handle_tool_call("shell", {"command": WHO})
        assert ran.text.split() == ["1500", "1600", "/srv"]
        ran = await tools.handle_tool_call("shell", {"command": WHO, "user": "root"})
        assert ran.text.split() == ["0", "0", "/srv"]
