"""Values of secrets are found in what tools print, in the forms in which programs write them."""

from __future__ import annotations

import base64
import html
import json
import re
import shlex
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote, quote_plus, urlencode

import pytest
from pydantic import SecretStr

from atoll.bundles.workspace import MAX_LOG_BYTES, WorkspaceInstance
from atoll.server.redaction import SecretRedaction
from atoll.tools.tool import ImagePart, TextPart, ToolResult

VALUE = "p'ss <wörd>/+ \"&%\n=41c7f0a9"
PLAIN = "ghp_41c7f0a9-77be0d13"
KEY = "-----BEGIN PRIVATE KEY-----\n" + "\n".join(f"{number}{'MC4CAQAwBQYDK2Vw' * 3}" for number in range(4))


def redaction(**values: str) -> SecretRedaction:
    return SecretRedaction({name: SecretStr(value) for name, value in values.items()})


def wrapped(text: str) -> str:
    return base64.encodebytes(text.encode()).decode()


@pytest.mark.parametrize("value", [VALUE, PLAIN, "sixsix", "k" * 3000], ids=["odd", "token", "short", "long"])
@pytest.mark.parametrize(
    "write",
    [
        lambda value: value,
        repr,
        json.dumps,
        lambda value: json.dumps({"a": value}, ensure_ascii=False),
        lambda value: json.dumps(json.dumps({"a": value})),
        lambda value: json.dumps(value).replace("/", "\\/"),
        html.escape,
        shlex.quote,
        lambda value: "'" + value.replace("'", "'\\''") + "'",
        quote,
        quote_plus,
        lambda value: re.sub("%..", lambda found: found[0].lower(), quote(value, safe="")),
        lambda value: urlencode({"a": value}),
        lambda value: value.encode().hex(),
        lambda value: value.encode().hex().upper(),
        lambda value: "\n".join(textwrap.wrap(value.encode().hex(), 60)),
        lambda value: base64.b64encode(value.encode()).decode(),
        lambda value: base64.urlsafe_b64encode(value.encode()).decode().rstrip("="),
        lambda value: "Basic " + base64.b64encode(f"user:{value}".encode()).decode(),
        lambda value: "Basic " + base64.b64encode(f"users:{value}@host".encode()).decode(),
        lambda value: base64.b64encode(f"a long user:{value}, and more".encode()).decode(),
        lambda value: quote(base64.b64encode(f"u:{value}".encode()).decode(), safe=""),
        lambda value: wrapped(f"somewhere in a long text of several lines, {value}, and the rest of this text"),
        lambda value: json.dumps(wrapped(f"somewhere in a long text of several lines, {value}, and the rest")),
    ],
)
async def test_a_value_is_found_as_programs_write_it(write: Callable[[str], str], value: str) -> None:
    written = f"before {write(value)} after"
    shown = await redaction(OTHER="of another", TOKEN=value).text(written)
    assert "[the secret TOKEN]" in shown, written
    assert shown.startswith("before ")
    assert shown.endswith(" after")
    assert write(value) not in shown


async def test_lines_of_a_key_are_found_by_themselves() -> None:
    printed = textwrap.indent(KEY, "  > ")
    shown = await redaction(KEY=KEY).text(printed)
    assert shown.splitlines() == ["  > -----BEGIN PRIVATE KEY-----", *["  > [the secret KEY]"] * 4]


async def test_text_without_a_value_stays_as_it_is() -> None:
    text = "".join(map(chr, range(1, 0x300))) * 30 + base64.b64encode(bytes(range(256))).decode()
    result = ToolResult(content=(TextPart(text=text), ImagePart(data="aGk=", mime_type="image/png")))
    found = redaction(TOKEN=PLAIN, ODD=VALUE, SHORT="abc")
    assert await found.result(result) == result
    assert await found.text("abc") == "abc"  # too short to be looked for


async def test_all_parts_of_a_result_are_searched() -> None:
    image = base64.b64encode(f"PNG {PLAIN} PNG".encode()).decode()
    result = ToolResult(
        content=(TextPart(text=f"<{PLAIN}>"), ImagePart(data=image, mime_type="image/png")),
        structured={"rows": [{PLAIN: [f"a{PLAIN}b", 5, None]}]},
    )
    shown = await redaction(TOKEN=PLAIN).result(result)
    assert shown.content == (
        TextPart(text="<[the secret TOKEN]>"),
        TextPart(text="[an image with the value of a secret in it]"),
    )
    assert shown.structured == {"rows": [{"[the secret TOKEN]": ["a[the secret TOKEN]b", 5, None]}]}


NOTES = (
    " … ",
    "\n[5000 bytes left out: 1 to 5001 of 10000]\n",
    "[5000 of 10000 bytes left out here: see the file]\n",
    "\n[7 characters are left out]\n",
)


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("columns", [10, 1000])
@pytest.mark.parametrize(
    "core",
    [PLAIN, PLAIN.encode().hex(), base64.b64encode(PLAIN.encode()).decode()[: len(PLAIN) * 8 // 6]],
    ids=["as it is", "hex", "base64"],
)
async def test_a_part_of_a_value_where_a_text_was_cut_is_found(note: str, columns: int, core: str) -> None:
    found = redaction(TOKEN=PLAIN, OTHER="other-value-1234")
    written = core if core == PLAIN else "\n".join(textwrap.wrap(core, columns))
    for cut in range(len(written) + 1):
        before, behind = f"said {written[:cut]}{note}the rest", f"the rest{note}{written[cut:]} and so on"
        for text in (before, behind, f"{before} {behind}"):
            shown = await found.text(text)
            packed = "".join(shown.split())
            assert not [at for at in range(len(core) - 4) if core[at : at + 4] in packed], (cut, shown)
            assert note.strip() in shown
            assert "the rest" in shown


async def test_a_log_that_begins_within_a_value_shows_no_part_of_it() -> None:
    made = WorkspaceInstance(external_id="wsi_1", state="running", created_at=datetime.now(UTC))
    rest = "z" * MAX_LOG_BYTES
    for left in range(4, len(PLAIN)):
        log = (PLAIN + rest)[len(PLAIN) - left :][:MAX_LOG_BYTES]
        shown = (await redaction(TOKEN=PLAIN).instance(made.model_copy(update={"log": log}))).log
        assert shown == f"[a part of the secret TOKEN]{rest[: MAX_LOG_BYTES - left]}"
    printing = made.model_copy(update={"log": f"key: {PLAIN[:12]}"})
    assert (await redaction(TOKEN=PLAIN).instance(printing)).log == "key: [a part of the secret TOKEN]"
    short = made.model_copy(update={"log": f"{PLAIN[4:]} is a part\n"})
    assert (await redaction(TOKEN=PLAIN).instance(short)).log == short.log


async def test_a_part_of_a_value_at_an_end_is_found_where_that_may_be_cut() -> None:
    found = redaction(TOKEN=PLAIN)
    for cut in range(4, len(PLAIN) - 4):
        assert await found.text(f"{PLAIN[cut:]} log", begins_late=True) == "[a part of the secret TOKEN] log"
        assert await found.text(f"log {PLAIN[:cut]}", ends_early=True) == "log [a part of the secret TOKEN]"
        whole = f"{PLAIN[cut:]} log {PLAIN[:cut]}"
        assert await found.text(whole) == whole


async def test_one_value_within_another_is_found_with_it() -> None:
    shown = await redaction(A="token-1234", B="prefix-token-1234-suffix").text("prefix-token-1234-suffix token-1234")
    assert shown == "[the secret B] [the secret A]"


async def test_many_secrets_and_large_results_do_not_stop_the_server() -> None:
    """64 values and 8 MiB: other work goes on every few milliseconds."""
    found = redaction(**{f"S{number}": f"value-of-{number}-{'x' * 500}" for number in range(64)})
    text, longest, last = "some text of a tool, " * 400_000, 0.0, time.monotonic()
    searching = found.text(text).__await__()
    steps = 0
    for _ in searching:  # each time it yields to the loop
        now = time.monotonic()
        longest, last, steps = max(longest, now - last), now, steps + 1
    assert steps > 100
    print(f"{steps} steps, the longest {longest * 1000:.0f} ms")
