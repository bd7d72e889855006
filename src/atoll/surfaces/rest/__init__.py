"""The REST API of `atoll serve`.

Owns the routes below /api. `routers` are all of them, in the order in which they are matched; `install` adds them to an
app, with the answers to errors. Not here: data and rules (`atoll.server`), and how an app is composed and served
(`surfaces/serve/`). To add a route: the module of its resource, with `route_class=ApiRoute`, a caller with the scope
that it needs, and its failures; a module of its own is added to `_MODULES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

    from atoll.server.server import Server

_MODULES = (
    "exec",
    "files",
    "processes",
    "terminal",
    "code",
    "transfer",
    "checkpoints",
    "network",
    "usage",
    "events",
    "sandboxes",
    "chat",
    "configs",
    "conversations",
    "webhooks",
    "volumes",
    "bundles",
    "templates",
    "builds",
    "images",
    "tenants",
    "host",
    "tunnel",
)
"""Each has a `router`. An earlier route wins: fixed paths are before those with a name in them. What is called most is
first: routes are tried one after the other."""


def routers() -> list[APIRouter]:
    """The routers of all resources."""
    modules = [import_module(f"{__name__}.{module}") for module in _MODULES]
    return [
        router for module in modules for name in ("legacy_router", "router") if (router := getattr(module, name, None))
    ]


def install(app: FastAPI, server: Server) -> None:
    """Add all routes below /api to an app, and answers in one shape to all that fails in it."""
    from atoll.surfaces.rest import errors, openapi
    from atoll.surfaces.rest.caller import authenticate

    app.state.server = server
    errors.install(app, check_key=authenticate)
    found, before = routers(), len(app.router.routes)
    for router in found:
        app.include_router(router)  # and what it does while the app runs
    # A router within a router is searched twice, with a context for each route: the routes stand in its place.
    app.router.routes[before:] = [route for router in found for route in router.routes]
    openapi.install(app)
