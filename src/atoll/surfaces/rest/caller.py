"""Who sends a request: the key that it came with, the tenant that it acts in, and what it may do.

Owns how a key is sent (`X-API-Key`, `Authorization: Bearer`, for WebSockets also a subprotocol), the choice of the
tenant, and the order of checks: key, tenant, rate, scope, and only then the request itself. `ApiRoute` does the first
before a byte of the body is read, so that no route can forget it. Not here: keys and tenants themselves
(`atoll.server.keys`, `atoll.server.tenants`), and answers to what is refused (`errors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from atoll.contract.errors import DatabaseUnavailable, Forbidden, InvalidRequest, Unauthenticated
from atoll.contract.names import NAMESPACE_RULE, is_namespace
from atoll.surfaces.rest.errors import error_status, request_id
from atoll.surfaces.rest.plain import plain_handler

if TYPE_CHECKING:
    from atoll.runtime.engine import LocalEngine
    from atoll.server.keys import ApiKey, KeyScope
    from atoll.server.server import Server
    from atoll.server.tenants import Tenant

KEY_HEADER = "x-api-key"
TENANT_HEADER = "atoll-tenant"
DEFAULT_TENANT = "default"
KEY_PROTOCOL = "atoll.key."
"""Before the key, in the subprotocol of a WebSocket: browsers can set no header there."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Caller:
    """Who sends a request, and what the request acts on."""

    key: ApiKey
    tenant: Tenant
    engine: LocalEngine
    """The sandboxes of the tenant, and no others."""
    request_id: str
    server: Server
    _text: str = field(repr=False)
    _noted: dict[str, str] = field(default_factory=dict, repr=False)

    def note(self, *, resource: str | None = None, **details: object) -> None:
        """Have the audit log say more of this request: what it was done to, if that is not its path, and details,
        nothing secret among them."""
        self._noted.update({name: str(value) for name, value in details.items()})
        if resource is not None:
            self._noted["resource"] = resource

    async def record(self, connection: HTTPConnection, action: str, status: int) -> None:
        """Write to the audit log what was done. Routes that change something are recorded by `ApiRoute`; a WebSocket
        calls this itself."""
        from atoll.server.audit import AuditEvent

        details = dict(self._noted)
        resource = details.pop("resource", connection.scope["path"].removeprefix("/api/v1/").strip("/"))
        client = connection.scope.get("client")
        await self.server.audit.record(
            AuditEvent(
                request_id=self.request_id,
                tenant=self.tenant.name,
                key=self.key.id,
                key_name=self.key.name,
                client=client[0] if client else None,
                action=action,
                resource=resource,
                status=status,
                details=details,
            )
        )

    @property
    def is_operator(self) -> bool:
        """Whether the key is the server's, not a tenant's."""
        return self.key.tenant is None

    async def require_valid(self) -> None:
        """For what goes on for long: streams and terminals ask this once a second.

        Raises:
            Unauthenticated: the key has been revoked, has expired, or its tenant is disabled.
        """
        try:
            await self.server.keys.verify(self._text)
        except Forbidden as error:
            raise Unauthenticated(error.message) from None
        except DatabaseUnavailable:
            pass  # it is asked again in a second; what is under way need not end for it

    def require_operator(self) -> None:
        """
        Raises:
            Forbidden: the key is a tenant's.
        """
        if not self.is_operator:
            raise Forbidden("only a key of the server itself may do this, not a tenant's")


def key_text(connection: HTTPConnection) -> str:
    """The key that a request came with, in whichever place. Empty: none."""
    if given := connection.headers.get(KEY_HEADER):
        return given.strip()
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if connection.scope["type"] == "websocket":
        offered: list[str] = connection.scope.get("subprotocols", [])
        return next((each.removeprefix(KEY_PROTOCOL) for each in offered if each.startswith(KEY_PROTOCOL)), "")
    return ""


async def authenticate(connection: HTTPConnection) -> ApiKey:
    """The key of a request, checked once.

    Raises:
        Unauthenticated: there is none, or it is not valid.
    """
    state = connection.scope.setdefault("state", {})
    key: ApiKey | None = state.get("key")
    if key is None:
        text = key_text(connection)
        if not text:
            raise Unauthenticated("a key is required: X-API-Key: KEY, or Authorization: Bearer KEY")
        key = state["key"] = await server_of(connection).keys.verify(text)
    return key


def server_of(connection: HTTPConnection) -> Server:
    server: Server = connection.app.state.server
    return server


async def identify(connection: HTTPConnection) -> Caller:
    """Who sends this request.

    Raises:
        Unauthenticated: there is no valid key.
        Forbidden: it names a tenant that is not the key's, or the tenant is disabled.
        TenantNotFound: a key of the server names a tenant that does not exist.
        RateLimited: the tenant has sent too many requests.
    """
    state = connection.scope.setdefault("state", {})
    known: Caller | None = state.get("caller")
    if known is not None:
        return known
    key = await authenticate(connection)
    server = server_of(connection)
    wanted = connection.headers.get(TENANT_HEADER)
    if wanted is not None and not is_namespace(wanted):
        raise InvalidRequest(f"Atoll-Tenant: {wanted[:64]!r} is not a name for a tenant; {NAMESPACE_RULE}")
    if key.tenant is not None and wanted not in (None, key.tenant):
        raise Forbidden(f"the key belongs to a tenant; it cannot act in another (Atoll-Tenant: {wanted})")
    tenant = await server.tenants.get(key.tenant or wanted or DEFAULT_TENANT)
    server.quotas.check_rate(tenant)
    caller = Caller(
        key, tenant, await server.engines.get(tenant.name), request_id(connection.scope), server, key_text(connection)
    )
    server.engines.hold(tenant.name, caller)
    state["caller"] = caller
    return caller


def requires(scope: KeyScope, *, operator: bool = False) -> Callable[[HTTPConnection], Coroutine[Any, Any, Caller]]:
    """A dependency that gives the caller, if its key has the scope and, with `operator`, is the server's own."""

    async def checked(connection: HTTPConnection) -> Caller:
        caller = await identify(connection)
        caller.key.require(scope)
        if operator:
            caller.require_operator()
        return caller

    return checked


async def any_caller(connection: HTTPConnection) -> Caller:
    """A dependency that gives the caller, whatever its key may do."""
    return await identify(connection)


Reader = Annotated[Caller, Depends(requires("sandboxes:read"))]
Writer = Annotated[Caller, Depends(requires("sandboxes:write"))]
Executor = Annotated[Caller, Depends(requires("sandboxes:exec"))]
AnyCaller = Annotated[Caller, Depends(any_caller)]


class ApiRoute(APIRoute):
    """A route below /api: the key is checked before the body is read, unknown query parameters are refused, and what
    changes something is in the audit log before it is answered, also when it failed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = plain_handler(self, super().get_route_handler())
        known = frozenset(_query_names(self.dependant))

        action = self.operation_id or self.name

        async def checked(request: Request) -> Response:
            caller = await identify(request)
            if request.scope["query_string"]:
                unknown = [name for name in request.query_params if name not in known]
                if unknown:
                    allowed = ", ".join(sorted(known)) or "none"
                    raise InvalidRequest(f"unknown query parameter {unknown[0][:100]!r} (allowed: {allowed})")
            if request.method in _SAFE_METHODS:
                return await handle(request)
            try:
                response = await handle(request)
            except Exception as error:
                await caller.record(request, action, error_status(error))
                raise
            await caller.record(request, action, response.status_code)
            return response

        return checked


def _query_names(dependant: Dependant) -> list[str]:
    own = [field.alias for field in dependant.query_params]
    return own + [name for each in dependant.dependencies for name in _query_names(each)]
