"""The tests of E2B's code interpreter, unmodified, from a checkout of it (`E2B_CODE_INTERPRETER_REPOSITORY`).

Their template has numpy, pandas, matplotlib, Pillow and IPython; here it is built by E2B's SDK, of the packages of this
environment, whose Python has the version of the host image's. `not_passing.toml` lists the tests that do not pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from expected import problems

from atoll.testing.server import running_server
from atoll.testing.waiting import BOUND_S

HERE = Path(__file__).parent
SHARED = HERE.with_name("e2b_sdk")
SERVER_PYTHON = str(HERE.parents[2] / ".venv/bin/python")
COMMIT = "7df1757"
WANTED = (
    "E2B_CODE_INTERPRETER_REPOSITORY is not set: run `git clone https://github.com/e2b-dev/code-interpreter` and "
    f"`git -C code-interpreter checkout {COMMIT}`, then `make test-foreign FOREIGN=e2b_code_interpreter "
    "E2B_CODE_INTERPRETER_REPOSITORY=$PWD/code-interpreter`"
)
TEST_BOUND_S = 6 * BOUND_S
SUITE_BOUND_S = 120 * BOUND_S
BUILD = """
import sys
from e2b import Template
template = Template(file_context_path=sys.argv[1]).from_image("host").copy("packages", "/opt/packages")
if sys.argv[2]:
    template = template.copy("node", "/opt/node")
path = "/opt/node:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
Template.build(template.set_envs({"PYTHONPATH": "/opt/packages", "PATH": path}), "with-packages")
"""


@pytest.fixture
def tests() -> Path:
    """The directory of their tests."""
    repository = os.environ.get("E2B_CODE_INTERPRETER_REPOSITORY")
    assert repository, WANTED
    tests = Path(repository).resolve() / "python/tests"
    assert tests.is_dir(), f"there is no {tests}; {WANTED}"
    return tests


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """What the template is built of: packages, and a Node that runs TypeScript, if this environment has one."""
    skipped = shutil.ignore_patterns("atoll*", "*.pth", "playwright", "__pycache__", "pip", "setuptools")
    shutil.copytree(sysconfig.get_paths()["platlib"], tmp_path / "context/packages", ignore=skipped)
    if node := next(HERE.parents[2].glob(".venv/lib/python3*/site-packages/playwright/driver/node"), None):
        (tmp_path / "context/node").mkdir()
        shutil.copy(node, tmp_path / "context/node/node")
    return tmp_path / "context"


def test_what_does_not_pass_is_listed_with_its_reason(tests: Path, context: Path, tmp_path: Path) -> None:
    outcomes = tmp_path / "outcomes.json"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "PYTEST_"))}
    # The template stays in this directory: it is not one that tests share.
    with (
        TemporaryDirectory(prefix="atoll-") as directory,
        running_server(Path(directory) / "state", python=SERVER_PYTHON) as server,
    ):
        environment = kept | {
            "E2B_API_URL": server.url,
            "E2B_SANDBOX_URL": server.url,
            "E2B_API_KEY": server.key,
            "E2B_TESTS_TEMPLATE": "with-packages",
            "E2B_OUTCOMES": str(outcomes),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SHARED), kept.get("PYTHONPATH")])),
        }
        has_node = "yes" if (context / "node").exists() else ""
        subprocess.run([sys.executable, "-c", BUILD, str(context), has_node], env=environment, check=True)
        options = ["-p", "outcomes", "-p", "no:cacheprovider", "-n", "2", f"--timeout={TEST_BOUND_S:.0f}"]
        options += ["-o", "asyncio_mode=auto", "--import-mode=importlib"]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "tests"],
            cwd=tests.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SUITE_BOUND_S,
            check=False,
        )
    assert ran.returncode in (0, 1), ran.stdout
    told = {name.removeprefix("tests/"): each for name, each in json.loads(outcomes.read_text()).items()}
    reasons = tomllib.loads((HERE / "not_passing.toml").read_text())["reasons"]
    assert not (found := problems(told, reasons)), "\n\n".join(found)
