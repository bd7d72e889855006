"""Evaluations of Inspect in sandboxes of Atoll, with a scripted model: what the checks of single calls do not see."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import inspect_ai
import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import bash, python
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironmentSpec,
    SandboxUnavailableError,
    override_sandbox_output_limit,
    sandbox,
)
from pydantic import ValidationError
from yaml import safe_load

import atoll
from atoll.integrations.inspect_ai import AtollSandboxConfig, AtollSandboxEnvironment, AtollService, HostVariable
from atoll.testing.waiting import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "integrations" / "inspect_evaluation.py"
PAGE = EXAMPLE.parents[2] / "docs" / "integrations.md"
with_both = pytest.mark.runtimes("crun", "runsc")


@pytest.fixture
def here(state_dir, monkeypatch):
    """The engines that Inspect opens have the state directory of this test process."""
    monkeypatch.setenv("ATOLL_STATE_DIR", str(state_dir))
    return state_dir


def names(state_dir):
    async def look():
        async with atoll.open(state_dir) as engine:
            await engine.remove_abandoned()
            return [info.name for info in await engine.list()]

    return anyio.run(look)


def scripted(*outputs):
    """A model that answers with these outputs in each sample."""

    def answer(messages, tools, choice, config):
        output = outputs[sum(message.role == "assistant" for message in messages)].model_copy()
        output.usage = ModelUsage()
        return output

    return get_model("mockllm/model", custom_outputs=answer)


def call(tool, **arguments):
    return ModelOutput.for_tool_call("mockllm/model", tool, arguments)


def say(text):
    return ModelOutput.from_content("mockllm/model", text)


def evaluate(tmp_path, task, model=None, **options):
    [log] = inspect_ai.eval(
        task, model=model or scripted(say("done")), log_dir=str(tmp_path), display="none", **options
    )
    return read_eval_log(log.location)


@with_both
def test_samples_run_side_by_side_each_in_its_own_sandbox(here, runtime_name, tmp_path):
    """Files, a setup script, tools, a second sandbox, several samples and epochs."""
    config = AtollSandboxConfig(
        runtime=runtime_name, env={"COLOUR": "blue"}, services={"second": AtollService(runtime=runtime_name)}
    )

    @solver
    def look_around():
        async def solve(state, generate):
            text = await sandbox().read_file("given.txt")
            assert text == state.sample_id, "another sample's file"
            assert await sandbox().read_file("prepared") == "blue\n"
            await sandbox("second").write_file("note", "for the second")
            assert await sandbox("second").read_file("note") == "for the second"
            with pytest.raises(FileNotFoundError):
                await sandbox().read_file("note")
            assert not (await sandbox().exec(["cat", "seen"])).success
            await sandbox().exec(["touch", "seen"])
            return state

        return solve

    samples = [
        Sample("?", id=name, target=name, files={"given.txt": name}, setup="echo $COLOUR > prepared")
        for name in ("one", "two", "three")
    ]
    task = Task(
        dataset=samples,
        epochs=2,
        solver=[look_around(), use_tools(bash(timeout=10), python(timeout=10)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("atoll", config),
    )

    def answer(messages, tools, choice, config):
        told = [message.text.strip() for message in messages if message.role == "tool"]
        output = (
            call("bash", command="cat given.txt"),
            call("python", code="print(open('given.txt').read())"),
            say(told[-1] if told and told[0] == told[-1] else "they differ"),
        )[len(told)]
        output.usage = ModelUsage()
        return output

    log = evaluate(tmp_path, task, get_model("mockllm/model", custom_outputs=answer))
    assert log.status == "success", log.error
    assert [sample.error for sample in log.samples] == [None] * 6
    assert [sample.scores["includes"].value for sample in log.samples] == ["C"] * 6
    assert names(here) == []


@with_both
def test_what_a_command_may_do_and_how_it_fails(here, runtime_name, tmp_path):
    seen = {}

    @solver
    def misuse():
        async def solve(state, generate):
            box = sandbox().as_type(AtollSandboxEnvironment).box
            with pytest.raises(TimeoutError) as timeout:
                await sandbox().exec(["sh", "-c", "echo begun; setsid sleep 987 & sleep 987"], timeout=1)
            assert timeout.value.truncated_output == "begun\n"
            assert "987" not in (await sandbox().exec(["ps", "ax"])).stdout, "it left a process"

            for options in ({"cwd": "/nowhere"}, {"cwd": "/etc/passwd"}, {"cwd": "/root"}, {"user": "nobody-here"}):
                result = await sandbox().exec(["true"], **options)
                assert (result.success, result.returncode) == (False, 126)
                assert next(iter(options.values())) in result.stderr
            assert (await sandbox().exec(["no-such-program"])).returncode == 127
            assert (await sandbox().exec(["sh", "-c", "exit 126"])).returncode == 126
            assert (await sandbox().exec(["id", "-u"], user="0")).stdout == "0\n"
            assert (await sandbox().exec(["printf", r"a\377b"])).stdout == "a\ufffdb"

            with override_sandbox_output_limit(1000):
                assert len((await sandbox().exec(["head", "-c1000", "/dev/zero"])).stdout) == 1000
                with pytest.raises(OutputLimitExceededError):
                    await sandbox().exec(["head", "-c1001", "/dev/zero"])
                await sandbox().exec(["sh", "-c", "head -c1001 /dev/zero > big"])
                with pytest.raises(OutputLimitExceededError):
                    await sandbox().read_file("big", text=False)
            await sandbox().write_file("bytes", b"\xff\r\n")
            with pytest.raises(UnicodeDecodeError):
                await sandbox().read_file("bytes")
            await sandbox().write_file("lines", "a\r\nb\n")
            assert await sandbox().read_file("lines") == "a\r\nb\n"

            with anyio.move_on_after(0.5):
                await sandbox().exec(["sleep", "654"])
            assert "654" not in (await sandbox().exec(["ps", "ax"])).stdout, "a cancelled command goes on"

            connection = await sandbox().connection(user="root")
            assert connection.command == f"atoll shell --user root {box.name}"
            told = subprocess.run(
                [sys.executable, "-m", "atoll", *connection.command.split()[1:]],
                input=b"id -u",
                capture_output=True,
                check=True,
            )
            assert told.stdout == b"0\n"

            await box.destroy()
            for use in (sandbox().exec(["true"]), sandbox().write_file("x", "x"), sandbox().read_file("x")):
                with pytest.raises(SandboxUnavailableError):
                    await use
            with pytest.raises(ConnectionError):
                await sandbox().connection()
            seen["all"] = True
            return state

        return solve

    spec = SandboxEnvironmentSpec("atoll", AtollSandboxConfig(runtime=runtime_name))
    log = evaluate(tmp_path, Task(dataset=[Sample("?")], solver=misuse(), sandbox=spec))
    assert log.status == "success", log.error
    assert seen == {"all": True}
    assert names(here) == []


@with_both
def test_the_tools_that_inspect_puts_into_a_sandbox_work(here, runtime_name, tmp_path):
    """Remote commands, as `bash_session` and `text_editor` use them, through a server inside that runs as root."""
    seen = []

    @solver
    def remote():
        async def solve(state, generate):
            result = await sandbox().exec_remote(["sh", "-c", "echo out; id -un"], stream=False)
            seen.append(result.stdout)
            return state

        return solve

    spec = SandboxEnvironmentSpec("atoll", AtollSandboxConfig(runtime=runtime_name))
    log = evaluate(tmp_path, Task(dataset=[Sample("?")], solver=remote(), sandbox=spec))
    assert log.status == "success", log.error
    assert seen == ["out\nuser\n"]


def test_a_configuration_is_checked_before_a_sample_runs(here, tmp_path, monkeypatch):
    monkeypatch.setenv("EXAMPLE_KEY", "the-value-that-stays-outside")
    yaml = tmp_path / "atoll.yaml"
    yaml.write_text(
        "limits: {memory_bytes: 134217728}\n"
        "network: {allow: [example.com]}\n"
        "secrets: {API_KEY: {variable: EXAMPLE_KEY, hosts: [example.com]}}\n"
    )

    @solver
    def show():
        async def solve(state, generate):
            state.output = say((await sandbox().exec(["sh", "-c", "echo $API_KEY; echo $https_proxy"])).stdout)
            info = sandbox().as_type(AtollSandboxEnvironment).box.info
            state.metadata["memory"] = info.limits.memory_bytes
            return state

        return solve

    log = evaluate(tmp_path, Task(dataset=[Sample("?")], solver=show(), sandbox=("atoll", str(yaml))))
    assert log.status == "success", log.error
    [sample] = log.samples
    assert sample.metadata["memory"] == 128 << 20
    placeholder, proxy = sample.output.completion.split()
    assert "stays-outside" not in placeholder
    assert proxy.startswith("http://")
    assert "stays-outside" not in log.model_dump_json()

    given = AtollSandboxConfig(secrets={"API_KEY": HostVariable(variable="EXAMPLE_KEY", hosts=("example.com",))})
    assert AtollSandboxEnvironment.config_deserialize(json.loads(given.model_dump_json())) == given
    with pytest.raises(ValidationError, match="memory"):
        AtollSandboxConfig(memory="1g")

    monkeypatch.delenv("EXAMPLE_KEY")
    for config, reason in (
        (given, "EXAMPLE_KEY, which is not set"),
        (AtollSandboxConfig(image="tar:/nowhere.tar"), "nowhere.tar"),
        (AtollSandboxConfig(services={"default": AtollService()}), "described by the fields"),
    ):
        with pytest.raises(Exception, match=reason):
            evaluate(tmp_path, Task(dataset=[Sample("?")], sandbox=SandboxEnvironmentSpec("atoll", config)))
    assert names(here) == []


def inspect_program(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "inspect_ai", *arguments], **options)


def test_kept_sandboxes_are_forks_that_the_command_line_destroys(here, tmp_path):
    @solver
    def leave():
        async def solve(state, generate):
            await sandbox().write_file("evidence", "still here")
            return state

        return solve

    log = evaluate(tmp_path, Task(dataset=[Sample("?")], solver=leave(), sandbox="atoll"), sandbox_cleanup=False)
    assert log.status == "success", log.error
    [kept] = names(here)
    told = subprocess.run(
        [sys.executable, "-m", "atoll", "exec", kept, "cat", "evidence"], capture_output=True, check=True
    )
    assert told.stdout == b"still here"
    assert inspect_program("sandbox", "cleanup", "atoll", "another", stderr=subprocess.DEVNULL).wait(60) != 0
    assert names(here) == [kept]
    assert inspect_program("sandbox", "cleanup", "atoll").wait(60) == 0
    assert names(here) == []


WAITING = """
import sys
import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.solver import solver
from inspect_ai.util import sandbox

@solver
def wait():
    async def solve(state, generate):
        print("begun", flush=True)
        await sandbox().exec(["sleep", "1000"])
        return state
    return solve

if __name__ == "__main__":
    task = Task(dataset=[Sample("?")], solver=wait(), sandbox="atoll")
    inspect_ai.eval(task, model="mockllm/model", log_dir=sys.argv[1], display="none")
"""


@pytest.mark.parametrize(
    ("number", "place"), [(signal.SIGINT, "here"), (signal.SIGKILL, "here"), (signal.SIGKILL, "server")]
)
def test_an_evaluation_that_is_interrupted_or_killed_leaves_no_sandbox(
    state_dir, servers, make_state_dir, tmp_path, number, place
):
    environment = {**os.environ, "ATOLL_STATE_DIR": str(state_dir)}
    if place == "server":
        state_dir = make_state_dir()
        server = servers(state_dir)
        environment |= {"ATOLL_URL": server.url, "ATOLL_API_KEY": server.key}
    program = tmp_path / "waiting.py"
    program.write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, program, tmp_path], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert process.stdout.readline() == b"begun\n"
        assert len(ids(state_dir)) == 1
        process.send_signal(number)
        process.stdout.read()
        process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        process.stdout.close()
    wait_until(lambda: ids(state_dir) == [], "its sandbox has ended")


def ids(state_dir):
    """All sandboxes of a state directory, also those that are ephemeral and not removed yet."""

    async def look():
        async with atoll.open(state_dir) as engine:
            await engine.remove_abandoned()
        return [entry.name for entry in (state_dir / "sandboxes").iterdir()]

    return anyio.run(look)


def test_the_example_runs_offline(here, capsys):
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == "success: the sandbox answered ['b.txt\\n']; the score is C\n"


def test_the_page_is_true(here, tmp_path, monkeypatch):
    section = PAGE.read_text().partition("\n## Inspect\n")[2].partition("\n## ")[0]
    [snippet] = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    names = {"__name__": "page"}
    exec(snippet, names)
    assert names["count_lines"]().sandbox.config == names["CONFIG"]
    [yaml] = re.findall(r"```yaml\n(.*?)```", section, flags=re.DOTALL)
    (tmp_path / "atoll.yaml").write_text(yaml)
    monkeypatch.setenv("EXAMPLE_KEY", "the-value-that-stays-outside")
    (tmp_path / "task.py").write_text(BESIDE_A_CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    [log] = inspect_ai.eval("task.py", model=scripted(say("done")), log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.eval.sandbox.config.endswith("atoll.yaml")
    assert AtollSandboxConfig.model_validate(safe_load(yaml)) == names["CONFIG"]


BESIDE_A_CONFIGURATION = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import solver
from inspect_ai.util import sandbox

@solver
def look():
    async def solve(state, generate):
        assert (await sandbox("target").exec(["id", "-u"])).stdout == "0\\n"
        return state
    return solve

@task
def beside():
    return Task(dataset=[Sample("?")], solver=look(), sandbox="atoll")
"""
