"""Settings from variables of the environment: what a wrong value is answered with."""

from __future__ import annotations

import pytest

from atoll.contract.errors import InvalidRequest
from atoll.settings import Settings


@pytest.mark.parametrize("name", ["ATOLL_URL", "ATOLL_API_KEY", "ATOLL_DATABASE_URL", "ATOLL_MCP_TOKEN"])
def test_an_empty_variable_is_said_to_be_empty(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(InvalidRequest) as refused:
        Settings.from_environment()
    assert refused.value.message == f"{name} is empty; give it a value, or unset it"
