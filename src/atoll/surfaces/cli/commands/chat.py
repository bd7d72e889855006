"""`chat`: talk to an agent of a config, of a server or of the data of this machine.

Not here: turns (`server/chat.py`), and how they are shown (`transcript.py`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from atoll.contract.errors import AtollError, InvalidRequest
from atoll.surfaces.cli import render
from atoll.surfaces.cli.command import AtollCommand, CommandContext, CommandModule, Work, needing_extra
from atoll.surfaces.cli.commands.configs import open_api
from atoll.surfaces.cli.grammar import Argument, Option

if TYPE_CHECKING:
    from atoll.client.http import HttpClient
    from atoll.surfaces.cli.transcript import Display

commands = CommandModule()
FAILED = 1
_MAX_RESULTS_BYTES = 16 * 1024 * 1024
_LISTED = 100
_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class _ChatCommand(AtollCommand):
    json_help = "Print each event as a line of JSON; the last one is the answer."


@commands.command(cls=_ChatCommand)
def chat(
    context: CommandContext,
    config: Annotated[str, Argument(metavar="CONFIG", help="The config's id, which `atoll configs ls` lists.")],
    message: Annotated[
        str | None, Argument(metavar="MESSAGE", help="What to say.  [default: what is typed, turn by turn]")
    ] = None,
    conversation: Annotated[
        str | None, Option("--conversation", metavar="ID", help="Go on with this conversation.")
    ] = None,
    results: Annotated[
        str | None,
        Option(
            "--results",
            metavar="FILE",
            help="Send the results of the calls that it waits for: a JSON list of objects with "
            "tool_call_id, name and content; - reads standard input.",
        ),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on with a turn that failed, was cancelled or interrupted.")
    ] = False,
    lists: Annotated[bool, Option("--list", help="List the conversations with the agent, the newest first.")] = False,
) -> Work:
    """Talk to the agent of a config.

    The agent's text is streamed to standard output, its calls to standard error. Where the tools are yours, you are
    asked for the result of each call; without a terminal, or with --json, the calls are printed, the exit status is 1,
    and --results sends what came of them. Ctrl-C cancels the turn.

    \b
    atoll chat cfg_0c8b4dd0f4a74b66 "What is new?"
    atoll chat cfg_0c8b4dd0f4a74b66 --conversation 0190…
    """
    if conversation is not None and not _ID.fullmatch(conversation):
        raise InvalidRequest(
            f"{conversation[:80]!r} is not the id of a conversation, such as 01a1ed9d-c3b5-7d27-9f97-1c333b66f9c5; "
            f"`atoll chat {config} --list` lists them"
        )
    if lists:
        if conversation is not None or message is not None or results is not None or resume:
            raise InvalidRequest("--list takes no message, and no other option of a conversation")
        return _list(context, config)
    body: dict[str, Any] = {}
    if (message is not None) + (results is not None) + resume > 1:
        raise InvalidRequest("give one of MESSAGE, --results and --resume")
    if conversation is None and (resume or results is not None):
        raise InvalidRequest("--results and --resume need --conversation ID")
    if message is not None:
        body = {"message": message}
    elif resume:
        body = {"resume": True}
    elif results is not None:
        body = {"tool_results": _results(results)}
    elif context.as_json or not _is_answerable():
        raise InvalidRequest("no message was given; give it as an argument")
    return _chat(context, config, conversation, body)


def _is_answerable() -> bool:
    return os.isatty(0) and os.isatty(2)


def _results(file: str) -> Any:
    try:
        with sys.stdin.buffer if file == "-" else open(file, "rb") as source:
            return json.loads(source.read(_MAX_RESULTS_BYTES))
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file} is not JSON: {error}") from None


async def _list(context: CommandContext, config: str) -> int:
    async with open_api(context) as api:
        await api.get(f"/api/v1/configs/{config}")
        page = await api.get("/api/v1/conversations", config_id=config, limit=_LISTED)
    found = page["items"]
    if context.as_json:
        render.emit_json(found)
    elif not found:
        render.note(f"no conversations; `atoll chat {config} MESSAGE` begins one")
    else:
        rows = [
            (each["id"], each["status"] or "-", render.ago(datetime.fromisoformat(each["updated_at"])))
            for each in found
        ]
        render.table(("CONVERSATION", "LAST TURN", "UPDATED"), rows)
        if page["next"] is not None:
            render.note(f"these are the newest {_LISTED}")
    return 0


async def _chat(context: CommandContext, config: str, conversation: str | None, body: dict[str, Any]) -> int:
    async with open_api(context) as api:
        with needing_extra(f"`{context.command_path}`", "agents"):
            from atoll.surfaces.cli import transcript
            from atoll.tools.tool import ToolSet

        found = await api.get(f"/api/v1/configs/{config}")
        shown: Display = transcript.JsonLines() if context.as_json else transcript.Screen(ToolSet(), found["name"])
        talk = _Talk(api, config, conversation, shown, is_json=context.as_json)
        async with transcript.opened(shown):
            return await (talk.once(body) if body else talk.hold(found["name"]))


class _Talk:
    """A conversation with an agent, on a terminal or for a program."""

    def __init__(
        self, api: HttpClient, config: str, conversation: str | None, display: Display, *, is_json: bool
    ) -> None:
        self._api = api
        self._path = f"/api/v1/chat/{config}"
        self._conversation = conversation
        self._display = display
        self._is_json = is_json
        self._turn: str | None = None

    async def once(self, body: dict[str, Any]) -> int:
        """Send one thing, and what is asked for then if there is someone to ask. Returns the exit status."""
        answer = await self._send(body)
        while answer["tool_calls"] and not self._is_json and _is_answerable():
            answer = await self._send({"tool_results": await self._asked(answer["tool_calls"])})
        if answer["tool_calls"] and not self._is_json:
            render.say(json.dumps(answer["tool_calls"], ensure_ascii=False))
            render.note(f"it waits for the results: --conversation {answer['conversation_id']} --results FILE")
        elif not self._is_json:
            render.note(f"conversation {answer['conversation_id']}")
        return FAILED if answer["tool_calls"] else 0

    async def hold(self, name: str) -> int:
        """Turn by turn, until an empty line."""
        from atoll.surfaces.cli import terminal

        keyboard = terminal.Keyboard()
        greeting = f"{name}. An empty line ends the conversation.\n"
        await self._display.say(render.styled(render.printable(greeting, lines=True), render.DIM))
        while True:
            async with self._display.aside():
                await self._display.say("> ")
                typed = await keyboard.read()
            if not typed.strip():
                if self._conversation is not None:
                    render.note(f"conversation {self._conversation}")
                return 0
            with terminal.interruptible() as turn:
                try:
                    answer = await self._send({"message": typed})
                    while answer["tool_calls"]:
                        answer = await self._send({"tool_results": await self._asked(answer["tool_calls"])})
                except AtollError as error:
                    render.failure(error, as_json=False)
            if turn.cancelled_caught:
                await self._display.say(render.styled("the turn was cancelled\n", render.DIM))

    async def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send something, show what happens, and return the answer. A turn that is left is cancelled."""
        import anyio
        from pydantic import TypeAdapter

        from atoll.agents.events import AgentEvent, Tokens
        from atoll.agents.history import History
        from atoll.agents.loop import Answer
        from atoll.client.stores import events_of
        from atoll.surfaces.cli.transcript import TurnUsage

        read: TypeAdapter[AgentEvent] = TypeAdapter(AgentEvent)
        given = {**body, **({} if self._conversation is None else {"conversation_id": self._conversation})}
        answer: dict[str, Any] | None = None
        began = time.monotonic()
        await self._display.begin()
        try:
            async for name, data in events_of(self._api, "POST", self._path, given):
                if name == "turn":
                    self._turn, self._conversation = data["turn_id"], data["conversation_id"]
                elif name == "end":
                    answer = data
                elif name != "lost":
                    await self._display.take(read.validate_python(data))
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(5, shield=True):
                if self._turn is not None:
                    await self._api.post(f"{self._path}/turns/{self._turn}/cancel")
            raise
        if answer is None:
            raise InvalidRequest("the server ended its answer before the turn did; --resume goes on with it")
        if self._is_json:
            await self._display.emit({"type": "answer", **answer})
        elif not answer["tool_calls"]:
            tokens = Tokens.model_validate(answer["usage"])
            spent = TurnUsage(answer["steps"], tokens, time.monotonic() - began)
            await self._display.end(Answer(answer["response"], "done", answer["steps"], tokens, History()), spent)
        return answer

    async def _asked(self, calls: list[dict[str, Any]]) -> list[dict[str, str]]:
        """Results of calls, as the user types them."""
        from atoll.agents.events import ToolResultEvent
        from atoll.surfaces.cli import terminal
        from atoll.tools.tool import ToolResult

        keyboard, results = terminal.Keyboard(), []
        for call in calls:
            async with self._display.aside():
                arguments = render.printable(json.dumps(call["arguments"], ensure_ascii=False))
                await self._display.say(f"The result of {render.printable(call['name'])} {arguments}: ")
                typed = (await keyboard.read()).rstrip("\n")
            results.append({"tool_call_id": call["id"], "name": call["name"], "content": typed})
            told = ToolResult(content=typed)
            await self._display.take(ToolResultEvent(id=call["id"], tool=call["name"], result=told, duration_s=0))
        return results
