"""The example of team expenses: both ways give the right answer, and the saving is computed from the messages."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from examples.team_expense_api import Company
from examples.team_expenses import QUESTION, SMALL_QUESTION, Example, choose_model
from rich.console import Console

from atoll import Engine
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import Say

pytestmark = pytest.mark.anyio


class Shown(Example):
    """The example, with what it has shown."""

    @property
    def text(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()


@pytest.fixture
def example(host: Engine) -> Shown:
    return Shown(host, Console(file=io.StringIO(), width=200))


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_the_company_is_the_same_each_time_and_has_some_thousand_expenses() -> None:
    assert Company().expenses == Company().expenses
    assert 3000 < sum(map(len, Company().expenses.values())) < 6000


async def test_both_ways_give_the_right_answer_and_the_saving_is_shown(example: Shown, host: Engine) -> None:
    spent = await example.compare()
    for name, amount in example.company.over_budget("engineering", "Q3").items():
        assert len(re.findall(rf"^{name}: \S+ USD, {amount:.2f} over$", example.text, re.MULTILINE)) == 2
    direct, in_code = spent[QUESTION]
    assert (direct.turns, in_code.turns) == (4, 2)
    assert direct.calls == in_code.calls == 15
    assert direct.input > 30_000
    assert in_code.total < direct.total / 10
    assert f"{in_code.total / direct.total - 1:+.0%}" in example.text
    direct, in_code = spent[SMALL_QUESTION]
    assert in_code.total > direct.total  # it does not always pay, and the table says so
    assert await host.list() == []


async def test_in_one_session_the_records_are_fetched_once(example: Shown) -> None:
    assert await example.reuse_a_session() == [15, 0, 0]


async def test_interactive_answers_until_the_input_ends(example: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "", "Who are you?", "")
    await example.interact(one_session=True)
    assert "Farid: 6674.57 USD" in example.text
    assert "knows only the questions" in example.text
    assert "Flight to Chicago" in example.text
    typed(monkeypatch, SMALL_QUESTION)
    await example.interact(one_session=False)
    assert "A senior may spend 6000.0 USD" in example.text


async def test_low_level_needs_no_model(example: Shown) -> None:
    await example.low_level()
    assert "LookupError: there is no member 'sal-99'" in example.text
    assert "[the time limit was reached]" in example.text
    assert "(True, 10)" in example.text


async def test_a_call_waits_for_what_is_typed(example: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "500", "n")
    await example.approve()
    assert "(on the host: eng-06 + 500.00 USD)" in example.text
    assert "eng-05 was not raised: ApprovalDenied: raise_travel_budget was not approved: the manager said no" in (
        example.text
    )


async def test_a_chart_comes_back_as_a_file(example: Shown, tmp_path: Path) -> None:
    await example.draw(tmp_path / "chart.svg")
    chart = (tmp_path / "chart.svg").read_text()
    assert chart.startswith("<svg ")
    assert chart.count("<rect") == 10


async def test_with_a_key_a_real_model_is_asked_and_its_provider_counts(example: Shown, anthropic: Anthropic) -> None:
    code = '(await get_travel_budget("senior")).amount'
    api = anthropic([Say("", [("execute_code", {"code": code})]), Say("6000 USD.", [])])
    example.model = choose_model()
    async with example.code() as tools:
        answer, spent = await example.ask(SMALL_QUESTION, tools)
    assert api.complaints == []
    assert answer.text == "6000 USD."
    assert (spent.turns, spent.calls, spent.total) == (2, 1, answer.tokens.total)
