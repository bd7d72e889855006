"""Files of sandboxes as resources, whatever they are and however they are asked for."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from atoll import Engine
from tests.mcp.serving import listening, shell

PNG = b"\x89PNG\r\n\x1a\n\x00\x01"
MAKE = r"""
printf 'text\n' > plain; printf '{"a": 1}' > data.json; printf '\211PNG\r\n\032\n\000\001' > image.txt; : > empty
printf 'text\n' > picture.png; printf 'x' > 'a b#c?d%e'; printf 'x' > "$(printf 'caf\351')"; mkdir dir; mkfifo fifo
ln -s /proc/sys/kernel/hostname link; ln -s loop loop; truncate -s 4194305 large; truncate -s 4194304 fits
printf 'closed' > closed; chmod 0 closed; printf 'x' > "$(printf 'a\033[2J\342\200\256b\nc')"
"""


@pytest.fixture
async def client(host: Engine) -> AsyncIterator[Client]:
    # By itself this client takes no event of more than 1 MiB.
    async with listening(host) as url, Client(streamable_http_client(url, max_sse_event_size=None)) as client:
        await shell(client, MAKE)
        yield client


async def test_files_are_given_as_text_or_bytes_with_their_type(client: Client) -> None:
    async def read(path: str) -> tuple[str | None, str | bytes]:
        (found,) = (await client.read_resource(f"sandbox://default{path}")).contents
        assert found.uri == f"sandbox://default{path}"
        return found.mime_type, base64.b64decode(found.blob) if hasattr(found, "blob") else found.text

    assert await read("/home/user/plain") == ("text/plain", "text\n")
    assert await read("/home/user/data.json") == ("application/json", '{"a": 1}')
    assert await read("/home/user/image.txt") == ("image/png", PNG)
    assert await read("/home/user/picture.png") == ("text/plain", "text\n")
    assert await read("/home/user/empty") == ("text/plain", "")
    assert await read("/home/user/a%20b%23c%3Fd%25e") == ("text/plain", "x")
    assert await read("/home/user/caf%E9") == ("text/plain", "x")
    assert await read("/home%2Fuser%2Fplain") == ("text/plain", "text\n")
    # The sandbox's own file, and not this machine's: there is no way out of its root.
    name = (await shell(client, "hostname")).strip()
    assert (await read("/home/user/link"))[1] == f"{name}\n"
    assert (await read("/../../../../../../proc/sys/kernel/hostname"))[1] == f"{name}\n"
    fits = (await read("/home/user/fits"))[1]
    assert isinstance(fits, bytes)
    assert len(fits) == 4194304


REFUSED = (
    ("sandbox://default/home/user/none", "no such file"),
    ("sandbox://default/home/user/dir", "directory"),
    ("sandbox://default/home/user/fifo", "not a regular file"),
    ("sandbox://default/dev/zero", "not a regular file"),
    ("sandbox://default/home/user/loop", "symbolic links"),
    ("sandbox://default/home/user/large", "more than 4 MiB"),
    ("sandbox://default/home/user/closed", "denied"),
    ("sandbox://default/home/user/x%00y", "not the URI of a file of a sandbox"),
    ("sandbox://default", "not the URI of a file of a sandbox"),
    ("sandbox:///etc/hostname", "not the URI of a file of a sandbox"),
    ("file:///etc/hostname", "not the URI of a file of a sandbox"),
    ("sandbox://other/etc/hostname", "no sandbox is named 'other' (sandboxes: 'default')"),
    ("sandbox://../etc/hostname", "'..'"),
    ("sandbox://Default/etc/hostname", "'Default'"),
)


async def test_a_resource_that_cannot_be_read_is_an_error_with_a_reason(client: Client) -> None:
    for uri, said in REFUSED:
        with pytest.raises(MCPError) as caught:
            await client.read_resource(uri)
        assert said in caught.value.message, uri
        assert caught.value.code in (-32602, -32002), uri


async def test_files_at_home_are_listed_and_can_be_read_as_they_are_listed(client: Client) -> None:
    listed = {each.uri: each for each in (await client.list_resources()).resources}
    assert listed["sandbox://default/home/user/plain"].size == 5
    assert "sandbox://default/home/user/fifo" not in listed
    assert listed["sandbox://default/home/user/a%1B%5B2J%E2%80%AEb%0Ac"].name == "default:a[2Jbc"
    for uri in listed:
        if not uri.endswith(("/large", "/closed")):
            await client.read_resource(uri)
    (template,) = (await client.list_resource_templates()).resource_templates
    assert template.uri_template == "sandbox://{sandbox}/{+path}"
