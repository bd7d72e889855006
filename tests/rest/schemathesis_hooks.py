"""What schemathesis has to know of the REST API beyond its document. Loaded by it (`schemathesis.toml`)."""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response
from schemathesis.core.failures import Failure
from schemathesis.openapi.checks import RejectedPositiveData

SHAPE = {"code": str, "message": str, "details": dict, "request_id": str}
KEPT = frozenset(os.environ["ATOLL_FUZZ_KEPT"].split())
"""Tenants and keys that the run itself needs: they are neither changed nor deleted."""

schemathesis.serializer.alias("application/x-tar", "application/octet-stream")


@schemathesis.check
def one_shape_of_errors(_ctx: CheckContext, response: Response, _case: Case) -> None:
    if response.status_code < 400 or response.request.method == "HEAD":
        return
    body = response.json()
    assert {name: type(value) for name, value in body.items()} == SHAPE, f"an error of another shape: {body}"
    assert response.headers["atoll-request-id"] == [body["request_id"]]


@schemathesis.hook
def filter_failure(_context: HookContext, failure: Failure, _case: Case, response: Response) -> bool:
    """A request that the document allows may break a rule that no schema can state: what a network rule is, say. It may
    not break one of a schema: those are the errors of other types than these."""
    if not isinstance(failure, RejectedPositiveData) or response.status_code != 400:
        return True
    errors = response.json()["details"].get("errors", [])
    return any(each["type"] not in ("value_error", "base64_decode") for each in errors)


@schemathesis.hook
def filter_case(_context: HookContext, case: Case) -> bool:
    given: dict[str, Any] = case.path_parameters or {}
    return not KEPT.intersection(str(value) for value in given.values())


@schemathesis.hook
def before_call(_context: HookContext, case: Case, _kwargs: dict[str, Any]) -> None:
    """Streams that would go on end when all that is there was sent."""
    query = case.query
    if any(each.name == "follow" for each in case.operation.query) and str(query.get("follow", True)).lower() == "true":
        query["follow"] = False
