"""The code interpreter, through the newest SDK of it: results, charts, contexts, streaming, errors, time-outs."""

from __future__ import annotations

import sysconfig
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest
from e2b import InvalidArgumentException, NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.charts import BoxAndWhiskerChart, LineChart, SuperChart

import atoll.sync
from atoll import Mount
from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S


@pytest.fixture(scope="module")
def box(server: RunningServer) -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=600, api_key=server.key, api_url=server.url, sandbox_url=server.url)
    yield made
    made.kill()


def test_a_value_is_a_result_and_variables_stay(box: Sandbox) -> None:
    assert box.get_info().template_id == "code-interpreter-v1"
    box.run_code("x = 20")
    ran = box.run_code("print('out'); import sys; print('err', file=sys.stderr); x + 22")
    assert ran.text == "42"
    assert (ran.logs.stdout, ran.logs.stderr) == (["out\n"], ["err\n"])
    assert ran.execution_count == 2
    assert box.run_code("'a text'").text == "a text"


def test_rich_results_have_their_forms(box: Sandbox) -> None:
    code = """
class Rich:
    def _repr_html_(self): return "<b>bold</b>"
    def _repr_markdown_(self): return "**bold**"
    def _repr_json_(self): return {"a": 1}
display(Rich())
Rich()
"""
    shown, last = box.run_code(code).results
    assert (shown.is_main_result, last.is_main_result) == (False, True)
    assert (shown.html, shown.markdown, shown.json) == ("<b>bold</b>", "**bold**", {"a": 1})


def test_an_error_has_a_name_a_value_and_a_traceback(box: Sandbox) -> None:
    error = box.run_code("1 / 0").error
    assert error is not None
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "1 / 0" in error.traceback or "line 1" in error.traceback


def test_output_and_results_come_while_the_code_runs(box: Sandbox) -> None:
    came: list[tuple[str, float]] = []
    code = "import time\nprint('first', flush=True)\ndisplay(1)\ntime.sleep(1)\nprint('second')"
    box.run_code(
        code,
        on_stdout=lambda message: came.append((message.line, time.monotonic())),
        on_result=lambda result: came.append((result.text or "", time.monotonic())),
    )
    assert [text.strip() for text, _ in came if text.strip() != "1"] == ["first", "second"]
    assert came[-1][1] - came[0][1] > 0.5


def test_a_time_out_interrupts_the_code_and_variables_stay(box: Sandbox) -> None:
    box.run_code("kept = 5")
    with pytest.raises(TimeoutException):
        box.run_code("import time; time.sleep(1000)", timeout=1)
    assert box.run_code("kept").text == "5"


def test_contexts_have_variables_and_a_directory_of_their_own(box: Sandbox) -> None:
    box.run_code("mine = 1")
    context = box.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert box.run_code("import os; os.getcwd()", context=context).text == "/tmp"
    failed = box.run_code("mine", context=context).error
    assert failed is not None
    assert failed.name == "NameError"
    box.run_code("other = 2", context=context)
    box.restart_code_context(context)
    assert box.run_code("'other' in globals()", context=context).text == "False"
    assert context.id in [each.id for each in box.list_code_contexts()]
    assert {"python", "javascript"} <= {each.language for each in box.list_code_contexts()}
    box.remove_code_context(context)
    with pytest.raises(NotFoundException):
        box.run_code("1", context=context)


def test_other_languages_run_or_say_that_they_do_not(box: Sandbox) -> None:
    assert box.run_code("echo $((1 + 1))", language="bash").logs.stdout == ["2\n"]
    typed = box.run_code("const x: number = 1", language="ts")
    assert typed.error is None or "Write JavaScript instead" in typed.error.value
    assert box.create_code_context(language="typescript").language == "typescript"
    for language in ("r", "java", "deno"):
        with pytest.raises(SandboxException, match="not supported"):
            box.run_code("1", language=language)
    with pytest.raises(InvalidArgumentException):
        box.run_code("1", language="python", context=box.create_code_context())


def test_code_whose_sandbox_is_killed_says_so(server: RunningServer) -> None:
    made = Sandbox.create(timeout=60)
    killing = threading.Thread(target=made.kill)
    with pytest.raises(TimeoutException, match="sandbox was killed while the request was in progress"):
        made.run_code("print('begun', flush=True); import time; time.sleep(1000)", on_stdout=lambda _: killing.start())
    killing.join(BOUND_S)


def test_contexts_of_a_sandbox_without_public_ports_need_its_traffic_token(server: RunningServer) -> None:
    made = Sandbox.create(timeout=60, network={"allow_public_traffic": False})
    context = made.create_code_context()
    assert context.id in [each.id for each in made.list_code_contexts()]
    assert made.run_code("1 + 1", context=context).text == "2"
    made.kill()


def test_code_may_be_indented_and_runs_in_the_environment_of_e2b(box: Sandbox) -> None:
    code = """
    import os
    os.environ["E2B_SANDBOX_ID"]
    """
    assert box.run_code(code).text == box.sandbox_id


def test_variables_of_one_execution_end_with_it(box: Sandbox) -> None:
    code = "import os; os.environ.get('ONLY')"
    assert box.run_code(code, envs={"ONLY": "now"}).text == "now"
    assert box.run_code(code).text is None


def test_charts_are_data(server: RunningServer) -> None:
    """In a sandbox that another program made, with the packages of these tests."""
    packages = Mount(source=sysconfig.get_paths()["platlib"], target="/opt/packages")
    with atoll.sync.open(state_dir=server.state_dir) as engine:
        made = engine.create(mounts=[packages], env={"PYTHONPATH": "/opt/packages"})
    box = Sandbox.connect(made.id.replace("-", ""))
    code = """
import matplotlib.pyplot as plt
plt.plot([1, 2], [3, 4], label="a"); plt.title("T"); plt.xlabel("time (s)"); plt.show()
plt.boxplot([1, 2, 3, 9]); plt.show()
fig, axes = plt.subplots(1, 2); axes[0].bar(["a"], [1]); axes[1].pie([1, 2]); plt.show()
"""
    line, boxes, several = box.run_code(code).results
    (image,) = box.run_code("from PIL import Image; Image.new('RGB', (2, 2)).save('/tmp/saved.png')").results
    assert image.png
    assert line.png
    assert isinstance(line.chart, LineChart)
    assert (line.chart.title, line.chart.elements[0].points) == ("T", [(1, 3), (2, 4)])
    assert isinstance(boxes.chart, BoxAndWhiskerChart)
    assert isinstance(several.chart, SuperChart)
    assert [each.type.value for each in several.chart.elements] == ["bar", "pie"]
    box.kill()


def test_code_runs_with_the_sandboxs_token_only(box: Sandbox, server: RunningServer) -> None:
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999"}
    for token in ({}, {"X-Access-Token": "wrong"}):
        answer = httpx2.post(f"{server.url}/execute", json={"code": "1"}, headers={**headers, **token}, timeout=BOUND_S)
        assert answer.status_code == 401


def test_a_body_with_wrong_fields_is_a_mistake_of_the_client(box: Sandbox, server: RunningServer) -> None:
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": str(box._envd_access_token)}
    for port, path, body in (
        (49999, "/execute", {}),
        (49999, "/contexts", {"cwd": 5}),
        (49983, "/files/compose", {"source_paths": 3}),
    ):
        at = {**headers, "E2b-Sandbox-Port": str(port)}
        answer = httpx2.post(f"{server.url}{path}", json=body, headers=at, timeout=BOUND_S)
        assert (answer.status_code, answer.json()["code"]) == (400, 400), path
