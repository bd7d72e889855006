"""The OpenAPI document of the REST API: what FastAPI cannot know of it.

Owns how keys are sent, the header that every answer has, and that a request which is not valid is a 400 of ours, not a
422 of FastAPI's. Clients are generated from the document, so it is exact: `tests/rest/test_openapi.py` holds it to
what the server does. Not here: the routes, which declare themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from atoll.surfaces.rest.errors import REQUEST_ID_HEADER, ErrorBody
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
    "turn": ("chat", "$response.body#/turn_id"),
    "conversation": ("chat", "$response.body#/conversation_id"),
    "external_id": ("workspaces_instances", "$response.body#/items/0/external_id"),
    "sandbox": ("sandboxes_create", "$response.body#/name"),
    "name": ("sandboxes_create", "$response.body#/name"),
    "process": ("processes_spawn", "$response.body#/id"),
    "session": ("code_sessions_create", "$response.body#/id"),
    "execution": ("code_execute", "$response.body#/id"),
    "port": ("ports_expose", "$response.body#/port"),
    "checkpoint": ("checkpoints_create", "$response.body#/id"),
    "bundle": ("bundles_create", "$response.body#/bundle_id"),
    "volume": ("volumes_create", "$response.body#/name"),
    "webhook": ("webhooks_create", "$response.body#/webhook/id"),
    "key": ("keys_create", "$response.body#/key/id"),
    "tenant": ("tenants_create", "$response.body#/name"),
    "config": ("configs_create", "$response.body#/id"),
    "build": ("builds_create", "$response.body#/id"),
    "template": ("templates_list", "$response.body#/items/0/name"),
}
"""By the parameter of a path: the operation that makes such a thing, and where its answer has the name or id."""
_MAKES_WHAT_IT_NAMES = "volumes_import"
_ALSO: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sandboxes_fork", "sandboxes_get", {"parameters": {"sandbox": "$response.body#/items/0/name"}}),
    ("sandboxes_import", "sandboxes_get", {"parameters": {"sandbox": "$response.body#/name"}}),
    ("volumes_import", "volumes_get", {"parameters": {"volume": "$response.body#/name"}}),
    ("builds_upload", "builds_files", {"parameters": {"files": "$request.path.files"}}),
    ("templates_list", "templates_tag", {"parameters": {"template": "$response.body#/items/0/name"}}),
    (
        "templates_tag",
        "templates_untag",
        {"parameters": {"template": "$request.path.template", "tag": "$request.path.tag"}},
    ),
    (
        "checkpoints_create",
        "sandboxes_restore",
        {"parameters": {"sandbox": "$request.path.sandbox"}, "requestBody": {"checkpoint": "$response.body#/id"}},
    ),
    (
        "code_approvals_list",
        "code_approvals_decide",
        {"parameters": {"sandbox": "$request.path.sandbox", "approval": "$response.body#/items/0/id"}},
    ),
)
"""Links beside those from what makes a thing to what can be done with it: from, to, and what is passed on."""
_OF_THE_DOOR = {"414": "The URL is too long.", "431": "The headers are too large."}
"""What any request can be answered with before it comes to a route."""
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
    schemas = {**components["schemas"], ErrorBody.__name__: ErrorBody.model_json_schema()}
    components["schemas"] = dict(sorted(schemas.items()))
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
        for status, description in _OF_THE_DOOR.items():
            responses[status] = {**responses["400"], "description": description}
        for parameter in operation.setdefault("parameters", []):
            _without_null(parameter["schema"])
        operation["parameters"].append({"$ref": "#/components/parameters/Tenant"})
        for status, response in responses.items():
            content = response.get("content", {})
            if response.pop(STREAMED, False):
                content[MEDIA_TYPE] = content.pop("application/json")
            if int(status) >= 400 and MEDIA_TYPE in content:  # FastAPI's guess, by the class of the answer
                content["application/json"] = content.pop(MEDIA_TYPE)
            if MEDIA_TYPE in content:
                content[MEDIA_TYPE] = {"schema": _event(content[MEDIA_TYPE]["schema"])}
            headers = response.setdefault("headers", {})
            headers[REQUEST_ID_HEADER] = {"$ref": f"#/components/headers/{REQUEST_ID_HEADER}"}
    _link(document)
    return document


def _without_null(schema: dict[str, Any]) -> None:
    """A parameter that is unset is left out: `null` would be its text."""
    others = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(others) == 1:
        del schema["anyOf"]
        schema.update(others[0])


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """The schema of a server-sent event whose data are JSON of this schema; those of the last may be an error."""
    any_data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    if data.get("type") != "string":
        any_data["contentSchema"] = {"anyOf": [data, {"$ref": "#/components/schemas/ErrorBody"}]}
    fields = {"event": {"type": "string"}, "id": {"type": "string"}, "data": any_data}
    return {"type": "object", "properties": fields, "required": ["event", "data"]}


def _link(document: dict[str, Any]) -> None:
    """Link what makes a thing to all operations on it: what the path of both names is the same."""
    operations = {operation["operationId"]: operation for operation in _operations(document)}
    for id, operation in operations.items():
        names = _path_names(operation)
        creator, expression = _MADE_BY.get(names[-1], ("", "")) if names else ("", "")
        if creator not in operations or id == _MAKES_WHAT_IT_NAMES:
            continue
        same = {name: f"$request.path.{name}" for name in _path_names(operations[creator]) if name in names}
        _add_link(operations[creator], id, {"parameters": {**same, names[-1]: expression}})
    for source, target, passed in _ALSO:
        _add_link(operations[source], target, passed)


def _add_link(source: dict[str, Any], target: str, passed: dict[str, Any]) -> None:
    for status, response in source["responses"].items():
        if status.startswith("2"):
            response.setdefault("links", {})[target] = {"operationId": target, **passed}


def _path_names(operation: dict[str, Any]) -> list[str]:
    return [parameter["name"] for parameter in operation["parameters"] if parameter.get("in") == "path"]


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path, methods in document["paths"].items():
        if path.startswith("/api/"):
            yield from (operation for operation in methods.values() if "responses" in operation)
