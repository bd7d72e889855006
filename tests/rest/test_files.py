"""Files over REST: contents both ways, names of any bytes, conditions and ranges, finding, watching, archives."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
import pytest

from atoll.testing.waiting import eventually
from tests.rest.serving import Served, read_events

BAD_NAME = b"bad\xff\n\x1b[31m\xe2\x80\xae.txt"
BAD_BASE64 = base64.b64encode(BAD_NAME).decode()


@pytest.fixture
def files(box: str) -> str:
    return f"/api/v1/sandboxes/{box}/files"


async def _put(client: httpx2.AsyncClient, files: str, path: str, data: bytes = b"", **options: Any) -> None:
    answer = await client.put(files, params={"path": path, **options}, content=data)
    assert answer.status_code == 200, answer.text
    assert answer.json()["size"] >= len(data)


async def test_a_file_is_written_read_and_removed(client: httpx2.AsyncClient, files: str) -> None:
    data = os.urandom(3_000_000)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 100_000):
            yield data[start : start + 100_000]

    blob = "/home/user/deep/er/blob"
    relative = await client.put(files, params={"path": "deep/er/blob", "owner": "root"}, content=chunks())
    assert relative.status_code == 400
    written = await client.put(files, params={"path": blob, "mode": "0600", "owner": "root"}, content=chunks())
    assert written.json() == {"size": len(data)}
    stat = (await client.get(f"{files}/stat", params={"path": "deep/er/blob"})).json()
    assert (stat["kind"], stat["size"], stat["mode"], stat["uid"]) == ("file", len(data), 0o600, 0)
    read = await client.get(files, params={"path": blob, "user": "root"})
    assert hashlib.sha256(read.content).digest() == hashlib.sha256(data).digest()
    assert read.headers["content-length"] == str(len(data))
    refused = await client.get(files, params={"path": "deep/er/blob"})
    assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
    exists = await client.put(files, params={"path": "deep/er/blob", "exclusive": "true"}, content=b"")
    assert (exists.status_code, exists.json()["code"]) == (409, "path_exists")
    full = await client.delete(files, params={"path": "deep"})
    assert full.status_code == 400
    assert (await client.delete(files, params={"path": "deep", "recursive": "true"})).status_code == 204
    gone = await client.get(files, params={"path": "deep/er/blob"})
    assert (gone.status_code, gone.json()["code"]) == (404, "path_not_found")
    assert (await client.delete(files, params={"path": "deep", "missing_ok": "true"})).status_code == 204


async def test_appending_adds_and_an_upload_that_breaks_off_changes_nothing(
    client: httpx2.AsyncClient, served: Served, files: str
) -> None:
    await _put(client, files, "kept.txt", b"one")
    await _put(client, files, "kept.txt", b"two", append="true")

    async def broken() -> AsyncIterator[bytes]:
        yield b"never " * 10_000
        raise ConnectionAbortedError

    async with served.client() as other:
        with pytest.raises(ConnectionAbortedError):
            await other.put(files, params={"path": "kept.txt"}, content=broken())
    assert (await client.get(files, params={"path": "kept.txt"})).content == b"onetwo"


async def test_a_file_never_is_a_page_of_the_server(client: httpx2.AsyncClient, files: str) -> None:
    await _put(client, files, "page.html", b"<script>alert(1)</script>")
    answer = await client.get(files, params={"path": "page.html"})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''page.html"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    tar = await client.get(f"{files}/archive", params={"path": "page.html"})
    assert tar.headers["content-type"] == "application/x-tar"
    assert tar.headers["content-security-policy"].startswith("sandbox")
    odd = await client.put(files, params={"path": 'a"\r\nSet-Cookie: b=c'}, content=b"x")
    assert odd.status_code == 200
    shown = await client.get(files, params={"path": 'a"\r\nSet-Cookie: b=c'})
    assert "set-cookie" not in shown.headers
    assert shown.headers["content-disposition"] == "attachment; filename*=UTF-8''a%22%0D%0ASet-Cookie%3A%20b%3Dc"
    await client.delete(files, params={"path": 'a"\r\nSet-Cookie: b=c'})


async def test_ranges_and_conditions(client: httpx2.AsyncClient, box: str, files: str) -> None:
    await _put(client, files, "ten", b"0123456789")
    await client.post(f"/api/v1/sandboxes/{box}/exec", json={"command": "touch -d '1 hour ago' ten"})

    async def get(**headers: str) -> httpx2.Response:
        return await client.get(
            files, params={"path": "ten"}, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )

    whole = await get()
    etag = whole.headers["etag"]
    assert not etag.startswith("W/")
    for asked, part, shown in (
        ("bytes=0-0", b"0", "0-0"),
        ("bytes=3-5", b"345", "3-5"),
        ("bytes=7-", b"789", "7-9"),
        ("bytes=-2", b"89", "8-9"),
        ("bytes=8-99999999999999999999"[:27], b"89", "8-9"),
    ):
        answer = await get(range=asked)
        assert (answer.status_code, answer.content) == (206, part), asked
        assert answer.headers["content-range"] == f"bytes {shown}/10"
    for ignored in ("bytes=5-3", "bytes=-", "bytes=1-2,4-5", "lines=1-2", "bytes=a-b"):
        assert (await get(range=ignored)).status_code == 200
    for beyond in ("bytes=10-", "bytes=-0"):
        refused = await get(range=beyond)
        assert (refused.status_code, refused.headers["content-range"]) == (416, "bytes */10")
        assert refused.json()["code"] == "range_not_satisfiable"
    assert (await get(if_none_match=etag)).status_code == 304
    assert (await get(if_none_match=f'"other", W/{etag}')).status_code == 304
    assert (await get(range="bytes=0-1", if_range=etag)).status_code == 206
    assert (await get(range="bytes=0-1", if_range='"other"')).status_code == 200
    head = await client.head(files, params={"path": "ten"})
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "10", b"")
    await _put(client, files, "ten", b"9876543210")
    assert (await get(if_none_match=etag)).status_code == 200
    assert (await get()).headers["etag"].startswith("W/"), "it was changed just now"


async def test_a_file_of_unknown_size_is_sent_whole(client: httpx2.AsyncClient, files: str) -> None:
    answer = await client.get(files, params={"path": "/proc/version"})
    assert answer.status_code == 200
    assert answer.text.startswith("Linux")
    empty = await client.get(files, params={"path": "/dev/null"})
    assert empty.status_code == 400, "it is no regular file"


async def test_names_of_any_bytes_are_shown_and_found_again(client: httpx2.AsyncClient, box: str, files: str) -> None:
    made = await client.post(f"{files}/mkdir", json={"path": "odd"})
    assert made.status_code == 204
    odd = base64.b64encode(b"odd/" + BAD_NAME).decode()
    assert (await client.put(files, params={"path_base64": odd}, content=b"found")).status_code == 200
    assert (await client.get(files, params={"path_base64": odd})).content == b"found"
    link = {"path": "odd/link", "target_base64": BAD_BASE64}
    assert (await client.post(f"{files}/symlink", json=link)).status_code == 204
    [entry, linked] = (await client.get(f"{files}/list", params={"path": "odd"})).json()["items"]
    assert (entry["name"], entry["name_base64"]) == (BAD_NAME.decode("utf-8", "replace"), BAD_BASE64)
    assert (linked["name"], linked["name_base64"]) == ("link", None)
    assert (linked["kind"], linked["target_base64"]) == ("symlink", BAD_BASE64)
    globbed = (await client.get(f"{files}/glob", params={"pattern": "bad*", "path": "odd"})).json()["items"]
    assert [each["name_base64"] for each in globbed] == [BAD_BASE64]
    found = (await client.get(f"{files}/grep", params={"pattern": "fo+und", "path": "odd"})).json()["items"]
    assert [(each["path_base64"], each["line"], each["text"]) for each in found] == [(BAD_BASE64, 1, "found")]
    missing = base64.b64encode(b"odd/\xfe").decode()
    for request in (
        client.get(files, params={"path_base64": missing}),
        client.get(f"{files}/stat", params={"path_base64": missing}),
        client.post(f"{files}/rename", json={"path_base64": missing, "target": "x"}),
    ):
        answer = await request
        assert (answer.status_code, answer.json()["code"]) == (404, "path_not_found"), answer.text
    renamed = await client.post(f"{files}/rename", json={"path_base64": odd, "target": "odd/plain"})
    assert renamed.status_code == 204
    assert (await client.get(files, params={"path": "odd/plain"})).content == b"found"
    for wrong in ({"path_base64": "%"}, {"path_base64": odd, "path": "a"}, {}, {"path": ""}, {"path": "a\0b"}):
        assert (await client.get(files, params=wrong)).status_code == 400, wrong
    raw = await client.get(f"{files}?path=odd/%FF")
    assert raw.status_code == 400
    assert "path_base64" in raw.json()["message"]
    await client.delete(files, params={"path": "odd", "recursive": "true"})


async def test_a_directory_is_listed_in_pages(client: httpx2.AsyncClient, box: str, files: str) -> None:
    await client.post(
        f"/api/v1/sandboxes/{box}/exec",
        json={"command": r"mkdir many; cd many; touch b a c 'd e' $'\377' é"},
    )
    names: list[bytes] = []
    after: str | None = None
    while True:
        asked: dict[str, Any] = {"path": "many", "limit": 4, **({} if after is None else {"after": after})}
        page = (await client.get(f"{files}/list", params=asked)).json()
        names += [
            each["name"].encode() if each["name_base64"] is None else base64.b64decode(each["name_base64"])
            for each in page["items"]
        ]
        if (after := page["next"]) is None:
            break
    assert names == sorted([b"a", b"b", b"c", b"d e", "é".encode(), b"\xff"])
    assert (await client.get(f"{files}/list", params={"after": "%"})).status_code == 400
    assert (await client.get(f"{files}/list", params={"path": "many/a"})).json()["code"] == "path_not_directory"


async def test_modes_and_owners_are_changed(client: httpx2.AsyncClient, files: str) -> None:
    await _put(client, files, "mine")
    assert (await client.post(f"{files}/chmod", json={"path": "mine", "mode": 0o640})).status_code == 204
    assert (await client.post(f"{files}/chown", json={"path": "mine", "owner": "1:2"})).status_code == 403
    by_root = {"path": "/home/user/mine", "owner": "1:2", "user": "root"}
    assert (await client.post(f"{files}/chown", json=by_root)).status_code == 204
    stat = (await client.get(f"{files}/stat", params={"path": "mine"})).json()
    assert (stat["mode"], stat["uid"], stat["gid"]) == (0o640, 1, 2)
    assert (await client.post(f"{files}/chmod", json={"path": "mine", "mode": 0o640})).status_code == 403
    assert (await client.post(f"{files}/chmod", json={"path": "mine", "mode": 65536})).status_code == 400
    assert (await client.put(files, params={"path": "mine", "mode": "0689"}, content=b"")).status_code == 400


async def test_changes_are_watched(client: httpx2.AsyncClient, files: str) -> None:
    await client.post(f"{files}/mkdir", json={"path": "watched"})
    with anyio.fail_after(20):
        async with client.stream("GET", f"{files}/watch", params={"path": "watched"}) as answer:
            events = read_events(answer)
            assert (await anext(events))["event"] == "ready"
            odd = base64.b64encode(b"watched/" + BAD_NAME).decode()
            await client.put(files, params={"path_base64": odd}, content=b"x")
            async for each in events:
                if each["data"]["path_base64"] == BAD_BASE64:
                    break
    assert each["event"] == "change"
    assert each["data"]["change"] in ("created", "moved_to", "modified")
    none = await client.get(f"{files}/watch", params={"path": "nowhere"})
    assert (none.status_code, none.json()["code"]) == (404, "path_not_found")


async def test_a_directory_goes_out_and_comes_in_as_a_tar(client: httpx2.AsyncClient, files: str) -> None:
    for name in ("tree/a.txt", "tree/sub/b.txt", "tree/sub/c.pyc"):
        await _put(client, files, name, name.encode())
    answer = await client.get(f"{files}/archive", params={"path": "tree", "inside": "true", "exclude": ["*.pyc"]})
    assert answer.status_code == 200
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert sorted(each.name for each in archive if each.isfile()) == ["a.txt", "sub/b.txt"]
    unpacked = await client.put(f"{files}/archive", params={"path": "copy"}, content=answer.content)
    assert unpacked.json() == {"size": len("tree/a.txt") + len("tree/sub/b.txt")}
    assert (await client.get(files, params={"path": "copy/sub/b.txt"})).text == "tree/sub/b.txt"
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../outside"))
    refused = await client.put(f"{files}/archive", params={"path": "copy"}, content=evil.getvalue())
    assert (refused.status_code, refused.json()["code"]) == (403, "permission_denied")
    assert (await client.put(f"{files}/archive", params={"path": "copy"}, content=b"junk" * 500)).status_code == 400


async def test_a_download_ends_with_its_client(
    client: httpx2.AsyncClient, served: Served, box: str, files: str
) -> None:
    await client.post(f"/api/v1/sandboxes/{box}/exec", json={"command": "truncate -s 1T huge"})
    async with served.client() as other, other.stream("GET", files, params={"path": "huge"}) as answer:
        assert answer.headers["content-length"] == str(1 << 40)
        async for _ in answer.aiter_raw():
            break

    async def is_idle() -> bool:
        found = (await client.get(f"/api/v1/sandboxes/{box}/ps", params={"limit": 1000})).json()["items"]
        busy = [each["cpu_s"] for each in found if each["state"] == "R"]
        return not busy

    await eventually(is_idle, "nothing reads the file any more")
    await client.delete(files, params={"path": "huge"})


async def test_what_is_no_regular_file_is_not_searched(client: httpx2.AsyncClient, box: str) -> None:
    files = f"/api/v1/sandboxes/{box}/files"
    answer = await client.get(f"{files}/grep", params={"pattern": "a", "path": "/dev/full"})
    assert (answer.status_code, answer.json()["code"]) == (400, "file_error")
    assert "regular expression" not in answer.json()["message"]
    assert (await client.put(files, params={"path": "x", "mode": "40551"}, content=b"")).status_code == 400
