"""`Sandbox.exec` and `exec_bytes`: one command, to its end."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from atoll import (
    Engine,
    ExecResult,
    ExecTimeout,
    InvalidRequest,
    Output,
    PathNotDirectory,
    PathNotFound,
    PermissionDenied,
    Sandbox,
    SandboxDied,
    Truncation,
    UserNotFound,
)
from atoll.contract.inside import EGRESS_PORT
from atoll.contract.model import RuntimeName
from atoll.testing.inside import Peak, keeper_pid, running, until_running, wait_tree_exit
from atoll.testing.waiting import eventually

MIB = 1024 * 1024


# ---- what is run ----


@pytest.mark.core
async def test_a_string_is_a_line_for_the_shell(shared: Sandbox) -> None:
    result = await shared.exec("x=40; echo $((x + 2)) | tr 4 5; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("52\n", "", 3)


@pytest.mark.core
async def test_a_sequence_is_a_program_and_its_arguments_untouched(shared: Sandbox) -> None:
    arguments = ["a b", "$HOME", "*", ";", "", "it's", '"', "\\n", "línea\nzwei", "-n"]
    result = await shared.exec(["printf", "%s|", *arguments])
    assert result.stdout == "".join(f"{argument}|" for argument in arguments)


async def test_an_argument_that_is_not_utf8_arrives_as_its_bytes(shared: Sandbox) -> None:
    result = await shared.exec_bytes(["printf", "%s", os.fsdecode(b"\xff\xfe")])
    assert result.stdout == b"\xff\xfe"


@pytest.mark.parametrize("command", ["", "  \n", [], [""], "echo \0", ["echo", "\0"]], ids=repr)
async def test_a_command_that_cannot_be_one_is_an_invalid_request(shared: Sandbox, command: str | list[str]) -> None:
    with pytest.raises(InvalidRequest):
        await shared.exec(command)


async def test_a_command_too_long_to_send_is_an_invalid_request_that_names_a_way_out(shared: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="stdin"):
        await shared.exec(["echo", "x" * 300_000])
    assert (await shared.exec(["echo", "still here"])).ok


async def test_a_command_of_a_hundred_kilobytes_is_fine(shared: Sandbox) -> None:
    text = "y" * 100_000
    assert (await shared.exec(f"echo {text} | wc -c")).stdout.strip() == "100001"


# ---- how it ends ----


@pytest.mark.core
async def test_a_non_zero_exit_is_a_value(shared: Sandbox) -> None:
    result = await shared.exec(["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (result.exit_code, result.signal, result.ok) == (7, None, False)
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert not result.timed_out
    assert not result.out_of_memory


@pytest.mark.core
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
async def test_death_by_signal_n_is_128_plus_n_and_says_the_signal(shared: Sandbox, number: signal.Signals) -> None:
    result = await shared.exec(["sh", "-c", f"kill -{int(number)} $$"])
    assert (result.exit_code, result.signal) == (128 + number, number)


async def test_a_program_that_exits_with_a_code_above_128_was_not_signalled(shared: Sandbox) -> None:
    result = await shared.exec(["sh", "-c", "exit 137"])
    assert (result.exit_code, result.signal) == (137, None)


@pytest.mark.core
@pytest.mark.parametrize("command", ["no-such-program", ["no-such-program"], ["/no/such/program"]], ids=repr)
async def test_a_program_that_does_not_exist_is_127_with_a_line_on_stderr(
    shared: Sandbox, command: str | list[str]
) -> None:
    result = await shared.exec(command)
    assert result.exit_code == 127
    assert "no-such-program" in result.stderr or "/no/such/program" in result.stderr
    assert result.stderr.endswith("\n")


@pytest.mark.core
@pytest.mark.parametrize("command", [["/etc/passwd"], "/etc/passwd", ["/etc"]], ids=repr)
async def test_something_that_cannot_be_run_is_126_with_a_line_on_stderr(
    shared: Sandbox, command: str | list[str]
) -> None:
    result = await shared.exec(command)
    assert result.exit_code == 126
    assert "/etc" in result.stderr


async def test_duration_is_that_of_the_command(shared: Sandbox) -> None:
    began = time.monotonic()
    result = await shared.exec(["sleep", "0.3"])
    assert 0.3 <= result.duration_s <= time.monotonic() - began


@pytest.mark.core
async def test_exec_returns_when_its_main_process_ends_though_a_child_holds_stdout(shared: Sandbox) -> None:
    with anyio.fail_after(20):
        result = await shared.exec("sleep 31536000 & echo done")
    assert (result.stdout, result.exit_code) == ("done\n", 0)
    # The child still runs: a command that exits by itself kills no other process.
    await until_running(shared, "sleep 31536000")
    [left] = [process for process in await shared.processes() if process.live and "31536000" in process.command]
    assert left.exit_code == 0
    await shared.kill(left.id)
    await wait_tree_exit(shared, "sleep 31536000")


async def test_all_that_the_main_process_wrote_is_there_when_it_ends(
    shared: Sandbox, runtime_name: RuntimeName
) -> None:
    """The command exits with all output still in the pipe: a result that is sent too early loses the end of it."""
    async with anyio.create_task_group() as group:

        async def one() -> None:
            result = await shared.exec_bytes("(sleep 31536600 &) ; head -c 60000 /dev/zero; printf end")
            assert result.stdout == bytes(60000) + b"end"

        for _ in range(20 if runtime_name != "runsc" else 5):
            group.start_soon(one)
    for process in await shared.processes():
        if process.live:
            await shared.kill(process.id)
    await wait_tree_exit(shared, "sleep 31536600")


# ---- input ----


@pytest.mark.core
async def test_without_stdin_a_command_reads_an_end_of_file(shared: Sandbox) -> None:
    with anyio.fail_after(20):
        assert (await shared.exec("cat; test -t 0 || echo no terminal")).stdout == "no terminal\n"
        assert (await shared.exec(["cat"], stdin=b"")).stdout == ""


async def test_text_on_stdin_is_utf8(shared: Sandbox) -> None:
    assert (await shared.exec_bytes(["cat"], stdin="naïve €")).stdout == "naïve €".encode()


@pytest.mark.core
async def test_ten_megabytes_on_stdin_arrive_whole(shared: Sandbox) -> None:
    data = os.urandom(10 * MIB)
    result = await shared.exec(["sha256sum"], stdin=data)
    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()


async def test_ten_megabytes_through_a_command_do_not_deadlock(shared: Sandbox) -> None:
    """Input is not read before output is, and the other way round: both must be transferred at once."""
    data = os.urandom(10 * MIB)
    with anyio.fail_after(60):
        result = await shared.exec_bytes(["cat"], stdin=data)
    assert result.stdout == data
    assert result.stdout_truncation is None


@pytest.mark.parametrize("command", ["true", "exec <&-; echo closed", "head -c 3"])
async def test_a_command_need_not_read_its_stdin(shared: Sandbox, command: str) -> None:
    with anyio.fail_after(20):
        result = await shared.exec(command, stdin=bytes(4 * MIB))
    assert result.exit_code == 0


# ---- output ----


async def test_characters_that_are_split_over_frames_stay_whole(shared: Sandbox) -> None:
    """Three bytes each, so that every power of two falls into one; shifted by one and two bytes."""
    for before in ("", "a", "ab"):
        result = await shared.exec(f"printf '%s' {before}; yes € | tr -d '\\n' | head -c 600000")
        assert result.stdout == before + "€" * 200_000


async def test_a_character_that_is_written_byte_by_byte_stays_whole(shared: Sandbox) -> None:
    result = await shared.exec(r"for byte in 342 202 254; do printf \\$byte; sleep 0.02; done")
    assert result.stdout == "€"


async def test_bytes_that_are_not_utf8_become_replacement_characters_in_text_and_stay_in_bytes(shared: Sandbox) -> None:
    command = r"printf 'a\377b\n'; printf '\376' >&2"
    result = await shared.exec(command)
    assert (result.stdout, result.stderr) == ("a�b\n", "�")
    raw = await shared.exec_bytes(command)
    assert (raw.stdout, raw.stderr) == (b"a\xffb\n", b"\xfe")


async def test_carriage_returns_and_nuls_are_left_alone(shared: Sandbox) -> None:
    assert (await shared.exec(r"printf 'a\r\nb\rc\0d\n'")).stdout == "a\r\nb\rc\0d\n"


@pytest.mark.core
async def test_output_within_the_limit_is_not_cut(shared: Sandbox) -> None:
    result = await shared.exec_bytes("seq 1 10000", output_limit_bytes=48894)
    assert len(result.stdout) == 48894
    assert result.stdout_truncation is None
    assert result.stderr_truncation is None


@pytest.mark.core
@pytest.mark.parametrize("limit", [0, 1, 1000, 48893])
async def test_output_over_the_limit_keeps_head_and_tail_and_says_exactly_what_is_missing(
    shared: Sandbox, limit: int
) -> None:
    whole = "".join(f"{number}\n" for number in range(1, 10001)).encode()
    result = await shared.exec_bytes("seq 1 10000; echo short >&2", output_limit_bytes=limit)
    cut = result.stdout_truncation
    assert cut is not None
    assert cut.total == len(whole) == 48894
    assert cut.bytes == len(whole) - limit
    assert len(result.stdout) == limit
    assert result.stdout == whole[: cut.start] + whole[cut.end :]
    assert abs(cut.start - (cut.total - cut.end)) <= 1, "head and tail have the same size"


async def test_the_limit_is_for_each_stream(shared: Sandbox) -> None:
    result = await shared.exec_bytes("printf 0123456789; printf abcdefghij >&2", output_limit_bytes=4)
    assert (result.stdout, result.stdout_truncation) == (b"0189", Truncation(start=2, end=8, total=10))
    assert (result.stderr, result.stderr_truncation) == (b"abij", Truncation(start=2, end=8, total=10))


async def test_text_that_was_cut_has_one_line_that_says_so(shared: Sandbox) -> None:
    result = await shared.exec("seq 1 10000", output_limit_bytes=1000)
    assert result.stdout_truncation is not None
    head, line, tail = result.stdout[:500], result.stdout[500:-500], result.stdout[-500:]
    assert head.startswith("1\n2\n3\n")
    assert tail.endswith("9999\n10000\n")
    assert len(line.strip("\n").splitlines()) == 1
    cut = result.stdout_truncation
    for number in (cut.bytes, cut.start, cut.end, cut.total):
        assert str(number) in line


async def test_text_is_never_cut_within_a_character(shared: Sandbox) -> None:
    for limit in range(20, 26):
        result = await shared.exec("yes € | tr -d '\\n' | head -c 300", output_limit_bytes=limit)
        assert "�" not in result.stdout
        assert result.stdout_truncation is not None
        kept = "".join(result.stdout.splitlines()[0::2])
        assert len(kept.encode()) == result.stdout_truncation.total - result.stdout_truncation.bytes


async def test_a_hundred_megabytes_of_output_pass_with_flat_memory(
    sandbox: Sandbox, state_dir: Path, runtime_name: RuntimeName
) -> None:
    assert sandbox.info.pid is not None
    await sandbox.exec_bytes("head -c 1000000 /dev/zero", output_limit_bytes=65536)
    peaks = {"this process": Peak(os.getpid())}
    if os.geteuid() == 0:
        peaks["the keeper"] = Peak(keeper_pid(state_dir, sandbox))
        if runtime_name != "runsc":  # there its first process is gVisor's kernel, whose caches are its own business
            peaks["the guest"] = Peak(sandbox.info.pid)
    result = await sandbox.exec_bytes("head -c 100000000 /dev/zero", output_limit_bytes=65536)
    assert result.stdout_truncation is not None
    assert result.stdout_truncation.total == 100_000_000
    grown = {who: peak.growth_bytes // MIB for who, peak in peaks.items()}
    assert all(growth < 16 for growth in grown.values()), grown


# ---- time-outs and cancellation ----


@pytest.mark.core
async def test_a_time_out_raises_with_what_was_printed_so_far(shared: Sandbox) -> None:
    with pytest.raises(ExecTimeout) as caught:
        await shared.exec("echo before; echo trouble >&2; sleep 31536001; echo after", timeout_s=0.5)
    assert isinstance(caught.value, TimeoutError)
    result = caught.value.result
    assert isinstance(result, ExecResult)
    assert result.timed_out
    assert (result.stdout, result.stderr) == ("before\n", "trouble\n")
    assert result.exit_code == 137
    assert result.duration_s > 0.4
    assert not result.out_of_memory


async def test_a_time_out_of_exec_bytes_has_its_output_as_text_too(shared: Sandbox) -> None:
    with pytest.raises(ExecTimeout) as caught:
        await shared.exec_bytes("printf 'a\\377'; exec sleep 31536002", timeout_s=0.5)
    assert caught.value.result.stdout == "a�"


STUBBORN = {
    "plain": "echo ready; sleep 31536100",
    "pipeline": "echo ready; sleep 31536101 | cat | cat",
    "background": "sleep 31536102 & echo ready; wait",
    "ignores signals": "trap '' TERM INT HUP QUIT; echo ready; while :; do sleep 31536103; done",
    "daemon": "setsid sh -c '(setsid sleep 31536104 >/dev/null 2>&1 </dev/null &)' & echo ready; sleep 31536104",
    "daemon that closed everything": (
        "(cd / && exec setsid sh -c 'exec 0<&- 1>&- 2>&-; (sleep 31536105 &) ; exec sleep 31536105' &) ; "
        "echo ready; sleep 31536105"
    ),
    "stopped": "sh -c 'echo ready; kill -STOP $$; sleep 31536106'; sleep 31536106",
    "stopped daemon": "(setsid sh -c 'kill -STOP $$; sleep 31536107' &) ; echo ready; sleep 31536107",
    "forks while it is killed": "echo ready; while :; do (setsid sleep 31536108 &); sleep 0.01; done",
}


@pytest.mark.core
async def test_a_time_out_kills_the_whole_tree_however_it_hides(shared: Sandbox) -> None:
    survived: dict[str, str] = {}

    async def one(kind: str, command: str) -> None:
        try:
            result = await shared.exec(command, timeout_s=1.5)
            survived[kind] = f"ended by itself: {result}"
        except ExecTimeout as error:
            if "ready" not in error.result.stdout:
                survived[kind] = "did not get to its point; the test proves nothing"

    async with anyio.create_task_group() as group:
        for kind, command in STUBBORN.items():
            group.start_soon(one, kind, command)
    left = {process.command for process in await shared.ps() if "315361" in process.command and process.state != "Z"}
    assert not survived
    assert not left, f"processes left after exec raised: {left}"
    live = [process.command for process in await shared.processes() if process.live]
    assert not live


async def test_a_time_out_kills_only_its_own_tree(shared: Sandbox) -> None:
    async with await shared.spawn("exec sleep 31536200", keep=False) as other:
        with pytest.raises(ExecTimeout):
            await shared.exec("sleep 31536201", timeout_s=0.2)
        assert [process.pid for process in await running(shared, "sleep 31536200")] == [other.pid]


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
async def test_a_time_limit_that_is_none_is_an_invalid_request(shared: Sandbox, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest):
        await shared.exec("true", timeout_s=timeout_s)


async def test_a_command_that_ends_in_time_is_not_touched_by_its_limit(shared: Sandbox) -> None:
    result = await shared.exec("echo fine", timeout_s=60)
    assert (result.stdout, result.exit_code, result.timed_out) == ("fine\n", 0, False)


@pytest.mark.core
@pytest.mark.cancels
async def test_cancelling_an_exec_kills_its_whole_tree(shared: Sandbox) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(shared.exec, "(setsid sleep 31536300 &) ; sh -c 'sleep 31536300; true'; true")

        async def both() -> bool:
            return len(await running(shared, "sleep 31536300")) >= 3

        with anyio.fail_after(20):
            while not await both():
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert not await running(shared, "31536300"), "processes of a cancelled exec still run"


@pytest.mark.cancels
async def test_cancelling_an_exec_that_is_still_being_sent_its_input_kills_it(shared: Sandbox) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: shared.exec("exec sleep 31536301", stdin=bytes(4 * MIB)))
        await until_running(shared, "sleep 31536301")
        group.cancel_scope.cancel()
    assert not await running(shared, "sleep 31536301")


# ---- many at once ----


@pytest.mark.core
async def test_two_hundred_commands_at_once_each_get_their_own_output(
    shared: Sandbox, runtime_name: RuntimeName
) -> None:
    many = 200 if runtime_name != "runsc" else 40  # gVisor takes 50 threads of the host for each, and keeps them
    results: dict[int, ExecResult] = {}

    async def one(number: int) -> None:
        results[number] = await shared.exec(["sh", "-c", f"cat; echo out {number}; echo err {number} >&2"], stdin="in ")

    with anyio.fail_after(100):
        async with anyio.create_task_group() as group:
            for number in range(many):
                group.start_soon(one, number)
    assert len(results) == many
    for number, result in results.items():
        assert (result.stdout, result.stderr) == (f"in out {number}\n", f"err {number}\n")


@pytest.mark.cancels
async def test_a_command_that_floods_does_not_hold_up_others(shared: Sandbox) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: shared.exec("yes 31536400", output_limit_bytes=1000))
        await until_running(shared, "yes 31536400")
        with anyio.fail_after(20):
            for number in range(20):
                assert (await shared.exec(["echo", str(number)])).stdout == f"{number}\n"
        group.cancel_scope.cancel()


# ---- environment, directory, user ----


@pytest.fixture(scope="module")
async def with_env(engine: Engine) -> AsyncIterator[Sandbox]:
    async with await engine.create(env={"FIXED": "from the sandbox", "CHANGED": "before"}) as sandbox:
        yield sandbox


@pytest.mark.core
async def test_a_commands_environment_goes_on_top_of_the_sandboxs(with_env: Sandbox) -> None:
    line = 'echo "$FIXED/$CHANGED/$OWN"'
    assert (await with_env.exec(line)).stdout == "from the sandbox/before/\n"
    result = await with_env.exec(line, env={"CHANGED": "after\n=", "OWN": "mine"})
    assert result.stdout == "from the sandbox/after\n=/mine\n"
    assert (await with_env.exec(line)).stdout == "from the sandbox/before/\n"


@pytest.mark.core
async def test_every_command_knows_its_user_home_and_path_and_nothing_of_the_host(
    shared: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_TEST_SECRET", "of the host")
    lines = (await shared.exec(["env"])).stdout.splitlines()
    env = dict(line.split("=", 1) for line in lines)
    assert (env["HOME"], env["USER"], env["LOGNAME"]) == ("/home/user", "user", "user")
    assert "/usr/bin" in env["PATH"].split(":")
    assert env["SHELL"].startswith("/")
    assert "ATOLL_TEST_SECRET" not in env
    of_the_proxy = {name for name in env if name.lower().endswith("_proxy")}
    assert {env[name] for name in of_the_proxy} <= {f"http://127.0.0.1:{EGRESS_PORT}", "localhost,127.0.0.1,::1"}
    assert set(env) - of_the_proxy <= {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "PWD", "SHLVL", "_"}


@pytest.mark.parametrize("env", [{"1A": "x"}, {"A-B": "x"}, {"": "x"}, {"A=B": "x"}, {"A": "x\0y"}], ids=repr)
async def test_an_environment_that_no_process_can_have_is_an_invalid_request(
    shared: Sandbox, env: dict[str, str]
) -> None:
    with pytest.raises(InvalidRequest):
        await shared.exec("true", env=env)


@pytest.mark.core
async def test_a_command_starts_in_the_users_home_or_where_it_is_told(shared: Sandbox) -> None:
    assert (await shared.exec("pwd")).stdout == "/home/user\n"
    assert (await shared.exec("pwd", user="root")).stdout == "/root\n"
    assert (await shared.exec("pwd", cwd="/usr/bin")).stdout == "/usr/bin\n"
    await shared.files.mkdir("below/there")
    assert (await shared.exec("pwd", cwd="below/there")).stdout == "/home/user/below/there\n"
    await shared.files.remove("below", recursive=True)


async def test_a_directory_that_is_none_is_an_error_and_not_an_exit_code(shared: Sandbox) -> None:
    with pytest.raises(PathNotFound) as caught:
        await shared.exec("echo ran", cwd="/no/such")
    assert caught.value.path == "/no/such"
    with pytest.raises(PathNotDirectory):
        await shared.exec("echo ran", cwd="/etc/passwd")


async def test_a_directory_that_the_user_may_not_enter_is_denied(shared: Sandbox, single_id: bool) -> None:
    if single_id:
        pytest.skip("with one id for all, the user is root")
    with pytest.raises(PermissionDenied):
        await shared.exec("echo ran", cwd="/root")


@pytest.mark.core
async def test_commands_run_as_user_and_as_root_on_request(shared: Sandbox, single_id: bool, user_id: int) -> None:
    assert (await shared.exec("id -u; id -g")).stdout == f"{user_id}\n{user_id}\n"
    result = await shared.exec("id -u; id -g; echo $HOME; echo $USER", user="root")
    assert result.stdout == "0\n0\n/root\nroot\n"
    if not single_id:
        assert (await shared.exec("id -un; id -gn")).stdout == "user\nuser\n"
        assert (await shared.exec("id -u", user="1000")).stdout == "1000\n"
        assert (await shared.exec("id -u; id -g", user="12345:23456")).stdout == "12345\n23456\n"


async def test_a_user_who_does_not_exist_is_an_invalid_request(shared: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="no-such-user"):
        await shared.exec("echo ran", user="no-such-user")


# ---- a sandbox that dies ----


@pytest.mark.core
async def test_a_dead_sandbox_raises_and_never_returns_output(engine: Engine, sandbox: Sandbox) -> None:
    pid = sandbox.info.pid
    assert pid is not None
    told: list[SandboxDied] = []

    async def one() -> None:
        with pytest.raises(SandboxDied) as caught:
            await sandbox.exec("echo half; exec sleep 31536500")
        told.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await until_running(sandbox, "sleep 31536500")
        os.kill(pid, signal.SIGKILL)
    assert isinstance(told[0], ConnectionError)
    with pytest.raises(SandboxDied):
        await sandbox.exec("echo again")
    with pytest.raises(SandboxDied):
        await sandbox.files.read_bytes("/etc/passwd")

    async def noticed() -> bool:
        [info] = [info for info in await engine.list() if info.name == sandbox.name]
        return info.status == "error" and bool(info.reason) and info.pid is None

    await eventually(noticed, "it is listed as dead, with a reason")


@pytest.mark.parametrize("size", [131_071, 131_072, 300_000, 1_500_000])
async def test_a_shell_line_may_be_longer_than_an_argument(shared: Sandbox, size: int) -> None:
    line = "x='%s'; echo ${#x} $#; ls /proc/self/fd | wc -l; cat; false; exit 3\n# end \\"
    result = await shared.exec(line % ("y" * (size - len(line) + 2)), stdin="in\n")
    plain = await shared.exec(line % "y", stdin="in\n")
    assert result.stdout == plain.stdout.replace("1 0\n", f"{size - len(line) + 2} 0\n", 1)
    assert (result.exit_code, result.stderr) == (3, plain.stderr)
    assert (await shared.exec("false #" + "y" * size)).exit_code == 1
    assert (await shared.exec("echo $0")).stdout == (await shared.exec("echo $0 #" + "y" * size)).stdout


async def test_a_long_shell_line_can_be_spawned_with_channels_and_a_terminal(shared: Sandbox) -> None:
    line = "echo $0; cat <&3; exit 4 #" + "y" * 400_000
    async with await shared.spawn(line, channels=1, keep=False) as process:
        channel = process.channel(0)
        await channel.send(b"through the channel\n")
        await channel.send_eof()
        output = b"".join([event.data async for event in process if isinstance(event, Output)])
        assert output.endswith(b"through the channel\n")
        assert (await process.wait()).exit_code == 4
    async with await shared.spawn("test -t 0 && echo yes #" + "y" * 400_000, pty=(24, 80), keep=False) as process:
        assert b"yes" in b"".join([event.data async for event in process if isinstance(event, Output)])
    with pytest.raises(InvalidRequest, match="may have 6"):
        await shared.spawn(line, channels=7)


async def test_a_long_shell_line_is_killed_when_its_time_is_over(shared: Sandbox) -> None:
    with pytest.raises(ExecTimeout):
        await shared.exec("sleep 31536000 #" + "y" * 400_000, timeout_s=0.5)


async def test_arguments_may_take_together_what_linux_takes(shared: Sandbox) -> None:
    some = ["it's", "", "new\nline", "$HOME", "*", *["z" * 100_000] * 15]
    code = "import hashlib, sys; print(len(sys.argv), hashlib.sha256('|'.join(sys.argv[1:]).encode()).hexdigest())"
    result = await shared.exec(["python3", "-c", code, *some])
    digest = hashlib.sha256("|".join(some).encode()).hexdigest()
    assert result.stdout == f"{len(some) + 1} {digest}\n"
    assert (await shared.exec(["/no/such", *some])).exit_code == 127


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        (["echo", "x" * 131_072], "131071"),
        (["echo", "ü" * 65_536], "131071"),
        (["echo", *["x" * 100_000] * 30], "2097152"),
        ("echo " + "x" * 3_000_000, "2097152"),
    ],
    ids=["an argument", "an argument of wide characters", "arguments", "a line"],
)
async def test_what_is_too_long_is_refused_with_the_limit(
    shared: Sandbox, command: str | list[str], limit: str
) -> None:
    with pytest.raises(InvalidRequest, match=limit):
        await shared.exec(command)


async def test_an_unknown_user_is_an_error_of_its_own(shared: Sandbox) -> None:
    for operation in (
        lambda: shared.exec("true", user="no-such-user"),
        lambda: shared.spawn("true", user="no-such-user"),
        lambda: shared.files.read_bytes("/etc/passwd", user="no-such-user"),
    ):
        with pytest.raises(UserNotFound, match="'no-such-user'") as caught:
            await operation()
        assert isinstance(caught.value, InvalidRequest)
        assert caught.value.to_dict()["details"] == {"user": "no-such-user"}


async def test_stderr_can_be_part_of_stdout_in_the_order_of_writing(shared: Sandbox) -> None:
    line = "for i in 1 2 3 4 5 6 7 8 9; do echo out $i; echo err $i >&2; done; exit 3"
    expected = "".join(f"out {i}\nerr {i}\n" for i in range(1, 10))
    for command in (line, ["sh", "-c", line], line + " #" + "y" * 200_000):
        result = await shared.exec(command, merge_stderr=True)
        assert (result.stdout, result.stderr, result.exit_code) == (expected, "", 3)
    raw = await shared.exec_bytes(["no-such-program"], merge_stderr=True)
    assert (raw.stdout, raw.stderr, raw.exit_code) == (b"no-such-program: command not found\n", b"", 127)
    async with await shared.spawn(line, merge_stderr=True, keep=False) as process:
        events = [event async for event in process if isinstance(event, Output)]
    assert {event.stream for event in events} == {"stdout"}
    assert b"".join(event.data for event in events).decode() == expected


async def test_output_is_passed_on_while_the_command_runs(shared: Sandbox) -> None:
    out: list[str] = []
    err: list[str] = []
    async with anyio.create_task_group() as group:

        async def let_go_on() -> None:
            await eventually(lambda: "".join(out) == "käse 1\n", "the first piece has come")
            await shared.files.write_text("go-on", "")

        group.start_soon(let_go_on)
        line = "echo käse 1; until [ -e ~/go-on ]; do sleep 0.01; done; rm ~/go-on; echo 2; echo err >&2"
        result = await shared.exec(line, timeout_s=20, on_stdout=out.append, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == (result.stdout, result.stderr) == ("käse 1\n2\n", "err\n")


async def test_a_character_that_is_split_between_two_writes_is_passed_on_whole(shared: Sandbox) -> None:
    out: list[str] = []
    await shared.exec(r"printf '\303'; sleep 0.1; printf '\244 \303'", on_stdout=out.append)
    assert "".join(out) == "ä �"


async def test_a_callback_that_raises_kills_the_command_and_the_caller_gets_what_it_raised(shared: Sandbox) -> None:
    def full(_: str) -> None:
        raise OverflowError("enough")

    with pytest.raises(OverflowError, match="enough"):
        await shared.exec("echo x; exec sleep 31536411", on_stdout=full)
    assert not any("31536411" in process.command for process in await shared.ps())
    assert (await shared.exec("echo fine")).stdout == "fine\n"
