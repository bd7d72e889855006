"""Which requests are accepted, and how errors look to a client."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import pytest
from pydantic import SecretStr

from atoll import CodeConfig, Engine, InvalidRequest
from atoll.surfaces.messages import app, listen
from tests.messages.serving import CODE, KEY, NOW, SALES, client, says, script, serving

pytestmark = pytest.mark.anyio
BASE: dict[str, Any] = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "Hello"}]}
CALLER = {"type": "code_execution_20260120", "tool_id": "srvtoolu_1"}
RAN = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "code_execution", "input": {"code": "1"}}
USED = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}


def tool(**changes: Any) -> dict[str, Any]:
    return {**SALES, **changes}


def conversation(*blocks: dict[str, Any], then: Any = "Go on") -> list[dict[str, Any]]:
    asked = {"role": "user", "content": "Hello"}
    return [asked, {"role": "assistant", "content": list(blocks)}, {"role": "user", "content": then}]


def result(id: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": "x", **more}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"messages": []}, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "user", "content": " "}]}, "must end with a user message"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0: Input tag 'robot'"),
    ({"messages": conversation({"type": "text", "text": "Hi"})[:2]}, "must end with a user message"),
    ({"messages": conversation({"type": "web_search_tool_result"})}, "messages.1.content.0: Input tag"),
    ({"messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]}, "container_upload"),
    ({"mcp_servers": []}, "mcp_servers: Extra inputs are not permitted"),
    ({"temperature": 7}, "temperature: Input should be less than or equal to 1"),
    ({"tools": [CODE, tool(allowed_callers=[])]}, "tools.1.allowed_callers is empty"),
    ({"tools": [CODE, tool(allowed_callers=["code_execution_20250522"])]}, "allowed are direct, code_execution_2025"),
    ({"tools": [tool()]}, "query_sales: allowed_callers names code, which needs one of the tools code_execution_2025"),
    ({"tools": [{**CODE, "type": "code_execution_20250522"}, tool()]}, "needs one of the tools"),
    ({"tools": [CODE, tool(strict=True)]}, "tools.1.strict: a tool that code may call cannot be strict"),
    ({"tools": [CODE, tool(), tool()]}, "two tools are named 'query_sales'"),
    ({"tools": [CODE, tool(name="código")]}, "tools.1.name"),
    ({"tools": [CODE, tool(input_schema={"type": "string"})]}, "tools.1.input_schema"),
    ({"tools": [CODE, tool(input_schema={"type": "object", "properties": 3})]}, "input_schema.properties"),
    ({"tools": [{**CODE, "name": "python"}]}, "must be named 'code_execution'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not offered here"),
    ({"tools": [CODE, tool()], "tool_choice": {"type": "tool", "name": "query_sales"}}, "has no 'direct' among"),
    ({"tools": [CODE, tool()], "tool_choice": {"type": "tool", "name": "other"}}, "no tool is named 'other'"),
    ({"tools": [CODE], "tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
    (
        {"tools": [CODE, tool()], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "disable_parallel_tool_use: cannot be set",
    ),
    ({"container": {"skills": [{"type": "custom"}]}}, "there are no skills here"),
    ({"messages": conversation(USED)}, "tool_use ids without a tool_result in the next message: toolu_1"),
    ({"messages": conversation(USED, then=[result("toolu_2"), result()])}, "no tool_use before it has the id"),
    ({"messages": conversation(USED, USED, then=[result()])}, "two tool_use blocks have the id"),
    ({"messages": conversation({**USED, "caller": CALLER}, then=[result()])}, "no server_tool_use without a result"),
    (
        {"messages": conversation(RAN, {**USED, "caller": CALLER}, then=[result(), {"type": "text", "text": "and?"}])},
        "only tool_result blocks are allowed, not text",
    ),
    ({"messages": conversation(RAN, {**USED, "caller": CALLER}, then=[result()])}, "container_id is required when"),
    ({"messages": conversation({**RAN, "name": "bash_code_execution"})}, "Input should be 'code_execution'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "?"}}]}]},
        "is no base64",
    ),
]  # fmt: skip


async def test_a_bad_request_is_a_400_that_says_what_is_wrong(host: Engine) -> None:
    async with serving(host, script(says("Never."))) as url, client(url) as api:
        for changes, said in BAD:
            with pytest.raises(anthropic.BadRequestError) as caught:
                await api.messages.create(**BASE, extra_body=changes)
            body: Any = caught.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert said in body["error"]["message"], changes
            assert body["request_id"] == caught.value.request_id
        with pytest.raises(anthropic.BadRequestError):  # streaming too: nothing was streamed yet
            await api.messages.create(**{**BASE, "tools": [tool()], "stream": True})
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await api.messages.create(**BASE, container="container_of_nobody")
        with pytest.raises(anthropic.NotFoundError, match="messages are at /v1/messages"):
            await api.models.list()


async def test_a_request_without_code_execution_is_a_plain_one(host: Engine) -> None:
    model = script({"call": [{"tool": "now"}], "expect": {"instructions": ["Be brief."]}}, says("Noon.", "12:00"))
    async with serving(host, model) as url, client(url) as api:
        given: dict[str, Any] = {**BASE, "tools": [NOW], "system": [{"type": "text", "text": "Be brief."}]}
        first = await api.messages.create(**given)
        assert (first.stop_reason, first.container) == ("tool_use", None)
        [call] = first.content
        assert call.type == "tool_use"
        messages = [*BASE["messages"], {"role": "assistant", "content": first.content}]
        messages.append({"role": "user", "content": [result(call.id, content=[{"type": "text", "text": "12:00"}])]})
        last = await api.messages.create(**{**given, "messages": messages})
        assert (last.content[0].text, last.stop_reason) == ("Noon.", "end_turn")


async def test_requests_by_hand_are_refused_with_the_right_status(host: Engine) -> None:
    async with serving(host, script(says("Never."))) as url, httpx2.AsyncClient() as http:
        headers = {"anthropic-version": "2023-06-01", "x-api-key": KEY}
        path = f"{url}/v1/messages"
        for sent, status, kind in (
            ({"content": b"{"}, 400, "invalid_request_error"),
            ({"content": b"[]"}, 400, "invalid_request_error"),
            ({"content": b"[" * 100_000}, 400, "invalid_request_error"),
            ({"json": BASE, "headers": {"anthropic-version": ""}}, 400, "invalid_request_error"),
            ({"content": b" " * (32 * 1024 * 1024 + 1)}, 413, "request_too_large"),
            ({"json": BASE, "headers": {"host": "evil.example"}}, 421, "invalid_request_error"),
            ({"json": BASE, "headers": {"origin": "http://evil.example"}}, 403, "permission_error"),
        ):
            given: Any = {**sent, "headers": {**headers, **sent.get("headers", {})}}  # type: ignore[dict-item]
            answer = await http.post(path, **given)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), sent
            assert answer.headers["request-id"] == answer.json()["request_id"]
        assert (await http.get(path, headers=headers)).status_code == 405


async def test_with_tokens_only_clients_that_have_one_are_let_in(host: Engine) -> None:
    tokens = [SecretStr("the-first-of-two-tokens"), SecretStr("the-other-of-two-tokens")]
    async with serving(host, script(says("Hello.")), token=tokens) as url:
        for token in tokens:
            async with client(url, token.get_secret_value()) as api:
                await api.messages.create(**BASE)
            async with anthropic.AsyncAnthropic(base_url=url, auth_token=token.get_secret_value(), api_key=None) as api:
                await api.messages.create(**BASE)
        async with client(url, "another") as api:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
                await api.messages.create(**BASE)


async def test_other_machines_need_a_token_and_hosted_clients_expect_python(host: Engine) -> None:
    model = script(says("Never."))
    with pytest.raises(InvalidRequest, match="ATOLL_MESSAGES_TOKEN"):
        await listen(host, model, "0.0.0.0", 0)
    with pytest.raises(InvalidRequest, match="hosted clients expect python"):
        app(host, model, config=CodeConfig(language="bash"))
