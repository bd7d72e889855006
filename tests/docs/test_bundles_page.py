"""docs/bundles.md runs: its files are packed to a bundle, which its program calls."""

from __future__ import annotations

import ast
import gzip
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.bundles.build import remove_built
from atoll.runtime.interface import Engine
from tests.bundles.making import entry, tar

PAGE = (Path(__file__).parents[2] / "docs" / "bundles.md").read_text()


def block(section: str, language: str) -> str:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return str(found)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    files = {
        "manifest.json": block("Write one", "json"),
        "tools/__init__.py": "",
        "tools/words.py": block("Write one", "python"),
    }
    path = tmp_path / "bundle.tgz"
    path.write_bytes(gzip.compress(tar(entry(name, text.encode()) for name, text in files.items())))
    return path


async def test_the_bundle_of_the_page_is_called_by_its_program(host: Engine, path: Path) -> None:
    names: dict[str, Any] = {"engine": host, "path": path}
    program = compile(block("Workspaces", "python"), "bundles.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(program, names)
    assert inspect.iscoroutine(running)
    await running
    assert await remove_built(host, names["read"].sha256) == 1
    assert [tool.description for tool in names["read"].tools] == [
        "Count the words of a page.",
        "Write a page of the site.",
    ]


def test_the_page_has_every_reason_and_kind() -> None:
    from typing import get_args

    from atoll.bundles.manifest import BundleReason
    from atoll.bundles.results import PART_KINDS

    for word in (*get_args(BundleReason), *PART_KINDS):
        assert f"`{word}`" in PAGE
