"""The OpenAPI document of the REST API: what FastAPI cannot know of it.

Owns how keys are sent, the header that every answer has, and that a request which is not valid is a 400 of ours, not a
422 of FastAPI's. Clients are generated from the document, so it is exact: `tests/rest/test_openapi.py` holds it to
what the server does. Not here: the routes, which declare themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from atoll.surfaces.rest.errors import REQUEST_ID_HEADER
from atoll.surfaces.rest.event_stream import MEDIA_TYPE, STREAMED

_SCHEMES = {
    "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "Bearer": {"type": "http", "scheme": "bearer"},
}
_REQUEST_ID = {"description": "The same as in the server's log.", "schema": {"type": "string"}}
_TENANT = {
    "name": "Atoll-Tenant",
    "in": "header",
    "required": False,
    "description": "The tenant to act in, for keys of the server. Unset: `default`.",
    "schema": {"type": "string", "pattern": "^[a-z0-9][a-z0-9-]{0,31}$"},
}
_MADE_BY = {
    "sandbox": ("sandboxes_create", "$response.body#/name"),
    "checkpoint": ("checkpoints_create", "$response.body#/id"),
    "volume": ("volumes_create", "$response.body#/name"),
    "webhook": ("webhooks_create", "$response.body#/webhook/id"),
    "key": ("keys_create", "$response.body#/key/id"),
    "tenant": ("tenants_create", "$response.body#/name"),
}
"""By the parameter of a path: the operation that makes such a thing, and where its answer has the name or id."""
_OF_FASTAPI = ("HTTPValidationError", "ValidationError")


def install(app: FastAPI) -> None:
    """Have the app's document say what all routes have in common."""
    made_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _amended(made_by_fastapi())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI's documentation has it


def _amended(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components["securitySchemes"] = _SCHEMES
    components["headers"] = {REQUEST_ID_HEADER: _REQUEST_ID}
    components["parameters"] = {"Tenant": _TENANT}
    document["security"] = [{name: []} for name in _SCHEMES]
    for name in _OF_FASTAPI:
        components.get("schemas", {}).pop(name, None)
    for operation in _operations(document):
        responses = operation["responses"]
        if "HTTPValidationError" in str(responses.get("422")):
            del responses["422"]
        if "requestBody" in operation:
            responses.setdefault("413", {**responses["400"], "description": "The body is too large."})
        operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/Tenant"})
        for status, response in responses.items():
            if response.pop(STREAMED, False):
                response["content"] = {MEDIA_TYPE: response["content"]["application/json"]}
            elif (
                int(status) >= 400 and MEDIA_TYPE in response["content"]
            ):  # FastAPI's guess, by the class of the answer
                response["content"] = {"application/json": response["content"][MEDIA_TYPE]}
            headers = response.setdefault("headers", {})
            headers[REQUEST_ID_HEADER] = {"$ref": f"#/components/headers/{REQUEST_ID_HEADER}"}
    _link(document)
    return document


def _link(document: dict[str, Any]) -> None:
    """Link what makes a thing to all operations on it."""
    operations = {operation["operationId"]: operation for operation in _operations(document)}
    for id, operation in operations.items():
        for parameter in operation["parameters"]:
            creator, expression = _MADE_BY.get(parameter.get("name", ""), (None, ""))
            if parameter.get("in") != "path" or creator not in operations:
                continue
            made = operations[creator]["responses"]["201"]
            made.setdefault("links", {})[id] = {"operationId": id, "parameters": {parameter["name"]: expression}}


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path, methods in document["paths"].items():
        if path.startswith("/api/"):
            yield from (operation for operation in methods.values() if "responses" in operation)
