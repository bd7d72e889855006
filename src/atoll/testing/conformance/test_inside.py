"""What a command sees inside: users, homes, names, files of the image, and nothing of the host or other sandboxes."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll import Engine, InvalidRequest, PathNotFound, Sandbox, SandboxDied, SandboxError, UserNotFound
from atoll.contract.model import RuntimeName


@pytest.mark.core
async def test_the_user_has_a_home_of_their_own(shared: Sandbox, user_id: int, single_id: bool) -> None:
    home = await shared.files.stat("/home/user")
    assert (home.kind, home.uid, home.gid) == ("directory", user_id, user_id)
    assert (await shared.exec("cd && pwd && touch file && rm file && echo ~")).stdout == "/home/user\n/home/user\n"
    if not single_id:
        passwd = await shared.files.read_text("/etc/passwd")
        [line] = [line for line in passwd.splitlines() if line.startswith("user:")]
        assert line.split(":")[2:4] == ["1000", "1000"]
        assert line.split(":")[5] == "/home/user"


@pytest.mark.core
async def test_root_inside_may_change_the_system_and_the_host_does_not_see_it(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo mine > /etc/own && rm /etc/shells && cat /etc/own", user="root")
    assert (result.stdout, result.exit_code) == ("mine\n", 0), result.stderr
    if os.geteuid() == 0:
        # An unprivileged user cannot map the owner of the host's files: inside, /usr is `nobody`'s and read-only.
        result = await sandbox.exec("echo mine > /usr/bin/own && rm /bin/true && cat /usr/bin/own", user="root")
        assert (result.stdout, result.exit_code) == ("mine\n", 0), result.stderr
        assert (await sandbox.exec(["/bin/true"])).exit_code == 127
    assert not Path("/etc/own").exists()
    assert not Path("/usr/bin/own").exists()
    assert Path("/bin/true").exists()


@pytest.mark.core
async def test_the_user_may_not_change_the_system(shared: Sandbox, single_id: bool) -> None:
    if single_id:
        pytest.skip("with one id for all, the user is root")
    result = await shared.exec("touch /etc/own || touch /usr/bin/own || rm /bin/true")
    assert result.exit_code != 0
    assert "denied" in result.stderr.lower()
    result = await shared.exec("chown root file", cwd="/tmp")
    assert result.exit_code != 0


async def test_root_may_become_another_user_and_give_files_away(sandbox: Sandbox, single_id: bool) -> None:
    if single_id:
        pytest.skip("with one id for all there is no other user to become")
    result = await sandbox.exec("touch f && chown 1000:1000 f && chmod 600 f && stat -c %u f", user="root")
    assert result.stdout == "1000\n", result.stderr


@pytest.mark.core
async def test_no_process_gains_privileges(shared: Sandbox) -> None:
    status = await shared.files.read_text("/proc/self/status")
    result = await shared.exec("grep NoNewPrivs /proc/self/status || true")
    assert "NoNewPrivs:\t1" in result.stdout or "NoNewPrivs" not in status


@pytest.mark.core
async def test_the_name_of_the_sandbox_is_its_host_name(engine: Engine) -> None:
    async with await engine.create("named-box") as sandbox:
        assert (await sandbox.exec("hostname; cat /proc/sys/kernel/hostname")).stdout == "named-box\nnamed-box\n"
        found = await sandbox.exec("getent hosts named-box; getent hosts localhost; hostname -i; hostname -f")
        assert [line.split() for line in found.stdout.splitlines()] == [
            ["127.0.0.1", "named-box"],
            ["::1", "localhost", "ip6-localhost", "ip6-loopback"],
            ["127.0.0.1"],
            ["named-box"],
        ]


@pytest.mark.core
async def test_temporary_directories_are_for_everyone(shared: Sandbox) -> None:
    for path in ("/tmp", "/dev/shm"):
        stat = await shared.files.stat(path)
        assert stat.mode == 0o1777, path
        assert (await shared.exec("echo x > t && cat t && rm t", cwd=path)).stdout == "x\n"


@pytest.mark.core
async def test_the_usual_devices_work(shared: Sandbox) -> None:
    command = "head -c 4 /dev/zero | wc -c; echo x > /dev/null; head -c 8 /dev/urandom | wc -c; ls /dev/fd /dev/ptmx"
    result = await shared.exec(command)
    assert result.stdout.split()[:2] == ["4", "8"], result
    assert result.exit_code == 0


@pytest.mark.core
async def test_python_is_found_by_either_name_where_the_machine_has_one(shared: Sandbox) -> None:
    if not (await shared.exec("command -v python3")).ok:
        pytest.skip("the machine has no python3")
    ran = await shared.exec(["python", "-I", "-S", "-c", "import sys; print(sys.version_info[0])"])
    assert (ran.stdout, ran.exit_code) == ("3\n", 0)


async def test_a_sandbox_has_process_ids_of_its_own(shared: Sandbox) -> None:
    assert all(process.pid < 100_000 for process in await shared.ps())
    host = {name for name in os.listdir("/proc") if name.isdigit()}
    inside = (await shared.exec("ls /proc | grep -c '^[0-9]'")).stdout
    assert int(inside) < 20 or int(inside) < len(host)
    assert (await shared.exec(["cat", f"/proc/{os.getpid()}/cmdline"])).exit_code != 0


@pytest.mark.core
async def test_neighbours_do_not_see_each_others_files_and_processes(sandbox: Sandbox, neighbour: Sandbox) -> None:
    await sandbox.files.write_text("/tmp/mine", "x")
    await sandbox.files.write_text("mine", "x")
    await sandbox.spawn("exec sleep 31539001")
    assert not await neighbour.files.exists("/tmp/mine")
    assert not await neighbour.files.exists("/home/user/mine")
    assert not any("31539001" in process.command for process in await neighbour.ps())


async def test_the_hosts_state_directory_is_not_there(shared: Sandbox, state_dir: Path) -> None:
    assert not await shared.files.exists(str(state_dir), user="root")
    mounts = await shared.files.read_text("/proc/self/mounts")
    assert str(state_dir) not in mounts


@pytest.mark.core
async def test_the_guest_cannot_be_changed_from_inside(sandbox: Sandbox) -> None:
    await sandbox.exec("echo x > /run/atoll/guest; rm -f /run/atoll/guest; : > /run/atoll/guest", user="root")
    assert (await sandbox.files.stat("/run/atoll/guest", user="root")).size > 10_000
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_the_guest_cannot_be_killed_or_stopped_from_inside(sandbox: Sandbox, runtime_name: RuntimeName) -> None:
    # Linux protects PID 1 from every signal of its own namespace. gVisor does not protect it from root.
    user = "user" if runtime_name == "runsc" else "root"
    await sandbox.exec("kill -9 1; kill -STOP 1; kill -TERM 1; kill -SEGV 1", user=user)
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@pytest.mark.core
async def test_a_command_that_kills_every_process_never_gets_an_invented_exit_code(
    sandbox: Sandbox, runtime_name: RuntimeName
) -> None:
    if runtime_name == "runsc":
        # With gVisor, root's signal reaches PID 1 too, which ends the sandbox.
        with pytest.raises(SandboxError):
            await sandbox.exec("kill -9 -1; exit 0", user="root")
        return
    with pytest.raises(SandboxError, match="not known") as caught:
        await sandbox.exec("kill -9 -1; exit 0", user="root")
    assert not isinstance(caught.value, SandboxDied)
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


@pytest.mark.core
async def test_the_clock_and_the_language_are_usable(shared: Sandbox) -> None:
    result = await shared.exec("date +%Y; echo $LANG; printf '€' | wc -m")
    year, language, length = result.stdout.split()
    assert int(year) >= 2024
    assert "UTF-8" in language.upper()
    assert length == "1"


# ---- other images ----


@pytest.fixture(scope="module")
async def bare(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandbox]:
    """A sandbox of an image that holds one static program and a user, and no shell."""
    root = tmp_path_factory.mktemp("images") / "bare"
    (root / "bin").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "home/agent").mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:0:0::/home/agent:/bin/program\n")
    (root / "etc/motd").write_text("bare\n")
    import atoll

    package = Path(atoll.__file__).parent
    shutil.copy(package / "_bin/guest", root / "bin/program")
    async with await engine.create(image=f"dir:{root}") as sandbox:
        yield sandbox


@pytest.mark.core
async def test_an_image_without_a_shell_works_as_far_as_it_can(bare: Sandbox) -> None:
    result = await bare.exec("echo ran")
    assert result.exit_code == 127
    assert "sh" in result.stderr
    assert await bare.files.read_text("/etc/motd") == "bare\n"
    await bare.files.write_text("note", "kept")
    assert await bare.files.read_text("/home/user/note") == "kept"
    result = await bare.exec(["/bin/program", "--no-such-option"], timeout_s=20)
    assert result.exit_code not in {126, 127}
    assert [entry.name for entry in await bare.files.glob("m*", cwd="/etc")] == ["motd"]
    await bare.files.remove("note")


@pytest.mark.core
async def test_users_are_those_of_the_image(bare: Sandbox) -> None:
    await bare.files.write_text("note", "x", user="agent")
    assert await bare.files.exists("/home/agent/note", user="root")
    await bare.files.remove("note", user="agent")
    with pytest.raises(InvalidRequest):
        await bare.files.read_text("note", user="no-such-user")


@pytest.mark.core
async def test_an_image_that_is_a_directory_is_never_written_to(bare: Sandbox, tmp_path: Path) -> None:
    await bare.files.write_text("/etc/motd", "changed", user="root")
    assert await bare.files.read_text("/etc/motd") == "changed"
    source = Path(bare.info.image.removeprefix("dir:"))
    assert (source / "etc/motd").read_text() == "bare\n"
    assert not (source / "run").exists()
    await bare.files.remove("/etc/motd", user="root")
    with pytest.raises(PathNotFound):
        await bare.files.read_text("/etc/motd")
    assert (source / "etc/motd").read_text() == "bare\n"
    await bare.files.write_text("/etc/motd", "bare\n", user="root")


@pytest.mark.core
async def test_an_image_may_have_anything_where_file_systems_are_mounted(engine: Engine, tmp_path: Path) -> None:
    for name in ("proc", "dev", "run", "tmp"):
        (tmp_path / name).write_text("in the way")
    (tmp_path / "sys").symlink_to("sys")
    (tmp_path / "etc").symlink_to("/../../../etc")
    async with await engine.create(image=f"dir:{tmp_path}") as sandbox:
        kinds = {entry.name: entry.kind for entry in await sandbox.files.list("/")}
        assert {kinds[name] for name in ("proc", "dev", "run", "sys")} == {"directory"}
        assert (await sandbox.files.stat("/dev/null")).kind == "char_device"
    assert (tmp_path / "proc").read_text() == "in the way"


async def test_the_default_user_can_be_another(engine: Engine) -> None:
    async with await engine.create(user="root") as sandbox:
        assert sandbox.info.user == "root"
        assert (await sandbox.exec("id -u; pwd")).stdout == "0\n/root\n"
        await sandbox.files.write_text("note", "x")
        assert await sandbox.files.exists("/root/note")


async def test_a_user_that_the_image_does_not_have_is_refused_and_nothing_is_left(engine: Engine) -> None:
    with pytest.raises(UserNotFound, match="'no-such-user'"):
        await engine.create("of-no-user", user="no-such-user")
    assert await engine.list("of-no-user") == []


def wheel(directory: Path) -> Path:
    """A package with a program, as pip installs it, that needs no index."""
    path = directory / "coconut-1.0-py3-none-any.whl"
    files = {
        "coconut.py": "def main():\n    print('from the wheel')\n",
        "coconut-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: coconut\nVersion: 1.0\n",
        "coconut-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "coconut-1.0.dist-info/entry_points.txt": "[console_scripts]\ncoconut = coconut:main\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("coconut-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in files))
    return path


@pytest.mark.parametrize("user", ["user", "root"])
async def test_pip_installs_a_package_and_its_program_is_found(sandbox: Sandbox, tmp_path: Path, user: str) -> None:
    if (await sandbox.exec("command -v pip")).exit_code != 0:
        pytest.skip("this machine has no pip, so the host image has none")
    if user == "root" and os.geteuid() != 0:
        pytest.skip("an unprivileged user's root cannot write to the machine's /usr")
    await sandbox.files.upload(wheel(tmp_path), f"/tmp/{wheel(tmp_path).name}")
    installed = await sandbox.exec(f"pip install --no-index /tmp/{wheel(tmp_path).name}", user=user, timeout_s=50)
    assert installed.exit_code == 0, installed.stderr
    assert (await sandbox.exec(["coconut"], user=user)).stdout == "from the wheel\n"
