"""Who may open a page, and send what is done on it.

Owns how a token gets into a browser: an address with `?token=…` is answered with a cookie and a way to the address
without it. Not here: host names and origins (`door/guard.py`, which this extends). Used by all pages.

The cookie is no copy of the token but is derived from it: it opens this server only, also after it was started again,
and who gets hold of it cannot send it as the token. Scripts cannot read it, and pages of other sites cannot use it. As
cookies know no ports, whatever changes something has to come from a page of the very same origin.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.surfaces.door import HttpGuard, HttpRefusal
from atoll.surfaces.door.answers import REQUEST_ID_HEADER, error_body, new_request_id
from atoll.surfaces.web.document import NOTHING_ALLOWED, SECURITY_HEADERS, plain_page

_COOKIE_S = 30 * 24 * 3600
_SAFE = ("GET", "HEAD")
_CODES = {401: "unauthenticated", 403: "forbidden", 421: "misdirected_request"}


class WebGuard(HttpGuard):
    """As `HttpGuard`; the token may also come from the cookie that `exchange_token` gave to the browser.

    With the cookie alone, a request that changes something has to say that it comes from a page of this origin.
    """

    def __init__(self, hosts: Sequence[str] | None, token: SecretStr | None, *, token_variable: str) -> None:
        super().__init__(hosts, token, token_variable=token_variable)
        self._token = None if token is None else token.get_secret_value().encode()
        self._cookie = b""
        self._cookie_name = ""
        if self._token is not None:
            derived = hmac.new(self._token, b"atoll web cookie 1", hashlib.sha256).hexdigest()
            self._cookie = derived.encode()
            # Servers at other ports of this host get the cookie too, and have theirs: each needs a name of its own.
            self._cookie_name = f"atoll_web_{hashlib.sha256(self._cookie).hexdigest()[:12]}"

    def refusal(self, request: Request) -> HttpRefusal | None:
        refused = super().refusal(request)
        if refused is not None or request.method in _SAFE:
            return refused
        site = request.headers.get("sec-fetch-site", "same-origin")
        said = "origin" in request.headers or "sec-fetch-site" in request.headers
        if site not in ("same-origin", "none") or (self._has_cookie(request) and not said):
            return HttpRefusal(403, "requests from web pages of other sites are refused")
        return None

    def credential(self, request: Request) -> str:
        given = super().credential(request)
        if not given and self._token is not None and self._has_cookie(request):
            return self._token.decode("latin-1")  # as a header would have brought it
        return given

    def _has_cookie(self, request: Request) -> bool:
        given = request.cookies.get(self._cookie_name, "") if self._token is not None else ""
        return bool(given) and hmac.compare_digest(given.encode("utf-8", "replace"), self._cookie)

    def exchange_token(self, request: Request) -> Response | None:
        """The answer to an address with the token in it. None: there is none, or it is wrong."""
        given = request.query_params.get("token")
        if given is None or self._token is None or request.method != "GET":
            return None
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._token):
            return None
        # Not a redirect: after a link on another site, a browser would leave out the cookie on the way.
        response = plain_page("Opening…", "The token is now a cookie of this browser.", refresh=request.url.path)
        response.set_cookie(
            self._cookie_name,
            self._cookie.decode(),
            max_age=_COOKIE_S,
            path="/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return response


class GuardedPages:
    """An ASGI app in front of pages: the guard's refusals, and the headers that every answer has."""

    def __init__(self, app: ASGIApp, guard: WebGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in (*SECURITY_HEADERS.items(), ("Content-Security-Policy", NOTHING_ALLOWED)):
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        refused = self._guard.refusal(request)
        answer: ASGIApp = self._app
        if refused is not None:
            answer = self._refuse(request, refused)
        elif "token" in request.query_params:
            answer = self._guard.exchange_token(request) or self._app
        await answer(scope, receive, send_with_headers)

    def _refuse(self, request: Request, refused: HttpRefusal) -> Response:
        if refused.status == 401:
            if (handed := self._guard.exchange_token(request)) is not None:
                return handed
            if "text/html" in request.headers.get("accept", ""):
                text = "This page needs its token. Open it once as /?token=TOKEN; this browser then keeps it."
                page = plain_page("A token is required", text, status=401)
                page.headers.update(refused.headers)
                return page
        request_id = new_request_id()
        code = _CODES.get(refused.status, "invalid_request")
        return JSONResponse(
            error_body(code, refused.message, request_id),
            refused.status,
            {**refused.headers, REQUEST_ID_HEADER: request_id},
        )
