"""Child agents: the tool `task`, and what runs, follows and cancels a child.

Owns the tool's input and result, the events of a child, the depth limit, and the table of running children. Not here:
how a child agent works (a `ChildRunner`, such as `agents/children.py`; without one there is no `task`), and the tools
that a child gets (`CodingView.tools` in `coding.py`). Used by `coding.py`, whose vocabulary `task` belongs to.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio
from pydantic import Field, create_model

from atoll.contract.errors import InvalidRequest, PathNotDirectory
from atoll.tools.tool import Hints, Input, Result, StrictModel, Tool, ToolResult
from atoll.tools.view import last_lines

if TYPE_CHECKING:
    from atoll.tools.coding import CodingView

MAX_AGENT_DEPTH = 3
"""Agents below each other, the one that a person started included."""


class TaskEvent(StrictModel):
    """Something that happened in a child agent."""

    task: str
    """The child's id."""
    kind: str
    """`started`, `ended`, or a kind that the runner defines."""
    data: dict[str, Any] = Field(default_factory=dict)


class TaskOutput(StrictModel):
    """The final answer of a child agent. The last item that its runner yields."""

    output: str


class ChildRunner(Protocol):
    """Runs child agents."""

    @property
    def roles(self) -> Mapping[str, str]:
        """The roles that a child may have, each with its purpose. The first is the default."""

    def start(
        self, *, id: str, role: str, prompt: str, cwd: str, depth: int, view: CodingView
    ) -> AsyncGenerator[TaskEvent | TaskOutput, None]:
        """Run a child agent to its end: yields events as they happen, then its output.

        `view.tools()` are the child's tools, scoped to `cwd`. Cancelling or closing the generator ends the child.
        """


@dataclass(frozen=True)
class Tasks:
    """The child agents of one agent: what runs them, which are running, and how to cancel them."""

    runner: ChildRunner
    on_event: Callable[[TaskEvent], None] = lambda _event: None
    max_depth: int = MAX_AGENT_DEPTH
    running: dict[str, anyio.CancelScope] = field(default_factory=dict)

    def cancel(self, id: str) -> bool:
        """Cancel a child, and with it the call that waits for it. Returns whether a child of this id was running."""
        scope = self.running.get(id)
        if scope is None:
            return False
        scope.cancel()
        return True


# --------------------------------------------------------------------------------------------------------------- task


class Task(Input):
    prompt: str = Field(min_length=1)
    """All that the child is told: it has not seen this conversation."""
    role: str = Field(default="", min_length=1)
    cwd: str = Field(default=".", min_length=1)
    """The directory that the child works in and sees."""


class TaskResult(Result):
    id: str
    role: str
    status: Literal["completed"]
    output: str


async def _task(args: Task, view: CodingView) -> ToolResult:
    tasks = view.tasks
    if tasks is None:
        raise InvalidRequest("this agent cannot start child agents")
    child = await view.child(args.cwd)
    async with view.suggesting(child.cwd):
        if (await view.sandbox.files.stat(child.cwd)).kind != "directory":
            raise PathNotDirectory(f"{args.cwd}: not a directory", number=20, path=args.cwd)
    id = f"task-{secrets.token_hex(4)}"
    about = {"role": args.role, "cwd": child.cwd, "depth": child.depth}
    tasks.on_event(TaskEvent(task=id, kind="started", data=about))
    status, output = "failed", None
    try:
        output = await _run_child(tasks, id, args, child)
        status = "cancelled" if output is None else "completed"
    except anyio.get_cancelled_exc_class():
        status = "cancelled"
        raise
    finally:
        tasks.on_event(TaskEvent(task=id, kind="ended", data={"status": status}))
    if output is None:
        raise InvalidRequest(f"the child agent {id} was cancelled, or ended without output")
    data = output.encode("utf-8", "replace")
    kept = last_lines(data)
    shown_output = kept.decode("utf-8", "replace")
    if len(kept) < len(data):
        shown_output = f"[the first {len(data) - len(kept)} bytes are cut]\n{shown_output}"
    result = TaskResult(id=id, role=args.role, status="completed", output=shown_output).result()
    return result.model_copy(update={"content": f"[{id}, {args.role}: completed]\n{shown_output}"})


async def _run_child(tasks: Tasks, id: str, args: Task, child: CodingView) -> str | None:
    """Run a child and forward its events. Returns its output, or None if it was cancelled."""
    output = None
    with anyio.CancelScope() as scope:
        tasks.running[id] = scope
        try:
            updates = tasks.runner.start(
                id=id, role=args.role, prompt=args.prompt, cwd=child.cwd, depth=child.depth, view=child
            )
            async with aclosing(updates):
                async for update in updates:
                    if isinstance(update, TaskOutput):
                        output = update.output
                    else:
                        tasks.on_event(update.model_copy(update={"task": id}))
        finally:
            del tasks.running[id]
    return output


TASK = Tool(
    "task",
    "Have a child agent do a piece of work in this sandbox, and get its answer. It sees the files below cwd alone.",
    Task,
    TaskResult,
    _task,
    needs=frozenset({"tasks"}),
    hints=Hints(destructive=True, open_world=True),
    title="Start child agent",
    vocabulary="coding",
)


def task_tool(tasks: Tasks | None) -> Tool:
    """The tool `task`. Its schema lists the roles of `tasks`, if there are any.

    Raises:
        InvalidRequest: the runner has no role.
    """
    if tasks is None:
        return TASK
    roles = tasks.runner.roles
    if not roles:
        raise InvalidRequest("the runner of child agents defines no role; it needs at least one")
    names = tuple(roles)
    about = "; ".join(f"{name}: {purpose}" for name, purpose in roles.items())
    roles_field: Any = (Literal[names], Field(default=names[0], description=about))
    model: type[Input] = create_model("Task", __base__=Task, role=roles_field)
    return replace(TASK, input=model)
