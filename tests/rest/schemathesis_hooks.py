"""What schemathesis has to know of the REST API beyond its document. Loaded by it (`schemathesis.toml`)."""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response
from schemathesis.core.failures import Failure
from schemathesis.generation.meta import TestPhase
from schemathesis.openapi.checks import AllowHeaderMismatch, RejectedPositiveData

from atoll.contract.names import is_namespace

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
def filter_failure(_context: HookContext, failure: Failure, case: Case, response: Response) -> bool:
    """Whether it is one."""
    if isinstance(failure, AllowHeaderMismatch):
        # A sandbox may be named `import`: the path has the methods of a sandbox too.
        return case.operation.path != "/api/v1/sandboxes/import"
    if isinstance(failure, RejectedPositiveData) and response.status_code == 400:
        # A request that fits the document may break a rule that no schema can state, such as what a network rule is. It
        # may not break one of a schema: these are errors of other types.
        errors = response.json()["details"].get("errors", [])
        return any(each["type"] not in ("value_error", "base64_decode") for each in errors)
    return True


@schemathesis.hook
def filter_case(_context: HookContext, case: Case) -> bool:
    given: dict[str, Any] = case.path_parameters or {}
    return not KEPT.intersection(str(value) for value in given.values())


@schemathesis.hook
def before_call(_context: HookContext, case: Case, _kwargs: dict[str, Any]) -> None:
    """Streams that would go on end when all that is there was sent, nothing is waited for for long, and most requests
    act in the tenant of their key: another would be refused, or does not exist."""
    follow = any(each.name == "follow" for each in case.operation.query)
    if follow and str(case.query.get("follow", True)).lower() in ("true", "1", "on", "yes", "t", "y"):
        case.query["follow"] = False
    waits: tuple[tuple[Any, str], ...] = ((case.query, "timeout_s"), (case.body, "wait_s"))
    for given, name in waits:
        if isinstance(given, dict) and isinstance(given.get(name), int | float) and 1 < given[name] <= 3600:
            given[name] = 1
    is_random = case.meta is not None and case.meta.phase.name in (TestPhase.FUZZING, TestPhase.STATEFUL)
    if is_random and is_namespace(str(case.headers.get("Atoll-Tenant"))):
        del case.headers["Atoll-Tenant"]
