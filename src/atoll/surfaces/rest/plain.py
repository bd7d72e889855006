"""The arguments of plain requests, read without FastAPI's dependencies.

FastAPI finds out anew with each request what a route's parameters are and how they are called, which is a fifth of the
server's time for a short command. Here it is found out once. Only what is usual and valid is read here: no query, JSON
in UTF-8. Everything else, and all that is wrong, is left to FastAPI: so there is one place that refuses. Used by
`caller.py`, for all routes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from atoll.surfaces.rest.pages import JsonBody


class PlainReader:
    """Reads the arguments of one route."""

    def __init__(self, dependant: Dependant, body: tuple[str, type[BaseModel]] | None) -> None:
        self._request_name = dependant.request_param_name
        self._path = [(field, field.alias, field.name) for field in dependant.path_params]
        self._headers = [(field, field.alias.lower().encode(), field.name) for field in dependant.header_params]
        self._defaults = {
            field.name: field.default
            for field in (*dependant.query_params, *dependant.header_params)
            if not field.field_info.is_required()
        }
        self._dependencies: list[tuple[str, str, Callable[..., Any]]] = [
            (each.name, each.http_connection_param_name, each.call)
            for each in dependant.dependencies
            if each.name and each.http_connection_param_name and each.call
        ]
        self._body = body

    @classmethod
    def of(cls, route: APIRoute) -> PlainReader | None:
        """None: the route has parameters that are not read here, or its answer is made by FastAPI."""
        dependant = route.dependant
        returned = route.endpoint.__annotations__.get("return")
        if isinstance(returned, str):  # alone: to evaluate all annotations of all routes takes long
            returned = getattr(route.endpoint, "__globals__", {}).get(returned)
        if not (inspect.iscoroutinefunction(route.endpoint) and isinstance(returned, type)):
            return None
        if not issubclass(returned, Response) or dependant.cookie_params or _asks_for_more(dependant):
            return None
        parameters = (*dependant.query_params, *dependant.header_params)
        if any(each.field_info.is_required() or each.field_info.validate_default for each in parameters):
            return None
        if not all(_is_of_connection(each) for each in dependant.dependencies):
            return None
        if route.body_field is None:
            return cls(dependant, None)
        [field, *others] = dependant.body_params
        model = field.field_info.annotation
        is_ours = any(isinstance(each, JsonBody) for each in field.field_info.metadata)
        if others or not is_ours or not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
        return cls(dependant, (field.name, model))

    async def read(self, request: Request) -> dict[str, Any] | None:
        """None: the request is not plain, and nothing was done but reading its body."""
        scope = request.scope
        if scope["query_string"]:
            return None
        values = dict(self._defaults)
        for field, alias, name in self._path:
            value, errors = field.validate(scope["path_params"].get(alias), values, loc=("path", alias))
            if errors:
                return None
            values[name] = value
        given: dict[bytes, bytes] = {}
        for key, content in scope["headers"]:
            if key in given:
                return None  # which of them counts is FastAPI's to say
            given[key] = content
        for field, key, name in self._headers:
            if (content := given.get(key)) is not None:
                value, errors = field.validate(content.decode("latin-1"), values, loc=("header", key.decode()))
                if errors:
                    return None
                values[name] = value
        if self._body is not None:
            if given.get(b"content-type") != b"application/json":
                return None
            name, model = self._body
            try:
                values[name] = model.model_validate_json(await request.body(), strict=True)
            except ValidationError:
                return None
        if self._request_name is not None:
            values[self._request_name] = request
        for name, parameter, call in self._dependencies:
            values[name] = await call(**{parameter: request})
        return values


def _asks_for_more(dependant: Dependant) -> bool:
    names = ("websocket", "http_connection", "response", "background_tasks", "security_scopes")
    return any(getattr(dependant, f"{name}_param_name") for name in names)


def _is_of_connection(dependant: Dependant) -> bool:
    """Whether a dependency takes the connection, and nothing else: those of `caller.py`."""
    given = (dependant.dependencies, dependant.path_params, dependant.query_params, dependant.header_params)
    is_plain = not any((*given, dependant.cookie_params, dependant.body_params, dependant.request_param_name))
    return is_plain and dependant.http_connection_param_name is not None and inspect.iscoroutinefunction(dependant.call)


def plain_handler(
    route: APIRoute, otherwise: Callable[[Request], Coroutine[Any, Any, Response]]
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """A handler of a route that reads plain requests here, and leaves all others to `otherwise`."""
    reader = PlainReader.of(route)
    if reader is None:
        return otherwise
    endpoint = route.endpoint

    async def handle(request: Request) -> Response:
        values = await reader.read(request)
        if values is None:
            return await otherwise(request)
        response: Response = await endpoint(**values)
        return response

    return handle
