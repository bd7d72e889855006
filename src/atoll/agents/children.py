"""Child sessions: agents that do a piece of work for another one, in a part of its sandbox.

Knows the roles that a child may have, what each is told and may do, and whose tokens it spends. Refuses to know how a
child is asked for, scoped, counted and cancelled: that is the tool `task` (`tools/tasks.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from pydantic_ai.models import Model

from atoll.agents import models
from atoll.agents.loop import DEFAULT_STEPS, Agent, Approve, Budget
from atoll.contract.model import Frozen
from atoll.tools.coding import CodingView
from atoll.tools.tasks import TaskEvent, TaskOutput


class Role(Frozen):
    """What a child is for."""

    about: str
    """What the model that asks for a child is told."""
    instructions: str
    """What the child is told."""
    read_only: bool = False
    """It gets only tools that change nothing."""


ROLES: Mapping[str, Role] = {
    "worker": Role(
        about="does a piece of work and says what it did",
        instructions="You do one piece of work for another agent, which sees nothing but your last message. Do it, "
        "check that it is done, and answer with what you did and what it should know. Say so if something failed.",
    ),
    "explorer": Role(
        about="looks and answers, and changes nothing",
        instructions="You find something out for another agent, which sees nothing but your last message. Look at what "
        "you need, and answer with what you found and in which files and lines. Say so if you did not find it.",
        read_only=True,
    ),
}


@dataclass(frozen=True)
class Children:
    """Runs child sessions with a model: a `ChildRunner` for `Tasks`. What they spend, they take from one budget."""

    model: str | Model
    roles_by_name: Mapping[str, Role] | None = None
    steps: int = DEFAULT_STEPS
    budget: Budget | None = None
    approve: Approve | None = None

    @property
    def _roles(self) -> Mapping[str, Role]:
        return ROLES if self.roles_by_name is None else self.roles_by_name

    @property
    def roles(self) -> Mapping[str, str]:
        return {name: role.about for name, role in self._roles.items()}

    async def start(
        self, *, id: str, role: str, prompt: str, cwd: str, depth: int, view: CodingView
    ) -> AsyncGenerator[TaskEvent | TaskOutput, None]:
        chosen = self._roles[role]
        tools = view.tools()
        if chosen.read_only:
            tools = tools.only(*(tool.name for tool in tools if tool.hints.read_only))
        instructions = f"{chosen.instructions}\n\nYou work in {cwd}. Paths are from there, or absolute."
        agent = Agent(models.resolve(self.model), tools, instructions, steps=self.steps, approve=self.approve)
        async with agent.stream(prompt, budget=self.budget) as stream:
            async for event in stream:
                data = event.model_dump(mode="json")
                yield TaskEvent(task=id, kind=data.pop("type"), data={**data, "depth": depth})
        yield TaskOutput(output=stream.answer.text)
