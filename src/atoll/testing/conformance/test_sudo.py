"""`create(sudo=True)`: commands that become root inside, and what they have in common with all others."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest

from atoll import Capabilities, Engine, ExecTimeout, Limits, Sandbox
from atoll.testing.inside import output_of, read_until, running, until_running, wait_tree_exit
from atoll.testing.waiting import eventually

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def _has_sudo(capabilities: Capabilities) -> None:
    if not capabilities.sudo or not capabilities.several_users:
        pytest.skip("the driver declares no sudo, or that there is one user inside")


@pytest.fixture(scope="module")
async def admin(engine: Engine) -> AsyncIterator[Sandbox]:
    """A sandbox with sudo that tests share."""
    async with await engine.create(sudo=True) as sandbox:
        yield sandbox


# ---- who is what ----


@pytest.mark.core
async def test_sudo_makes_the_user_of_commands_root_without_a_password(admin: Sandbox) -> None:
    assert admin.info.sudo
    said = await admin.exec("id -u; sudo -n true && sudo sh -c 'id -u; id -g; id -G' && sudo -u user id -un")
    assert (said.stdout, said.stderr) == ("1000\n0\n0\n0\nuser\n", "")
    written = await admin.exec("echo x | sudo tee /etc/written-by-sudo && stat -c %U /etc/written-by-sudo")
    assert written.stdout == "x\nroot\n"


async def test_without_the_option_no_sudo_is_there_that_works(shared: Sandbox) -> None:
    assert not shared.info.sudo
    said = await shared.exec("sudo -n id -u")
    assert said.exit_code != 0
    assert said.stdout == ""
    by_hand = await shared.exec(["bash", "-c", "exec -a sudo /run/atoll/guest id -u"])
    assert by_hand.stdout == ""
    # With bwrap, users cannot even enter the directory of the program.
    reasons = {1: "the sandbox does not allow it", 126: "Permission denied"}
    assert reasons[by_hand.exit_code] in by_hand.stderr


@pytest.mark.core
async def test_only_the_user_of_commands_and_root_may_use_it(admin: Sandbox) -> None:
    said = await admin.exec("sudo id -u", user="daemon")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr == "sudo: this user may not use it in this sandbox\n"
    assert (await admin.exec("sudo -u user id -un", user="root")).stdout == "user\n"


async def test_another_user_of_commands_may_use_it_instead(engine: Engine) -> None:
    async with await engine.create(sudo=True, user="daemon") as sandbox:
        assert (await sandbox.exec("sudo id -u")).stdout == "0\n"
        assert (await sandbox.exec("sudo id -u", user="user")).exit_code == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-u daemon", "daemon"),
        ("--user=daemon", "daemon"),
        ("--user daemon", "daemon"),
        ("-udaemon", "daemon"),
        ("-nu daemon", "daemon"),
        ("-u '#0'", "root"),
        ("-nSEH", "root"),
        ("-k -p prompt --", "root"),
    ],
)
async def test_options_name_the_user(admin: Sandbox, options: str, expected: str) -> None:
    said = await admin.exec(f"sudo {options} id -un")
    assert (said.stdout, said.stderr) == (f"{expected}\n", "")


async def test_a_group_can_be_named(admin: Sandbox) -> None:
    assert (await admin.exec("sudo -g daemon id -un -g; sudo -g daemon id -gn")).stdout.endswith("daemon\n")
    assert (await admin.exec("sudo -u root -g daemon sh -c 'id -un; id -gn'")).stdout == "root\ndaemon\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sudo --chroot=/ true", "--chroot=/: this option is not supported"),
        ("sudo -e /etc/passwd", "-e: this option is not supported"),
        ("sudo", "a command is missing"),
        ("sudo -u", "-u: this option needs a value"),
        ("sudo -i -s", "exclude each other"),
        ("sudo -u no-such-user true", "unknown user or group no-such-user"),
        ("sudo no-such-program", "no-such-program: command not found"),
        ("sudo /etc/passwd", "/etc/passwd: Permission denied"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_a_reason_and_status_1(admin: Sandbox, line: str, words: str) -> None:
    said = await admin.exec(line)
    assert said.exit_code == 1
    assert words in said.stderr
    assert said.stdout == ""


async def test_it_says_who_may_do_what(admin: Sandbox) -> None:
    said = await admin.exec("sudo -l; sudo -l ls; sudo -v; sudo -k; sudo -K; sudo -V; sudo -h | head -1")
    assert "(ALL : ALL) NOPASSWD: ALL" in said.stdout
    assert "/ls\n" in said.stdout
    assert "usage: sudo" in said.stdout
    assert said.stderr == ""
    assert (await admin.exec("sudo -v", user="daemon")).exit_code == 1
    assert (await admin.exec("sudo -l", user="daemon")).exit_code == 1


# ---- what the command has ----


@pytest.mark.core
async def test_the_command_ends_as_it_ended(admin: Sandbox) -> None:
    assert (await admin.exec(["sudo", "sh", "-c", "exit 7"])).exit_code == 7
    assert (await admin.exec(["sudo", "sh", "-c", "kill -TERM $$"])).signal == signal.SIGTERM
    assert (await admin.exec("sudo sh -c 'kill -9 $$'; echo $?")).stdout == "137\n"


async def test_streams_are_the_callers(admin: Sandbox) -> None:
    data = "x" * MIB
    said = await admin.exec("sudo sh -c 'cat; echo oops >&2'", stdin=data, output_limit_bytes=2 * MIB)
    assert (said.stdout, said.stderr) == (data, "oops\n")
    assert (await admin.exec("sudo yes | head -1")).stdout == "y\n"
    assert (await admin.exec("sudo sh -c 'echo out; echo err >&2' 2>&1 >/dev/null")).stdout == "err\n"
    listed = await admin.exec("sudo ls /proc/self/fd", cwd="/")
    assert listed.stdout.split() == ["0", "1", "2", "3"]  # the last is ls's own


async def test_a_closed_stream_is_as_dev_null(admin: Sandbox) -> None:
    assert (await admin.exec("sudo sh -c 'echo lost; cat; echo seen >&2' <&- >&-")).stderr == "seen\n"


async def test_it_starts_where_the_caller_is(admin: Sandbox) -> None:
    # Also where the target may not go.
    said = await admin.exec(
        "mkdir -p /tmp/mine && chmod 700 /tmp/mine && cd /tmp/mine && sudo -u daemon /bin/echo here"
    )
    assert said.stdout == "here\n"
    assert (await admin.exec("sudo pwd", cwd="/usr")).stdout == "/usr\n"
    assert (await admin.exec("sudo -i pwd", cwd="/usr")).stdout == "/root\n"


async def test_the_environment_is_the_targets(admin: Sandbox) -> None:
    line = "sudo GIVEN='a b' env"
    own = {"OWN": "1", "LC_ALL": "C", "https_proxy": "http://p", "LD_PRELOAD": "/x", "PIP_INDEX_URL": "u"}
    seen = dict(each.split("=", 1) for each in (await admin.exec(line, env=own)).stdout.splitlines())
    assert seen["GIVEN"] == "a b"
    assert (seen["HOME"], seen["USER"], seen["LOGNAME"], seen["MAIL"]) == ("/root", "root", "root", "/var/mail/root")
    assert (seen["SUDO_USER"], seen["SUDO_UID"], seen["SUDO_GID"]) == ("user", "1000", "1000")
    assert seen["SUDO_COMMAND"].endswith("/env")
    assert seen["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # How the sandbox reaches the network is kept, as is the language.
    assert (seen["https_proxy"], seen["LC_ALL"], seen["PIP_INDEX_URL"]) == ("http://p", "C", "u")
    assert not {"OWN", "LD_PRELOAD"} & seen.keys()


async def test_the_environment_is_kept_if_asked_for(admin: Sandbox) -> None:
    env = {"OWN": "1", "OTHER": "2"}
    assert (await admin.exec("sudo -E sh -c 'echo $OWN $OTHER $HOME $USER'", env=env)).stdout == "1 2 /home/user root\n"
    assert (await admin.exec("sudo -EH sh -c 'echo $OWN $HOME'", env=env)).stdout == "1 /root\n"
    assert (await admin.exec("sudo --preserve-env=X,OWN sh -c 'echo $OWN$OTHER'", env=env)).stdout == "1\n"
    assert (await admin.exec("sudo HOME=/x sh -c 'echo $HOME'")).stdout == "/x\n"


async def test_shells_read_each_word_as_it_is(admin: Sandbox) -> None:
    assert (await admin.exec("sudo -s echo 'a  b' '$USER' \"c'd\"")).stdout == "a  b root c'd\n"
    assert (await admin.exec("sudo -i sh -c 'echo $0; id -u'")).stdout.endswith("0\n")
    assert (await admin.exec("sudo -iu user pwd", user="root")).stdout == "/home/user\n"


async def test_masks_and_ignored_signals_are_the_callers(admin: Sandbox) -> None:
    assert (await admin.exec("umask 077; sudo sh -c umask")).stdout.strip() == "0077"
    assert (await admin.exec("umask 0; sudo sh -c umask")).stdout.strip() == "0022"
    line = "trap '' HUP; sudo sh -c 'kill -HUP $$; echo alive'"
    assert (await admin.exec(line)).stdout == "alive\n"


async def test_a_long_request_arrives_in_full_and_one_that_is_too_long_is_refused(admin: Sandbox) -> None:
    line = "a=$(head -c 100000 /dev/zero | tr '\\0' x); sudo sh -c 'echo ${#1} ${#2}' sh $a $a"
    assert (await admin.exec(line)).stdout == "100000 100000\n"
    many = "a=$(head -c 100000 /dev/zero | tr '\\0' x); sudo echo $a $a $a $a $a $a $a $a $a $a $a"
    said = await admin.exec(many)
    assert said.exit_code == 1
    assert "too long" in said.stderr


async def test_a_script_without_an_interpreter_is_run_by_sh(admin: Sandbox) -> None:
    said = await admin.exec("echo 'echo $1; id -u' > /tmp/script; chmod +x /tmp/script; sudo /tmp/script word")
    assert said.stdout == "word\n0\n"


async def test_it_works_in_pipelines_and_many_times_at_once(admin: Sandbox) -> None:
    line = "for i in $(seq 12); do (sudo sh -c 'sleep 0.1; id -u') & done; wait"
    assert (await admin.exec(line, timeout_s=60)).stdout == "0\n" * 12
    assert (await admin.exec("sudo sudo sudo -u user sudo id -u")).stdout == "0\n"


# ---- signals and ends ----


async def test_a_time_out_kills_what_root_started_daemons_too(admin: Sandbox) -> None:
    line = "sudo sh -c 'setsid sleep 31537001 & sleep 31537001'"
    with pytest.raises(ExecTimeout):
        await admin.exec(line, timeout_s=1)
    assert await running(admin, "31537001") == []


async def test_signals_are_passed_on(admin: Sandbox) -> None:
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1"):
        script = f"trap 'echo got; exit 3' {name}; echo ready; while :; do sleep 0.05; done"
        async with await admin.spawn(["sudo", "sh", "-c", script], keep=False) as process:
            await read_until(process, b"ready")
            await process.signal(getattr(signal, f"SIG{name}"))
            assert (await process.wait()).exit_code == 3


async def test_a_client_that_is_killed_takes_its_command_with_it(admin: Sandbox) -> None:
    async with await admin.spawn("sudo sleep 31537002 & wait", keep=False):
        await until_running(admin, "sleep 31537002")
        await admin.exec("kill -9 $(pgrep -f '^sudo sleep 31537002')")
        await wait_tree_exit(admin, "sleep 31537002")


async def test_a_command_that_ignores_the_hang_up_of_a_killed_client_is_killed(admin: Sandbox) -> None:
    line = "sudo sh -c \"trap '' HUP; echo ready; while :; do sleep 31537003; done\" & wait"
    async with await admin.spawn(line, keep=False) as process:
        await read_until(process, b"ready")
        await admin.exec("kill -9 $(pgrep -f '^sudo sh -c trap')")
        await wait_tree_exit(admin, "sleep 31537003")


async def test_a_command_goes_on_when_the_main_process_has_ended(admin: Sandbox) -> None:
    said = await admin.exec("(sudo sh -c 'sleep 0.5; echo later > /root/later') >/dev/null 2>&1 &")
    assert said.exit_code == 0

    async def is_written() -> bool:
        return (await admin.exec("cat /root/later", user="root")).stdout == "later\n"

    await eventually(is_written, "the command of root has gone on")


async def test_a_background_command_outlives_its_client(admin: Sandbox) -> None:
    async with await admin.spawn("sudo -b sleep 31537004; echo $?; sleep 1000", keep=False) as process:
        await read_until(process, b"0\n")
        await until_running(admin, "sleep 31537004")
    await wait_tree_exit(admin, "sleep 31537004")


async def test_limits_hold_for_root_too(engine: Engine, capabilities: Capabilities) -> None:
    if not capabilities.pids_limit or not capabilities.memory_limit:
        pytest.skip("the driver declares no limit on processes or memory")
    async with await engine.create(sudo=True, limits=Limits(pids=30, memory_bytes=128 * MIB)) as sandbox:
        said = await sandbox.exec("sudo sh -c 'for i in $(seq 60); do sleep 5 & done; wait' 2>&1", timeout_s=60)
        assert "fork" in said.stdout.lower() or said.exit_code != 0
        eaten = await sandbox.exec("sudo sh -c 'tail -c 1G /dev/zero | wc -c'; echo after", timeout_s=60)
        assert "after" in eaten.stdout
        assert not eaten.stdout.startswith(str(1024 * MIB))


# ---- terminals ----


async def test_a_terminal_is_the_commands_own(admin: Sandbox, capabilities: Capabilities) -> None:
    command = "sudo sh -c 'tty; stty size; echo ready; read x; echo got $x; id -u'; stty -a"
    async with await admin.spawn(command, pty=(33, 101), keep=False) as process:
        assert b"33 101\r\n" in await read_until(process, b"ready")
        await process.stdin.send(b"typed\n")
        rest = await output_of(process)
        assert b"got typed\r\n0\r\n" in rest
        assert b" icanon" in rest  # ours is as it was


async def test_a_command_that_closes_its_terminal_goes_on(admin: Sandbox) -> None:
    command = "sudo sh -c 'exec <&- >&- 2>&-; sleep 0.5; touch /root/went-on; exit 3'"
    async with await admin.spawn(command, pty=(24, 80), keep=False) as process:
        assert (await process.wait()).exit_code == 3
    assert (await admin.exec("sudo ls /root/went-on")).exit_code == 0


async def test_output_without_end_from_the_background_does_not_hold_the_client(admin: Sandbox) -> None:
    command = "sudo bash -c 'trap \"\" HUP; setsid yes & sleep 0.2; exit 4'"
    async with await admin.spawn(command, pty=(24, 80), keep=False) as process:
        assert (await process.wait()).exit_code == 4
    await admin.exec("sudo pkill -x yes")  # which gVisor does not tell that its terminal is gone
    await wait_tree_exit(admin, "yes")


@pytest.fixture
def terminal_keys(capabilities: Capabilities) -> None:
    if not capabilities.terminal_keys:
        pytest.skip("the driver declares that keys and sizes of terminals have no meaning")


async def test_an_interrupt_key_reaches_the_command(admin: Sandbox, terminal_keys: None) -> None:
    command = ["sudo", "sh", "-c", "trap 'echo got; exit 4' INT; echo ready; while :; do sleep 0.05; done"]
    async with await admin.spawn(command, pty=(24, 80), keep=False) as process:
        await read_until(process, b"ready")
        await process.stdin.send(b"\x03")
        await read_until(process, b"got")
        assert (await process.wait()).exit_code == 4


async def test_a_new_size_reaches_the_command(admin: Sandbox, terminal_keys: None) -> None:
    command = ["sudo", "bash", "-c", "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"]
    async with await admin.spawn(command, pty=(24, 80), keep=False) as process:
        await read_until(process, b"ready")
        await process.resize(44, 122)
        await read_until(process, b"44 122\r\n")


async def test_a_shell_of_root_controls_jobs(admin: Sandbox, terminal_keys: None) -> None:
    async with await admin.spawn(["sudo", "-i"], pty=(24, 80), keep=False) as process:
        await process.stdin.send(b"PS1='R''> '\n")
        await read_until(process, b"R> ")
        await process.stdin.send(b"sh -c 'echo be''gun; exec sleep 31537005'\n")
        await read_until(process, b"begun")
        await until_running(admin, "sleep 31537005")
        await process.stdin.send(b"\x1a")
        await read_until(process, b"Stopped")
        await process.stdin.send(b"kill %1; exit 5\n")
        await process.stdin.send(b"exit 5\n")
        assert (await process.wait()).exit_code == 5
    await wait_tree_exit(admin, "sleep 31537005")


async def test_the_end_of_a_terminal_ends_the_command(admin: Sandbox) -> None:
    async with await admin.spawn(["sudo", "sleep", "31537006"], pty=(24, 80), keep=False):
        await until_running(admin, "sleep 31537006")
    await wait_tree_exit(admin, "sleep 31537006")


# ---- where it goes ----


async def test_forks_checkpoints_and_archives_have_it(engine: Engine, tmp_path: object) -> None:
    async with await engine.create(sudo=True) as sandbox:
        await sandbox.exec("sudo touch /root/mark")
        taken = await sandbox.checkpoint()
        (fork,) = await sandbox.fork()
        later = await engine.create(from_checkpoint=taken.id)
        archive = f"{tmp_path}/sudo.atoll"
        await sandbox.export(archive)
        imported = await engine.import_(archive, name="imported-sudo")
        for each in (fork, later, imported):
            async with each:
                assert each.info.sudo
                assert (await each.exec("sudo ls /root/mark")).stdout == "/root/mark\n"
        await sandbox.sleep()
        await sandbox.wake()
        assert (await sandbox.exec("sudo ls /root/mark")).stdout == "/root/mark\n"
        await engine.delete_checkpoint(taken.id)


async def test_a_sandbox_from_one_without_it_can_have_it(engine: Engine) -> None:
    async with await engine.create() as sandbox:
        taken = await sandbox.checkpoint()
        async with await engine.create(from_checkpoint=taken.id, sudo=True) as later:
            assert (await later.exec("sudo id -u")).stdout == "0\n"
        await engine.delete_checkpoint(taken.id)


async def test_a_warm_sandbox_that_is_claimed_has_it(engine: Engine) -> None:
    await engine.warm(1)
    try:
        async with await engine.create(sudo=True) as sandbox:
            assert (await sandbox.exec("sudo id -u")).stdout == "0\n"
    finally:
        await engine.warm(0)


async def test_saved_processes_go_on_with_it(engine: Engine, capabilities: Capabilities) -> None:
    if not capabilities.memory_checkpoint:
        pytest.skip("the driver declares that processes cannot be saved")
    async with await engine.create(sudo=True) as sandbox:
        line = "sudo sh -c 'while ! test -e /tmp/go; do sleep 0.05; done; exit 6'; echo $?; sudo id -u"
        process = await sandbox.spawn(line)
        await until_running(sandbox, "sudo sh -c while")
        await sandbox.sleep()
        await sandbox.wake()
        again = await sandbox.attach(process.id)
        await sandbox.exec("touch /tmp/go")
        assert await output_of(again) == b"6\n0\n"
