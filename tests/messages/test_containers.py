"""Containers: when they end, what survives a client that is gone, and how many there may be."""

from __future__ import annotations

from typing import Any

import anthropic
import anyio
import pytest

from atoll import Engine
from tests.messages.serving import CODE, SALES, HostedClient, answers, blocks, client, runs, says, script, serving, text

pytestmark = pytest.mark.anyio
ASKS = "row = await query_sales({'region': 'east'})\nprint('got', row)"
OTHER = {**SALES, "name": "get-stock", "description": "What is left."}


async def begin(program: HostedClient, prompt: str = "Go") -> Any:
    program.messages.append({"role": "user", "content": prompt})
    return await program.create()


async def gone(engine: Engine) -> None:
    """Wait until no sandbox of a session is left."""
    with anyio.fail_after(30):
        while await engine.list("code-"):
            await anyio.sleep(0.02)


async def test_a_container_that_no_request_uses_expires_with_the_code_that_waits_in_it(host: Engine) -> None:
    async with serving(host, script(runs(ASKS)), idle_s=0.3) as url, client(url) as api:
        program = HostedClient(api)
        paused = await begin(program)
        await gone(host)
        program.messages.append(answers({paused.content[-1].id: "1"}))
        with pytest.raises(anthropic.NotFoundError, match="it has expired, or was never made"):
            await program.create()


async def test_the_end_of_the_server_ends_all_containers(host: Engine) -> None:
    async with serving(host, script(runs(ASKS))) as url, client(url) as api:
        await begin(HostedClient(api))
        await begin(HostedClient(api))
        assert len(await host.list("code-")) == 2
    assert await host.list("code-") == []


async def test_an_answer_that_was_lost_can_be_asked_for_again(host: Engine) -> None:
    async with serving(host, script(runs(ASKS), says("Done.", "got 1"))) as url, client(url) as api:
        program = HostedClient(api)
        paused = await begin(program)
        program.messages.append(answers({paused.content[-1].id: "1"}))
        first = await program.create()
        del program.messages[-1]
        again = await program.create()
        assert text(first) == text(again) == "Done."
        assert again.content[0].content.stdout == "got 1\n"


async def test_code_runs_on_when_the_client_leaves_while_it_is_resumed(host: Engine) -> None:
    slow = "await query_sales({'region': 'east'})\nimport time; time.sleep(0.5); x = 1\nprint('got', x)"
    async with serving(host, script(runs(slow), says("Done.", "got 1"))) as url, client(url) as api:
        program = HostedClient(api)
        paused = await begin(program)
        program.messages.append(answers({paused.content[-1].id: "1"}))
        with anyio.move_on_after(0.2):
            await program.create()
        last: Any = None
        with anyio.fail_after(30):
            while last is None:  # until the server has noticed
                try:
                    last = await program.create()
                except anthropic.ConflictError:
                    await anyio.sleep(0.02)
        assert text(last) == "Done."


async def test_a_client_that_leaves_before_it_knows_its_container_leaves_none(host: Engine) -> None:
    async with serving(host, script(runs("while True: pass"))) as url, client(url) as api:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(begin, HostedClient(api))
            with anyio.fail_after(30):
                while not await host.list("code-"):
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        await gone(host)


async def test_a_new_prompt_interrupts_the_code_that_waits_and_variables_stay(host: Engine) -> None:
    model = script(runs(f"kept = 5\n{ASKS}"), runs("print(kept)", result=[{"error": True}]), says("5.", "5"))
    async with serving(host, model) as url, client(url) as api:
        program = HostedClient(api)
        paused = await begin(program)
        waiting, program.messages = program.messages, program.messages[:1]
        code = [block for block in paused.content if block.type == "server_tool_use"]
        program.messages.append({"role": "assistant", "content": code})
        last = await begin(program, "Never mind")
        assert text(last) == "5."
        program.messages = [*waiting, answers({paused.content[-1].id: "1"})]
        with pytest.raises(anthropic.BadRequestError, match="it was interrupted or has ended"):
            await program.create()


async def test_tools_may_change_between_turns_and_names_need_not_be_identifiers(host: Engine) -> None:
    model = script(
        runs("x = 1"), says("One."), runs("print(x, await get_stock({'region': 'east'}))"), says("Two.", "1 7")
    )
    async with serving(host, model) as url, client(url) as api:
        program = HostedClient(api)
        await program.run("Begin")
        program.options["tools"] = [CODE, OTHER]
        assert text(await program.run("Look", {"get-stock": lambda region: "7"})) == "Two."
        assert program.pauses[0][0].name == "get-stock"


async def test_there_may_be_so_many_containers_and_no_more(host: Engine) -> None:
    model = script(runs(ASKS), says("Too many.", "too many sandboxes now"))
    async with serving(host, model, containers_per_key=1, containers=2) as url:
        async with client(url) as api:
            await begin(HostedClient(api))
            second = await begin(HostedClient(api))
            assert blocks(second) == ["server_tool_use", "code_execution_tool_result", "text"]
            assert second.content[1].content.error_code == "too_many_requests"
        async with client(url, "another-key") as api:
            assert (await begin(HostedClient(api))).stop_reason == "tool_use"


async def test_a_sandbox_that_dies_is_told_and_replaced(host: Engine) -> None:
    again = runs("print('new')", result=[{"error": True}])
    async with serving(host, script(runs(ASKS), again, again, says("New.", "new"))) as url, client(url) as api:
        program = HostedClient(api)
        paused = await begin(program)
        before = program.container
        [sandbox] = await host.list("code-")
        await host.destroy(sandbox.name)
        program.messages.append(answers({paused.content[-1].id: "1"}))
        last = await program.create()
        lost, unavailable, new = (one.content for one in last.content if one.type == "code_execution_tool_result")
        assert (lost.return_code, unavailable.error_code, new.stdout) == (1, "unavailable", "new\n")
        assert program.container != before
