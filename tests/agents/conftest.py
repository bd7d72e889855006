"""A pool for each module, and models that are reached over HTTP on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.agents.messages_api import MessagesApi, Raw, Refuse, Say, serving

if TYPE_CHECKING:
    from atoll import Engine
    from atoll.runtime.sandbox_pool import SandboxPool

Anthropic = Callable[[Sequence[Say | Refuse | Raw]], MessagesApi]


@pytest.fixture(scope="module")
async def pool(host: Engine) -> AsyncIterator[SandboxPool]:
    """One session for all tests of a module."""
    async with host.pool("agents") as pool:
        yield pool
        await pool.aclose()


@pytest.fixture
def anthropic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Anthropic]:
    """Begins a server that gives these answers, which the environment then names as Anthropic's."""
    with ExitStack() as stack:

        def begin(answers: Sequence[Say | Refuse | Raw]) -> MessagesApi:
            api = stack.enter_context(serving(answers))
            monkeypatch.setenv("ANTHROPIC_BASE_URL", api.url)
            monkeypatch.setenv("ANTHROPIC_API_KEY", "test-key")
            return api

        yield begin
