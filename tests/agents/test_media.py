"""What a model is sent of the images, sounds, films and documents that a tool has returned."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import pydantic_ai.models
import pytest
from pydantic_ai.messages import (
    BinaryContent,
    DocumentUrl,
    ImageUrl,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

import atoll
from atoll.agents import media
from atoll.agents.history import History
from atoll.agents.loop import tool_return
from atoll.bundles.results import MAX_MEDIA_CHARS, read_result
from atoll.bundles.workspace import BundleTool
from atoll.contract.errors import ModelFailed
from atoll.tools.tool import GivenArguments, ToolResult, ToolSet
from tests.agents.conftest import Anthropic
from tests.agents.messages_api import Refuse, Say
from tests.agents.other_apis import DONE, OtherApi, serving

pytestmark = pytest.mark.anyio

PNG, PDF, WAV, MP4 = (base64.b64encode(each).decode() for each in (b"\x89PNG\r\n", b"%PDF-1.7", b"RIFF", b"ftyp"))
PARTS = [
    {"kind": "text", "content": "Here:"},
    {"kind": "image-url", "url": f"data:image/png;base64,{PNG}"},
    {"kind": "document-url", "url": f"data:application/pdf;base64,{PDF}"},
    {"kind": "audio-url", "url": f"data:audio/wav;base64,{WAV}"},
    {"kind": "video-url", "url": f"data:video/mp4;base64,{MP4}"},
    {"kind": "image-url", "url": "https://example.com/a.png"},
    {"kind": "document-url", "url": "https://example.com/a.pdf"},
    {"kind": "document-url", "url": "https://example.com/a.txt"},
    {"kind": "audio-url", "url": "https://example.com/a.mp3"},
    {"kind": "video-url", "url": "https://example.com/a.mp4"},
    {"kind": "image-url", "url": "http://169.254.169.254/latest"},
    {"kind": "web-url", "url": "https://example.com/"},
    {"kind": "api-url", "url": "https://example.com/v1"},
]
REFUSED = Refuse(400, "invalid_request_error", "the image cannot be fetched")


def returning(parts: list[dict[str, str]]) -> ToolSet:
    async def handle(_given: GivenArguments, _context: object) -> ToolResult:
        return read_result({"ok": True, "parts": parts})

    made = BundleTool(
        name="shell", description="Look.", input=GivenArguments, result=None, handler=handle, schema={"type": "object"}
    )
    return ToolSet([made])


def contents(messages: list[ModelMessage]) -> list[list[Any]]:
    return [part.content for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]  # type: ignore[misc]


@pytest.fixture(autouse=True)
def downloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """URLs that this process would have fetched: none, in every test."""
    fetched: list[str] = []

    async def refuse(item: Any, **_: object) -> None:
        fetched.append(item.url)
        raise AssertionError(f"{item.url} is fetched here")

    for module in ("openai", "anthropic"):
        __import__(f"pydantic_ai.models.{module}")
        monkeypatch.setattr(getattr(pydantic_ai.models, module), "download_item", refuse)
    yield fetched
    assert fetched == []


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Take the servers of the tests for the providers' own."""
    return lambda: monkeypatch.setattr(media, "_FETCHING", dict.fromkeys(("anthropic", "openai"), "127.0.0.1"))


async def test_a_script_is_given_every_kind_as_what_it_is() -> None:
    seen: list[list[ModelMessage]] = []

    async def play(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        seen.append(messages)
        if len(seen) == 1:
            return ModelResponse([ToolCallPart("shell", {})])
        return ModelResponse([TextPart("done")])

    await atoll.Agent(FunctionModel(play), returning(PARTS)).run("Look")
    (parts,) = contents(seen[-1])
    assert [f"{type(each).__name__} {getattr(each, 'media_type', each)}" for each in parts] == [
        "str Here:",
        "BinaryImage image/png",
        "BinaryContent application/pdf",
        "BinaryContent audio/wav",
        "BinaryContent video/mp4",
        "ImageUrl image/png",
        "DocumentUrl application/pdf",
        "DocumentUrl text/plain",
        "AudioUrl audio/mpeg",
        "VideoUrl video/mp4",
        "ImageUrl application/octet-stream",
        "str [web] https://example.com/",
        "str [api] https://example.com/v1",
    ]
    assert not any(getattr(each, "force_download", False) for each in parts)
    assert contents(ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(seen[-1]))) == [parts]


async def result_for_claude(anthropic: Anthropic) -> tuple[list[dict[str, Any]], list[str]]:
    """What Anthropic's client sends of the result: its blocks, and which of them are text."""
    api = anthropic([Say("I look.", [("shell", {})]), Say("Seen.")])
    answer = await atoll.Agent("anthropic:claude-of-the-tests", returning(PARTS)).run("Look")
    assert (answer.text, api.complaints) == ("Seen.", [])
    (block,) = [block for block in api.requests[1]["messages"][-1]["content"] if block["type"] == "tool_result"]
    return block["content"], [each["text"] for each in block["content"] if each["type"] == "text"]


async def test_claude_is_sent_images_and_pdfs_and_text_of_the_rest(anthropic: Anthropic) -> None:
    blocks, texts = await result_for_claude(anthropic)
    sources = [each["source"] for each in blocks if each["type"] != "text"]
    assert sources == [
        {"type": "base64", "media_type": "image/png", "data": PNG},
        {"type": "base64", "media_type": "application/pdf", "data": PDF},
    ]
    assert texts == [
        "Here:",
        "[audio: audio/wav, 4 bytes]",
        "[video: video/mp4, 4 bytes]",
        "[image] https://example.com/a.png",
        "[document] https://example.com/a.pdf",
        "[document] https://example.com/a.txt",
        "[audio] https://example.com/a.mp3",
        "[video] https://example.com/a.mp4",
        "[image] http://169.254.169.254/latest",
        "[web] https://example.com/",
        "[api] https://example.com/v1",
    ]


async def test_anthropics_own_server_fetches_images_and_pdfs(anthropic: Anthropic, own: Callable[[], None]) -> None:
    own()
    blocks, texts = await result_for_claude(anthropic)
    assert [(each["type"], each["source"]) for each in blocks if each["type"] != "text"][2:] == [
        ("image", {"type": "url", "url": "https://example.com/a.png"}),
        ("document", {"type": "url", "url": "https://example.com/a.pdf"}),
    ]
    assert "[document] https://example.com/a.txt" in texts
    assert "[image] http://169.254.169.254/latest" in texts


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherApi]:
    with serving() as api:
        monkeypatch.setenv("OPENAI_API_KEY", "test-key")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{api.url}/v1")
        yield api


@pytest.mark.parametrize(
    ("model", "is_own", "shown", "hidden"),
    [
        ("openai-chat:gpt-of-the-tests", True, [PNG, PDF, '{"url": "https://example.com/a.png"}'], [WAV, MP4]),
        ("openai-chat:gpt-audio", True, [PNG, PDF, f'{{"data": "{WAV}", "format": "wav"}}'], [MP4]),
        ("openai-chat:of-another-server", False, [PNG], [PDF, WAV, MP4, '"https://example.com/a.png"']),
        (
            "openai-responses:gpt-of-the-tests",
            True,
            [PNG, PDF, '"image_url": "https://example.com/a.png"', '"file_url": "https://example.com/a.pdf"'],
            [WAV, MP4, '"https://example.com/a.txt"'],
        ),
        ("openai-responses:of-another-server", False, [PNG], [PDF, WAV, MP4, '"https://example.com/a.png"']),
    ],
)
async def test_openais_models_are_sent_what_they_take(
    api: OtherApi, own: Callable[[], None], model: str, is_own: bool, shown: list[str], hidden: list[str]
) -> None:
    if is_own:
        own()
    answer = await atoll.Agent(model, returning(PARTS)).run("Look")
    assert answer.text == DONE
    sent = json.dumps(api.requests[-1])
    assert [each for each in shown if each not in sent] == []
    assert [each for each in hidden if each in sent] == []
    assert "[video] https://example.com/a.mp4" in sent
    assert '"http://169.254.169.254/latest"' not in sent


async def test_a_request_that_is_refused_for_what_a_tool_returned_is_sent_with_text(anthropic: Anthropic) -> None:
    api = anthropic([Say("I look.", [("shell", {})]), REFUSED, Say("Again.", [("shell", {})]), Say("Seen.")])
    history = History()
    answer = await atoll.Agent("anthropic:claude-of-the-tests", returning(PARTS[:3])).run("Look", history=history)
    assert (answer.text, api.complaints) == ("Seen.", [])
    _, refused, again, last = api.requests
    assert PNG in json.dumps(refused)
    assert "[image: image/png, 6 bytes]" in json.dumps(again)
    assert PNG not in json.dumps(again) + json.dumps(last)  # it would be refused each time
    assert PNG in history.dump()  # another model may be shown it


async def test_a_request_without_media_is_refused_once(anthropic: Anthropic) -> None:
    api = anthropic([Say("I look.", [("shell", {})]), REFUSED])
    with pytest.raises(ModelFailed, match="cannot be fetched"):
        await atoll.Agent("anthropic:claude-of-the-tests", returning(PARTS[:1])).run("Look")
    assert len(api.requests) == 2


def test_what_is_older_than_a_request_may_show_is_text() -> None:
    film = {"kind": "video-url", "url": "data:video/mp4;base64," + base64.b64encode(bytes(3 << 20)).decode()}
    result = read_result({"ok": True, "parts": [film, film]})
    given: list[ModelMessage] = [
        ModelRequest([tool_return(ToolCallPart("t", {}, str(n)), result, "success")]) for n in range(4)
    ]
    sent = media.shown(given, media.AcceptedMedia(is_any=True))
    kept = [isinstance(each, BinaryContent) for content in contents(sent) for each in content]
    assert sum(kept) == media.MAX_SENT_BYTES // (3 << 20)
    assert kept[-4:] == [True] * 4  # the newest
    assert [len(content) for content in contents(given)] == [2] * 4
    assert media.shown([], media.NOTHING) == []


def test_parts_that_are_all_text_are_one_text_a_part_a_line() -> None:
    result = read_result({"ok": True, "parts": [PARTS[0], PARTS[-2], {"kind": "text", "content": " "}]})
    assert tool_return(ToolCallPart("t", {}, "1"), result, "success").content == "Here:\n[web] https://example.com/"


def test_models_that_are_not_known_are_shown_images_only() -> None:
    from pydantic_ai.models.test import TestModel

    accepted = media.accepted_by(TestModel())
    assert accepted.takes(BinaryContent(b"x", media_type="image/png"))
    assert not accepted.takes(BinaryContent(b"x", media_type="application/pdf"))
    assert not accepted.takes(ImageUrl("https://example.com/a.png"))
    assert not accepted.takes(DocumentUrl("https://example.com/a.pdf"))


def test_what_is_larger_than_models_are_shown_is_described() -> None:
    size = MAX_MEDIA_CHARS * 3 // 4 + 3
    film = {"kind": "video-url", "url": "data:video/mp4;base64," + base64.b64encode(bytes(size)).decode()}
    picture = {**film, "kind": "image-url", "url": film["url"].replace("video/mp4", "image/png")}
    result = read_result({"ok": True, "parts": [film, picture]})
    assert result.text == (
        f"[video: video/mp4, {size} bytes] data:video/mp4;base64,{'A' * 78}…\n"
        f"[image: image/png, {size} bytes] data:image/png;base64,{'A' * 78}…"
    )
    assert [part.type for part in result.content if not isinstance(part, str)] == ["text", "text"]
