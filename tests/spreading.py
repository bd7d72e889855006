"""How the tests are spread over several processes by `pytest -n`: what shares something costly stays together.

Knows which fixtures are dear (the sandboxes that all attacks share, the guest that is compiled for its tests) and
which tests are long: these are begun first, so that no process is still busy with one when the others have ended.
Refuses to know what the tests are about, and how many processes there are.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

from atoll.testing.plugin import RUNTIMES

_RUNTIME = re.compile(rf"[\[-]({'|'.join(RUNTIMES)})[\]-]")

LONGEST_FIRST = (
    "tests/attacks runsc",
    "tests/chaos/test_chaos.py",
    "tests/attacks",
    "tests/conformance/test_as_ordinary_user.py",
    "src/atoll/testing/conformance/test_checkpoints.py runsc",
    "src/atoll/testing/conformance/test_sleep.py runsc",
    "tests/cli/test_cli_run.py",
    "tests/cli/test_cli_agent.py",
    "src/atoll/testing/conformance/test_exec.py runsc",
    "src/atoll/testing/conformance/test_sharing.py runsc",
    "tests/mcp/test_inspector.py",
    "tests/cli/test_cli_sandboxes.py",
    "tests/cli/test_cli_export.py",
    "tests/images/test_pull.py",
    "tests/guest/test_fuzz.py",
    "tests/conformance/test_storage.py runsc",
    "src/atoll/testing/conformance/test_files.py runsc",
    "tests/conformance/test_previews.py crun",
    "tests/cli/test_cli_grammar.py",
    "src/atoll/testing/conformance/test_lifecycle.py",
    "tests/cli/test_cli_checkpoints.py",
    "tests/cli/test_cli_exec.py",
    "tests/chaos/test_faults.py",
    "tests/fuzz",
    "tests/web/test_browser.py",
    "tests/cli/test_cli_logs.py",
    "tests/cli/test_cli_terminal.py",
    "tests/cli/test_cli_cp.py",
    "tests/images/test_archives.py",
)
"""How the names of long units begin. All others are shorter than any of these."""


class Spread(LoadScopeScheduling):
    """Hands out units of tests, the longest first, to whichever process is about to have nothing to do."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        longest = min(self.workqueue, key=lambda unit: (_rank(unit), -len(self.workqueue[unit])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)


def unit_of(nodeid: str) -> str:
    """The unit that a test belongs to: its file, or more or less than that."""
    path, _, test = nodeid.partition("::")
    directory, _, name = path.rpartition("/")
    if name in {"test_as_ordinary_user.py", "test_fuzz.py"}:
        return nodeid
    if directory == "tests/guest":
        return directory
    runtime = _RUNTIME.search(test)
    if runtime and directory == "tests/attacks":
        return f"{directory} {runtime[1]}"
    if runtime and directory.endswith("/conformance"):
        return f"{path} {runtime[1]}"
    return path


def _rank(unit: str) -> int:
    return next((rank for rank, long in enumerate(LONGEST_FIRST) if unit.startswith(long)), len(LONGEST_FIRST))
