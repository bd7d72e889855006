"""The shipped suite with drivers of another package: found by entry points, and run without our pytest settings."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from atoll.drivers import registry
from atoll.testing.plugin import STRICT

CORAL = """
import os
from atoll.drivers import registry


class Coral:
    '''The fastest driver of this machine under another name.'''

    def __init__(self, name, driver):
        self.name = name
        self._driver = driver

    def __getattr__(self, name):
        return getattr(self._driver, name)

    async def launch(self, launch):
        if self.name == "misnamed":
            launch = launch.model_copy(update={"hostname": "reef"})
        if self.name == "leaking":
            from atoll.testing import leaks

            leaks.BOUND_S = 3  # an idle worker ends after a second; the descriptors are never closed
            os.pipe()
        await self._driver.launch(launch)


def drivers(state_dir, machine):
    built_in = registry.available(state_dir, machine)
    for name in ("coral", "misnamed", "leaking"):
        yield Coral(name, built_in[next(iter(built_in))])
"""
METADATA = "Metadata-Version: 2.1\nName: coral\nVersion: 0\n"
ENTRY_POINTS = f"[{registry.GROUP}]\ncoral = coral:drivers\nmisnamed = coral:drivers\nleaking = coral:drivers\n"
RUNTIMES = ("coral", "misnamed", "leaking", "atlantis")
EXIT, HOSTNAME, HOME = "a_non_zero_exit_is_a_value", "the_name_of_the_sandbox_is_its_host_name", "the_user_has_a_home"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, str]:
    """By test: passed, failure, error or skipped. It ran with the plugins of the extra `testing` only."""
    directory = tmp_path_factory.mktemp("elsewhere")
    if not registry.available(directory):
        (pytest.fail if STRICT else pytest.skip)("no runtime can be used on this machine")
    (directory / "coral-0.dist-info").mkdir()
    (directory / "coral-0.dist-info/METADATA").write_text(METADATA)
    (directory / "coral-0.dist-info/entry_points.txt").write_text(ENTRY_POINTS)
    (directory / "coral.py").write_text(CORAL)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(directory), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    cache = pytestconfig.rootpath / pytestconfig.getini("cache_dir")  # has the host image
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "anyio", "-p", "pytest_timeout", "-W", "error", "--strict-markers"),
            *(
                "--pyargs",
                "atoll.testing.conformance",
                "-p",
                "atoll.testing.plugin",
                "-k",
                f"{EXIT} or {HOSTNAME} or {HOME}",
            ),
            *(word for name in RUNTIMES for word in ("--atoll-runtime", name)),
            *("-o", f"cache_dir={cache}", "--junit-xml", "results.xml"),
        ],
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    print(done.stdout)
    results: dict[str, str] = {}
    for case in ET.parse(directory / "results.xml").iter("testcase"):
        kinds = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
        results[case.get("name", "").removeprefix("test_")] = kinds[0] if kinds else "passed"
    return results


def of(results: dict[str, str], runtime: str) -> dict[str, str]:
    return {name.partition("[")[0]: result for name, result in results.items() if name.endswith(f"[{runtime}]")}


def test_a_driver_of_another_package_passes_under_its_name(results: dict[str, str]) -> None:
    assert list(of(results, "coral").values()) == ["passed"] * 3


def test_a_driver_that_breaks_a_promise_fails_the_test_of_it(results: dict[str, str]) -> None:
    found = of(results, "misnamed")
    assert found.pop(HOSTNAME) == "failure"
    assert list(found.values()) == ["passed"] * 2


def test_a_driver_that_leaks_fails_the_tests_that_create_a_sandbox(results: dict[str, str]) -> None:
    found = of(results, "leaking")
    assert found.pop(HOSTNAME) == "error"
    assert list(found.values()) == ["passed"] * 2


def test_a_runtime_that_is_named_and_cannot_be_used_fails_its_tests(results: dict[str, str]) -> None:
    assert list(of(results, "atlantis").values()) == ["error"] * 3
