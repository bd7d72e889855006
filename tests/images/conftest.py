"""A store of one's own for every test, and one registry for all. As root the tests are about root's stores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.runtime.images.store import ImageStore
from tests.images.registry import Registry, make_layout, rootfs

_PROGRAMS = ("skopeo", "umoci", "docker-registry", "busybox")


@pytest.fixture(scope="session")
def programs() -> None:
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        message = f"{', '.join(missing)} are not installed"
        if os.environ.get("ATOLL_STRICT") == "1" or os.environ.get("CI") == "true":
            pytest.fail(message, pytrace=False)
        pytest.skip(message)


@pytest.fixture(scope="session")
def registry(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    registry = Registry(tmp_path_factory.mktemp("registry"))
    yield registry
    registry.close()


@pytest.fixture(scope="session")
def layout(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small image with the variables GREETING and PATH."""
    directory = tmp_path_factory.mktemp("layout") / "small"
    return make_layout(directory, rootfs(), env=["GREETING=hello world", "PATH=/bin"])


@pytest.fixture
def pushed(registry: Registry, layout: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """The small image in a repository of the test's own: the reference and the digest."""
    name = "t/" + "".join(c if c.isalnum() else "-" for c in request.node.name.lower()).strip("-").replace("--", "-")
    name = f"{name[:60].strip('-')}:1"
    return f"{registry.host}/{name}", registry.push(layout, name)


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., ImageStore]:
    def make(**arguments) -> ImageStore:
        return ImageStore(tmp_path / "images", rootless=os.geteuid() != 0, **arguments)

    return make


@pytest.fixture
def store(make_store: Callable[..., ImageStore]) -> ImageStore:
    return make_store()
