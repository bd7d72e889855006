"""Clients of the Messages API, and the code of their models, that reach for what belongs to others.

A container belongs to the key that it was made with. Code may call the tools that its request let it call, and nothing
that a client or its code sends may stop the server, or tell one client of another.
"""

from __future__ import annotations

import time
from typing import Any

import anthropic
import pytest

from atoll import Engine
from tests.messages.serving import CODE, NOW, SALES, HostedClient, answers, client, runs, says, script, serving, text

pytestmark = pytest.mark.runtimes("crun")
ASKS = "secret = 'of one client'\nprint(await query_sales({'region': 'east'}))"
FORGES = (
    "import asyncio, types\nkernel = display.__self__\n"
    "stub = types.SimpleNamespace(__name__='now', returns='any')\n"
    "try:\n    print(await kernel.calls.make(stub, {}))\nexcept ToolError as error:\n    print(error.type)"
)
BOMB = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(40)}


async def begin(program: HostedClient, prompt: str = "Go") -> Any:
    program.messages.append({"role": "user", "content": prompt})
    return await program.create()


async def test_a_container_of_another_key_does_not_exist(engine: Engine) -> None:
    async with (
        serving(engine, script(runs(ASKS), says("Done.", "1"))) as url,
        client(url) as api,
        client(url, "the-key-of-a-thief") as thief_api,
    ):
        owner, thief = HostedClient(api), HostedClient(thief_api)
        paused = await begin(owner)
        asked = [*owner.messages, answers({paused.content[-1].id: "stolen"})]
        told = set()
        for container in (paused.container.id, "container_" + "0" * 32):
            thief.container = container
            for messages in (asked, [{"role": "user", "content": "Look"}]):
                thief.messages = list(messages)
                with pytest.raises(anthropic.NotFoundError) as caught:
                    await thief.create()
                told.add(caught.value.message.replace(container, "ID").partition("'request_id'")[0])
        assert len(told) == 1
        owner.messages.append(answers({paused.content[-1].id: "1"}))
        assert text(await owner.create()) == "Done."


async def test_results_reach_only_calls_of_their_own_container(engine: Engine) -> None:
    async with serving(engine, script(runs(ASKS), says("Done.", "1"))) as url, client(url) as api:
        one, two = HostedClient(api), HostedClient(api)
        first, second = await begin(one), await begin(two)
        one.messages.append(answers({first.content[-1].id: "1"}))
        stolen, one.container = one.container, two.container
        with pytest.raises(anthropic.BadRequestError, match="no code of the id"):
            await one.create()
        one.container = stolen
        # The right code, and the call of another.
        forged = {"type": "tool_use", "id": second.content[-1].id, "name": "query_sales", "input": {}}
        forged["caller"] = first.content[-1].caller.model_dump()
        given, one.messages = one.messages, [*one.messages[:1]]
        one.messages.append({"role": "assistant", "content": [first.content[0], forged]})
        one.messages.append(answers({second.content[-1].id: "forged"}))
        with pytest.raises(anthropic.BadRequestError, match="belongs to no call of the code that waits"):
            await one.create()
        one.messages = given
        assert text(await one.create()) == "Done."


async def test_code_cannot_call_a_tool_that_is_for_the_model_alone(engine: Engine) -> None:
    async with serving(engine, script(runs(FORGES), says("Refused.", "UnknownTool"))) as url, client(url) as api:
        last = await HostedClient(api, tools=[CODE, SALES, NOW]).run("Go")
        assert text(last) == "Refused."


async def test_calls_that_code_floods_the_client_with_are_bounded(engine: Engine) -> None:
    floods = (
        "import asyncio\nbig, small = {'region': 'x' * 3_000_000}, {'region': 'r'}\n"
        "calls = [query_sales(big) for _ in range(6)] + [query_sales(small) for _ in range(1100)]\n"
        "made = await asyncio.gather(*calls, return_exceptions=True)\n"
        "print({getattr(one, 'type', one) for one in made})"
    )
    async with serving(engine, script(runs(floods), says("Bounded.", "BudgetExceeded"))) as url, client(url) as api:
        program = HostedClient(api)
        last = await program.run("Go", {"query_sales": lambda region: "ok"})
        assert text(last) == "Bounded."
        assert sum(map(len, program.pauses)) <= 1000
        for calls in program.pauses:
            assert sum(len(call.input["region"]) for call in calls) <= 16 * 1024 * 1024


async def test_a_short_schema_that_means_a_long_one_does_not_stall_the_server(engine: Engine) -> None:
    definitions = {**BOMB, "d40": {"type": "string"}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    async with serving(engine, script(says("Hello."))) as url, client(url) as api:
        began = time.monotonic()
        await HostedClient(api, tools=[CODE, {**SALES, "input_schema": schema}]).run("Go")
        assert time.monotonic() - began < 20
