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
from urllib.parse import quote, quote_plus, urlencode

import pytest
from pydantic import SecretStr

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
