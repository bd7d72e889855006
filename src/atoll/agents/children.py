"""Child agents: agents that do a piece of work for another agent, in a directory of its sandbox.

Owns the roles that a child may have, with their instructions and tools, and the budget that children share. Not here:
how a child is requested, scoped, counted and cancelled (the tool `task`, `tools/tasks.py`), and the agent loop
(`loop.py`). Used by `atoll agent`, and by programs (`atoll.Children`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from pydantic_ai.models import Model

from atoll.agents import models
from atoll.agents.loop import DEFAULT_STEPS, Agent, Approve, Budget
from atoll.tools.coding import CodingView
from atoll.tools.tasks import TaskEvent, TaskOutput
from atoll.tools.tool import StrictModel


class Role(StrictModel):
    """A kind of child agent."""

    about: str
    """Its purpose, as the model that starts a child sees it."""
    instructions: str
    """The child's instructions."""
    read_only: bool = False
    """The child gets only tools that change nothing."""


ROLES: Mapping[str, Role] = {
    "worker": Role(
        about="does a piece of work and reports what it did",
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
    """Runs child agents with a model: a `ChildRunner` for `Tasks`. All children spend from the same budget."""

    model: str | Model
    roles_by_name: Mapping[str, Role] | None = None
    steps: int = DEFAULT_STEPS
    budget: Budget | None = None
    approve: Approve | None = None
    briefing: str = ""
    """What every child is told beside its role: of the sandbox, and of the task as a whole."""

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
        told = [chosen.instructions, self.briefing, f"You work in {cwd}. Paths are from there, or absolute."]
        instructions = "\n\n".join(filter(None, told))
        agent = Agent(models.resolve(self.model), tools, instructions, steps=self.steps, approve=self.approve)
        async with agent.stream(prompt, budget=self.budget) as stream:
            async for event in stream:
                data = event.model_dump(mode="json")
                yield TaskEvent(task=id, kind=data.pop("type"), data={**data, "depth": depth})
        yield TaskOutput(output=stream.answer.text)
