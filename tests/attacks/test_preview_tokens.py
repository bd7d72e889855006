"""Coming in without being let in: a guessed or stolen name, another's token, tricks with the host."""

from __future__ import annotations

import re

import pytest

from atoll.runtime.sandbox import Sandbox
from tests.attacks.wire import OK, Inside, saying, serving
from tests.http_client import ask, host_of, say

pytestmark = pytest.mark.usefixtures("listening", "no_bugs")

LISTEN = re.compile(rb":[0-9]+")


def stranger(inside: Inside, host: str, *lines: str, target: str = "/") -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close", *lines, "", ""]).encode(
        "latin-1"
    )


async def test_who_has_no_token_learns_nothing(prey: Sandbox, bystander: Sandbox) -> None:
    """Whatever is wrong, the answer is the same: what is there cannot be told from what is not."""
    async with serving(prey, saying(OK)) as inside, serving(bystander, saying(OK)) as other:
        host, token = host_of(inside.preview), inside.preview.token
        listen = host.rpartition(":")[2]
        path = f"/preview/{host.partition('.')[0]}/"
        cookie = f"atoll-preview-{listen}"
        attempts = {
            "no token": stranger(inside, host),
            "an empty one": stranger(inside, host, "Atoll-Token:"),
            "a part of it": stranger(inside, host, f"Atoll-Token: {token[:-1]}"),
            "more than it": stranger(inside, host, f"Atoll-Token: {token}x"),
            "no ASCII": stranger(inside, host, "Atoll-Token: \xff\xfe"),
            "another preview's": stranger(inside, host, f"Atoll-Token: {other.preview.token}"),
            "another preview's cookie": stranger(inside, host, f"Cookie: {cookie}={other.preview.token}"),
            "another preview's, in the query": stranger(inside, host, target=f"/?atoll_token={other.preview.token}"),
            "the cookie of another listener": stranger(inside, host, f"Cookie: atoll-preview-1={token}"),
            "a cookie that only ends so": stranger(inside, host, f"Cookie: x{cookie}={token}"),
            "the token elsewhere": stranger(inside, host, f"Authorization: Bearer {token}", f"Cookie: a={token}"),
            "a parameter that only ends so": stranger(inside, host, target=f"/?xatoll_token={token}"),
            "the path, without a token": stranger(inside, "127.0.0.1", target=path),
            "the path of another": stranger(inside, "127.0.0.1", f"Atoll-Token: {other.preview.token}", target=path),
            "a sandbox that is not there": stranger(inside, f"80-nobody.localhost:{listen}", f"Atoll-Token: {token}"),
            "a port that is not exposed": stranger(inside, f"59-{prey.name}.localhost", f"Atoll-Token: {token}"),
            "no preview": stranger(inside, "localhost", f"Atoll-Token: {token}"),
        }
        answers = {attack: await say(inside.preview, request) for attack, request in attempts.items()}
        assert {answer[9:12] for answer in answers.values()} == {b"404"}
        assert len(set(answers.values())) == 1, answers
        assert (inside.all, other.all) == (b"", b"")


async def test_hosts_that_only_look_like_the_preview_are_nothing(prey: Sandbox) -> None:
    async with serving(prey, saying(OK)) as inside:
        host, let_in = host_of(inside.preview), f"Atoll-Token: {inside.preview.token}"
        name, _, listen = host.rpartition(":")
        for trick in (
            *(f"{name}.:{listen}", f"{name}.evil.example", f"0{host}", f"+{host}", f" {host}.", f"{host}@evil.example"),
            *(f"evil.example@{host}", f"evil.{host}", f"{name}:{listen}:80", f"{name}:x", f"{name}\t", f"[{host}]"),
            *("127.0.0.1", "", name.replace("localhost", "localhost.localhost"), name.replace(".localhost", "")),
        ):
            answer = await say(inside.preview, stranger(inside, trick, let_in, f"X-Forwarded-Host: {host}"))
            assert answer[9:12] in (b"404", b"400") or trick == f"{name}\t", (trick, answer)
        assert inside.all.count(b"GET ") <= 1
        assert (await say(inside.preview, stranger(inside, host.upper(), let_in)))[9:12] == b"200", "names have no case"


async def test_a_token_that_was_revoked_is_worth_nothing_on_a_kept_connection(prey: Sandbox) -> None:
    async with serving(prey, saying(OK)) as inside:
        old = inside.preview
        await prey.unexpose(old.port)
        new = await prey.expose(old.port)
        said = await say(old, inside.request("GET / HTTP/1.1", "Connection: close"))
        assert said[9:12] == b"404"
        assert (await ask(new)).body == b"ok"


async def test_the_redirect_that_takes_the_token_away_leads_nowhere_else(prey: Sandbox) -> None:
    async with serving(prey, saying(OK)) as inside:
        host, token = host_of(inside.preview), inside.preview.token
        for target in (
            "//evil.example/",
            "/\\evil.example",
            "/%2f/evil.example",
            "/http://evil.example",
            "/@evil.example",
        ):
            answer = await ask(inside.preview, f"{target}?atoll_token={token}", token=False, Accept="text/html")
            assert answer.header("location") == f"http://{host}{target}"
        label = host.partition(".")[0]
        target = f"/preview/{label}//evil.example/"
        by_path = await ask(
            inside.preview, f"{target}?atoll_token={token}", token=False, Host="127.0.0.1", Accept="text/html"
        )
        assert by_path.header("location") == target


async def test_the_server_inside_never_sees_a_token(prey: Sandbox) -> None:
    """Not this preview's, nor one of another program that serves a sandbox of the same name on another port."""
    async with serving(prey, saying(OK)) as inside:
        token, host = inside.preview.token, host_of(inside.preview)
        listen = host.rpartition(":")[2]
        lines = [
            f"Atoll-Token: {token}",
            f"ATOLL_TOKEN: {token}",
            f"Cookie: a=1; atoll-preview-{listen}={token}; atoll-preview-1=another",
            f"Cookie:atoll-preview-{listen}={token}",
            f"Referer: http://{host}/?atoll_token={token}",
        ]
        target = f"/?atoll_token={token}&atoll_token={token}&b"
        assert (await say(inside.preview, stranger(inside, host, *lines, target=target)))[9:12] == b"200"
        assert token.encode() not in inside.all
        assert b"another" not in inside.all
        assert b"GET /?b HTTP/1.1" in inside.all


SPELLINGS = [
    ("/?a=1?atoll_token={token}&b=2", "", b"GET /?a=1&b=2 HTTP/1.1"),
    ("/?{token}", "", b"GET / HTTP/1.1"),
    ("/??atoll_token={token}", "", b"GET / HTTP/1.1"),
    ("/?a=1;atoll_token={token};b=2", "", b"GET /?a=1;b=2 HTTP/1.1"),
    ("/?atoll_token={token};b=2&c", "", b"GET /?c HTTP/1.1"),
    ("/x;atoll_token={token}/y;z=1", "", b"GET /x/y;z=1 HTTP/1.1"),
    ("/?ATOLL_TOKEN={token}&b", "", b"GET /?b HTTP/1.1"),
    ("/?b&Atoll-Token={token}", "", b"GET /?b HTTP/1.1"),
    ("/?b&atoll%5Ftoken={token}", "", b"GET /?b HTTP/1.1"),
    ("/?b&atoll_token={percent}", "", b"GET /?b HTTP/1.1"),
    ("/?b=http%3A%2F%2Fx%2F%3Fatoll_token%3D{token}", "", b"GET / HTTP/1.1"),
    ("/", "Referer: http://{host}/?a=1?atoll_token={token}&b", b"Referer: http://{host}/?a=1&b"),
    ("/", "Referer: http://{host}/?a=1;atoll_token={token}", b"Referer: http://{host}/?a=1\r\n"),
    ("/", "Referer: http://{host}/?ATOLL_TOKEN={token}", b"Referer: http://{host}/\r\n"),
    ("/", "Referer: http://{host}/#atoll_token={token}", b"GET / "),
    ("/", "Cookie: a=1; Atoll-Preview-{listen}={token}; b=2", b"Cookie: a=1; b=2"),
    ("/", "Cookie: a=1; ATOLL-PREVIEW-1=another; mine={token}", b"Cookie: a=1\r\n"),
    ("/", "Authorization: Bearer {token}", b"GET / "),
    ("/", "X-Empty:", b"x-empty: \r\n"),
]


@pytest.mark.parametrize(("target", "line", "arrives"), SPELLINGS)
async def test_a_token_in_a_spelling_that_is_not_taken_does_not_arrive_either(
    prey: Sandbox, target: str, line: str, arrives: bytes
) -> None:
    async with serving(prey, saying(OK)) as inside:
        token, host = inside.preview.token, host_of(inside.preview)
        words = {
            "token": token,
            "host": host,
            "listen": host.rpartition(":")[2],
            "percent": f"%{ord(token[0]):02x}{token[1:]}",
        }
        lines = [f"Atoll-Token: {token}", *([line.format(**words)] if line else [])]
        request = stranger(inside, host, *lines, target=target.format(**words))
        assert (await say(inside.preview, request))[9:12] == b"200"
        for each in (token, words["percent"], "another"):
            assert each.encode() not in inside.all
        assert arrives.replace(b"{host}", host.encode()).lower() in inside.all.lower()


async def test_the_path_form_leaves_cookies_and_service_workers_within_it(prey: Sandbox) -> None:
    """All pages of the path form are of one origin: what one of them sets must not reach the others."""
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nService-Worker-Allowed: /\r\nLocation: http://127.0.0.1/y\r\n"
        b"Set-Cookie: a=1; Path=/; Domain=127.0.0.1; HttpOnly\r\nSet-Cookie: b=2; path=/preview/1-other/\r\n\r\nok"
    )
    async with serving(prey, saying(answer)) as inside:
        label = host_of(inside.preview).partition(".")[0]
        got = await ask(inside.preview, f"/preview/{label}/x", Host="127.0.0.1", Cookie="host=secret; 1-other~b=2")
        assert got.all("service-worker-allowed") == []
        assert got.header("location") == f"/preview/{label}/y"
        assert got.all("set-cookie") == [
            f"{label}~a=1; HttpOnly; Path=/preview/{label}/",
            f"{label}~b=2; Path=/preview/{label}/preview/1-other/",
        ]
        assert b"secret" not in inside.all
        assert b"b=2" not in inside.all
