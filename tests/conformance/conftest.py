"""What the conformance suite knows about the machine that it runs on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.conformance import inside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll import Capabilities, Engine, Sandbox
    from atoll.contract.model import RuntimeName
    from tests.nursery import Nursery


@pytest.fixture(scope="session", autouse=True)
def _clients_are_born(nursery: Nursery) -> None:
    inside.python = nursery.program


@pytest.fixture
def capabilities(engine: Engine, runtime_name: RuntimeName) -> Capabilities:
    return engine.drivers()[runtime_name].capabilities


@pytest.fixture(scope="session")
def single_id() -> bool:
    """Whether all users inside are one: an ordinary user without a range of ids in /etc/subuid has no more to give."""
    from atoll.drivers.machine import read_machine

    machine = read_machine()
    return not machine.root and not (machine.subuids and machine.subgids)


@pytest.fixture(scope="session")
def user_id(single_id: bool) -> int:
    """The uid of `user` inside."""
    return 0 if single_id else 1000


@pytest.fixture
def as_root() -> None:
    """For tests that look at what only the host's root can see or do."""
    if os.geteuid() != 0:
        pytest.skip("needs root on the host")


@pytest.fixture
def can_freeze(capabilities: Capabilities, runtime_name: RuntimeName) -> None:
    """For tests of what needs a freezer: to pause, and to copy a sandbox while it runs."""
    if not capabilities.freeze:
        pytest.skip(f"{runtime_name} declares that it cannot freeze a sandbox here")


@pytest.fixture
def can_limit(capabilities: Capabilities, runtime_name: RuntimeName) -> None:
    """For tests of limits on memory and CPU time, and of what is counted with them."""
    if not capabilities.memory_limit:
        pytest.skip(f"{runtime_name} declares that it cannot limit memory here")


@pytest.fixture
async def here(shared: Sandbox, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A directory of the test's own in the shared sandbox, relative to the user's home."""
    name = f"test-{abs(hash(request.node.name))}"
    await shared.files.mkdir(name)
    yield name
    await shared.files.remove(f"/home/user/{name}", recursive=True, user="root")
