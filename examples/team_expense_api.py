"""The company of `team_expenses.py`: thirty people, four quarters, some thousand expenses, and tools that give them.

Everything comes from one seed, so that questions have the same answer each time. `registry` has the tools; they may be
called by a model directly and by code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

import atoll

SEED = 20250917
YEAR = 2025
Department = Literal["engineering", "sales", "marketing"]
Level = Literal["junior", "mid", "senior", "staff"]
Quarter = Literal["Q1", "Q2", "Q3", "Q4"]
_BOTH = (atoll.ToolCallerType.DIRECT, atoll.ToolCallerType.CODE_EXECUTION)
_FIRST_DAYS = {"Q1": date(YEAR, 1, 1), "Q2": date(YEAR, 4, 1), "Q3": date(YEAR, 7, 1), "Q4": date(YEAR, 10, 1)}


@dataclass(frozen=True)
class Member:
    id: str
    name: str
    department: Department
    level: Level


@dataclass(frozen=True)
class Expense:
    id: str
    day: date
    category: Literal["travel", "lodging", "meals", "software", "equipment", "conference"]
    description: str
    merchant: str
    amount: float
    status: Literal["approved", "pending", "rejected"]
    """Only approved expenses count."""
    approved_by: str | None


@dataclass(frozen=True)
class TravelBudget:
    level: Level
    amount: float
    """For travel and lodging together, in one quarter."""
    currency: str = "USD"


_BUDGETS: dict[Level, float] = {"junior": 3500, "mid": 4500, "senior": 6000, "staff": 8000}
_KINDS = {
    "travel": (120, 900, ("Flight to Chicago", "Flight to Lisbon", "Train to Boston"), ("Blue Sky Air", "Rail & Co")),
    "lodging": (90, 420, ("Hotel, two nights", "Hotel, one night"), ("Harbour Inn", "Hotel Central")),
    "meals": (9, 95, ("Lunch with a customer", "Dinner of the team"), ("Corner Bistro", "Noodle Bar")),
    "software": (15, 140, ("Licence, one month", "Cloud account"), ("Northwind Software", "Contoso Cloud")),
    "equipment": (30, 380, ("Headset", "Monitor", "Keyboard"), ("Desk & Chair", "Volt Electronics")),
    "conference": (150, 800, ("Ticket of a conference", "Workshop"), ("DevDays", "Data Summit")),
}
_NAMES = (
    "Ada Bruno Chloe Dev Elif Farid Grace Hugo Ines Jonas Kira Liam Mina Noor Omar Paula Quinn Rosa Sven Tara "
    "Umar Vera Wim Xenia Yara Zoe Amir Bea Carl Dana"
).split()


class Company:
    """The members and their expenses."""

    def __init__(self, seed: int = SEED) -> None:
        chance = random.Random(seed)
        departments: list[Department] = ["engineering", "sales", "marketing"]
        levels: list[Level] = ["junior", "mid", "senior", "staff"]
        self.members = [
            Member(f"{department[:3]}-{number + 1:02}", _NAMES[10 * index + number], department, chance.choice(levels))
            for index, department in enumerate(departments)
            for number in range(10)
        ]
        self.expenses = {
            (member.id, quarter): self._quarter(chance, f"{member.id}-{quarter}", first)
            for member in self.members
            for quarter, first in _FIRST_DAYS.items()
        }

    def _quarter(self, chance: random.Random, prefix: str, first: date) -> list[Expense]:
        days = sorted(chance.randrange(90) for _ in range(chance.randint(25, 45)))
        return [self._expense(chance, f"{prefix}-{n:03}", first + timedelta(day)) for n, day in enumerate(days, 1)]

    def _expense(self, chance: random.Random, id: str, day: date) -> Expense:
        category = chance.choice(list(_KINDS))
        least, most, descriptions, merchants = _KINDS[category]
        status = chance.choices(("approved", "pending", "rejected"), (86, 8, 6))[0]
        return Expense(
            id=id,
            day=day,
            category=category,  # type: ignore[arg-type]  # a key of _KINDS
            description=chance.choice(descriptions),
            merchant=chance.choice(merchants),
            amount=round(chance.uniform(least, most), 2),
            status=status,  # type: ignore[arg-type]  # one of three
            approved_by=f"manager-{chance.randint(1, 4)}" if status == "approved" else None,
        )

    def member(self, member_id: str) -> Member:
        for member in self.members:
            if member.id == member_id:
                return member
        raise LookupError(f"there is no member {member_id!r}; get_team_members lists them")

    def over_budget(self, department: Department, quarter: Quarter) -> dict[str, float]:
        """Who spent more than the travel budget of their level, and by how much: what the model is to find out."""
        over = {}
        for member in self.members:
            spent = sum(
                expense.amount
                for expense in self.expenses[member.id, quarter]
                if expense.status == "approved" and expense.category in {"travel", "lodging"}
            )
            if member.department == department and spent > _BUDGETS[member.level]:
                over[member.name] = round(spent - _BUDGETS[member.level], 2)
        return over


def registry(
    company: Company, on_increase: Callable[[str, float], None] = lambda member, amount: None
) -> atoll.ToolRegistry:
    """The tools of a company. `on_increase` is called when a budget is raised, which needs an approval."""
    tools = atoll.ToolRegistry()

    @tools.register(allowed_callers=_BOTH)
    def get_team_members(department: Department) -> list[Member]:
        """The members of a department."""
        return [member for member in company.members if member.department == department]

    @tools.register(allowed_callers=_BOTH)
    def get_expenses(member_id: str, quarter: Quarter) -> list[Expense]:
        """All expenses of a member in one quarter of 2025, whatever their status. Only approved ones count."""
        return company.expenses[company.member(member_id).id, quarter]

    @tools.register(allowed_callers=_BOTH)
    def get_travel_budget(level: Level) -> TravelBudget:
        """What a member of a level may spend in a quarter on travel and lodging together."""
        return TravelBudget(level, _BUDGETS[level])

    @tools.register(needs_approval=True)
    def raise_travel_budget(member_id: str, amount: float) -> str:
        """Raise the travel budget of a member by an amount in USD, for one quarter."""
        on_increase(member_id, amount)
        return f"raised by {amount:.2f} USD"

    return tools
