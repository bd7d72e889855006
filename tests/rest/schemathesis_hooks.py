"""What schemathesis has to know of the REST API beyond its document. Loaded by it (`schemathesis.toml`).

Requests that are drawn at random mostly ask for what does not exist. So that they come further than to a 404, those of
the phases before the stateful one are for things that exist (`ATOLL_FUZZ_IDS`), and what a scenario makes is made
without what only another machine could have.
"""

from __future__ import annotations

import json
import os
from collections import deque
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeGuard

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, CheckContext, HookContext, Response
from schemathesis.core.failures import Failure
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.meta import TestPhase
from schemathesis.openapi.checks import RejectedPositiveData, UseAfterFree

SHAPE = {"code": str, "message": str, "details": dict, "request_id": str}
KEPT = frozenset(os.environ["ATOLL_FUZZ_KEPT"].split())
"""Tenants and keys that the run itself needs: they are neither changed nor deleted."""
IDS: dict[str, Any] = json.loads(os.environ["ATOLL_FUZZ_IDS"])
"""What exists, by the parameter of a path. Requests that would end it are for something else."""
ENDS = frozenset({"sandboxes_shutdown", "sandboxes_sleep", "sandboxes_restore"})
SHOWN_AFTER_DELETION = frozenset({"keys_get", "workspaces_get"})
"""A key that was revoked is shown as such: the audit log names it. A config without a workspace may have one again."""
GOES_ON = "files_watch"
"""For as long as its client: `tests/rest/test_files.py` has what it does with a sandbox."""
MAKES = frozenset({"volumes_import", "builds_upload", "templates_tag"})
"""What their paths name last."""
ARCHIVES = [bytes(1024), Path(os.environ["ATOLL_FUZZ_ARCHIVE"]).read_bytes()]
"""An empty tar, and a sandbox that was exported."""
ELSEWHERE = {
    "sandboxes_create": {
        *("image", "from_checkpoint", "runtime", "mounts", "network", "ephemeral"),
        *("user", "cwd", "limits", "secrets", "secret_env", "env"),
    },
    "processes_spawn": {"env", "cwd", "user"},
    "code_sessions_create": {"env", "cwd", "user", "language"},
    "volumes_create": {"size_bytes"},
    "builds_create": {"runtime", "limits", "network", "step_timeout_s", "cache"},
    "configs_create": {"model_config", "provisioning_bundle", "workspace_image", "workspace_network", "system_prompt"},
}
"""Fields of what is made in a scenario that it is made without: they would mostly name what there is not."""
RULES = (
    "is not an image reference",
    "is not a network rule",
    "is not a pattern for images",
    "is not a directory that may be mounted",
    "is not a valid header for a secret",
    "is not a valid host for a secret",
    "path, or path_base64",
    "target, or target_base64",
    "stdin and stdin_base64",
    "is not base64",
    "Base64 decoding error",
    "the path is empty",
    "the command is empty",
    "the pattern",
    "give an absolute one",
    "give one name for each",
    "is named",
    "on_expiry and ttl_renewed_by_use",
    "does not have the scope",
    "a key without a tenant",
    "output_limit_bytes may be",
    "is no call of the session's last execution",
    "there is no such owner",
    "the options of a sandbox from a checkpoint",
    "a part of the kind text has content",
    "conversation_id is missing",
    "the message is empty",
    "give one of message, tool_results and resume",
    "tool_results: ",
    "a client-side agent has no workspace",
    "the agent is client-side",
    "template_vars: ",
    "system_prompt: ",
    "give one of plan and dockerfile",
    "a plan has its own",
    "tools_config: ",
    "the body is empty",
)
"""What is wrong with a request that fits the document, where no schema states the rule: it is about the meaning of a
text, about two fields, or about what there is."""
FILES = frozenset({"path_is_directory", "path_not_directory", "file_error", "user_not_found"})
"""Codes of what the files of a sandbox, or its users, do not allow."""
MINE = "/tmp/mine"
MINE_BASE64 = "L3RtcC9taW5l"
MIN_TTL_S = 3600
MIN_LIMITS = {"memory_bytes": 2**28, "cpus": 0.5, "pids": 256, "open_files": 1024}
"""Of sandboxes that run: one that starves ends, or does not answer, and that is no failure of the server."""
MAX_FORKS = 2
MAX_EXEC_S = 1e9
"""What the document allows a command."""
LEFT = 24
"""Sandboxes that were made and are left, and webhooks: more than a scenario can make."""

schemathesis.serializer.alias("application/gzip", "application/octet-stream")
schemathesis.openapi.media_type(
    "application/gzip", st.just(Path(os.environ["ATOLL_FUZZ_BUNDLE"]).read_bytes()) | st.binary()
)
schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
for media_type in ("application/x-tar", "application/octet-stream"):
    schemathesis.openapi.media_type(media_type, st.sampled_from(ARCHIVES) | st.binary())
made: dict[str, deque[str]] = {"sandboxes": deque(), "webhooks": deque()}
numbers = count()


# -------------------------------------------------------------------------------------------------------------- checks


@schemathesis.check
def one_shape_of_errors(_ctx: CheckContext, response: Response, _case: Case) -> None:
    if response.status_code < 400 or response.request.method == "HEAD":
        return
    body = response.json()
    assert {name: type(value) for name, value in body.items()} == SHAPE, f"an error of another shape: {body}"
    assert response.headers["atoll-request-id"] == [body["request_id"]]


@schemathesis.check
class EveryOperationIsReached:
    """Every operation has been carried out at least once: else the other checks have seen nothing of it."""

    def __init__(self, unreached: list[str] | None = None) -> None:
        self._tested: set[str] = set()
        self._reached = set(unreached or ())

    def after_response(self, _ctx: CheckContext, response: Response, case: Case) -> None:
        name = case.operation.definition.raw["operationId"]
        self._tested.add(name)
        if response.status_code < 400:
            self._reached.add(name)

    def after_run(self, _ctx: CheckContext) -> None:
        missing = sorted(self._tested - self._reached)
        assert not missing or "ATOLL_FUZZ_EXAMPLES" not in os.environ, f"never carried out: {', '.join(missing)}"


@schemathesis.hook
def filter_failure(_context: HookContext, failure: Failure, case: Case, response: Response) -> bool:
    """Whether it is one."""
    if isinstance(failure, UseAfterFree) and case.operation.definition.raw["operationId"] in SHOWN_AFTER_DELETION:
        return False
    if isinstance(failure, RejectedPositiveData) and response.status_code == 400:
        error = response.json()
        return error["code"] not in FILES and not any(rule in error["message"] for rule in RULES)
    return True


# ------------------------------------------------------------------------------------------------------------ requests


@schemathesis.hook
def before_load_schema(_context: HookContext, raw_schema: dict[str, Any]) -> None:
    """Without Atoll-Tenant, of which `tests/rest/test_walk.py` has every operation: nearly all requests would be
    refused for it, and what a link leads to is looked for only if the link gives all of its parameters."""
    for methods in raw_schema["paths"].values():
        for operation in methods.values():
            operation["parameters"] = [each for each in operation.get("parameters", ()) if "$ref" not in each]


@schemathesis.hook
def filter_case(_context: HookContext, case: Case) -> bool:
    given: dict[str, Any] = case.path_parameters or {}
    return not KEPT.intersection(str(value) for value in given.values())


@schemathesis.hook
def before_call(_context: HookContext, case: Case, _kwargs: dict[str, Any]) -> None:
    name = case.operation.definition.raw["operationId"]
    _end_soon(case, name)
    if case.meta is None:
        return
    if case.meta.generation.mode.is_positive:
        _keep_rules(case, name)
    if case.meta.phase.name is not TestPhase.STATEFUL:
        _use_what_exists(case, name)
        if case.meta.generation.mode.is_positive and next(numbers) % 2:
            _give_what_works(case, name)
    elif isinstance(case.body, dict) and case.meta.generation.mode.is_positive:
        _make_what_can_be_used(case.body, name)


def _end_soon(case: Case, name: str) -> None:
    """Streams that would go on end when all that is there was sent, and nothing is waited for for long."""
    follow = any(each.name == "follow" for each in case.operation.query)
    if follow and str(case.query.get("follow", True)).lower() in ("true", "1", "on", "yes", "t", "y"):
        case.query["follow"] = False
    both: tuple[Any, Any] = (case.query, case.body)
    for given in both:
        for field in ("timeout_s", "wait_s") if isinstance(given, dict) else ():
            with suppress(KeyError, ValueError, TypeError):
                given[field] = 1 if 1 < float(given[field]) <= 86_400 else given[field]
    if name == "processes_wait":
        case.query.setdefault("timeout_s", 1)
    if name == "sandboxes_exec" and isinstance(case.body, dict):
        given_s = case.body.get("timeout_s")
        if given_s is None or (_is_number(given_s) and 1 < given_s <= MAX_EXEC_S):
            case.body["timeout_s"] = 1


def _keep_rules(case: Case, name: str) -> None:
    """Keep rules that no schema states: one of two fields is given, and a key is used once. Nothing expires or starves
    while it is used."""
    body: dict[str, Any] = case.body if isinstance(case.body, dict) else {}
    if "files" in (case.operation.tags or ()):
        given = body if case.method == "POST" else case.query
        _give_one(given, "path", MINE if case.method == "POST" or case.operation.path.endswith("/files") else None)
        _give_one(given, "target", f"/tmp/new-{next(numbers)}" if name in ("files_rename", "files_symlink") else None)
        if name == "files_grep" and given.get("path") == "/":
            given["path"] = "/etc"  # all files of the machine take longer than an answer may
    _give_one(body, "stdin", None)
    if name == "chat":
        _say_one(body)
    if name == "builds_create":
        _build_one(body)
    if _is_number(ttl_s := body.get("ttl_s")):
        body["ttl_s"] = max(ttl_s, MIN_TTL_S)
    if isinstance(limits := body.get("limits"), dict) and case.method == "PATCH":
        limits |= {each: max(limits[each], MIN_LIMITS[each]) for each in MIN_LIMITS if _is_number(limits.get(each))}
    if len(key := case.headers.get("Idempotency-Key", "")) in range(1, 200):
        case.headers["Idempotency-Key"] = f"{key}{next(numbers)}"
    # schemathesis fills a header whose pattern has digits only with 0, whatever else the pattern asks for.
    if case.headers.get("last-event-id") == "0" and name == "processes_output":
        case.headers["last-event-id"] = "0-0"
    if name in ("webhooks_create", "webhooks_update") and body.get("url") is not None:
        body["url"] = "https://hook.invalid/"  # no request leaves the machine
    if name == "sandboxes_import" and case.query.get("name") is not None:
        case.query["name"] = f"import-{next(numbers)}"


def _give_what_works(case: Case, name: str) -> None:
    """Of requests that nearly never fit by chance: every second one does."""
    if name == "sandboxes_import":
        case.query = {"name": f"import-{next(numbers)}"}
        case.body = ARCHIVES[1]
    elif name == "builds_create":
        case.body = {"name": f"made-{next(numbers)}", "plan": {"steps": []}}
    elif name in ("templates_tag", "templates_untag") and "template" in IDS:
        case.path_parameters = {"template": IDS["template"], "tag": "more"}
        case.body = {"version": IDS["tag"]} if name == "templates_tag" else case.body
    elif name == "templates_delete" and "template" in IDS:
        case.path_parameters = {"template": IDS["removable"].pop() if IDS["removable"] else "none"}
    elif name == "files_chown":
        case.body = {"path": MINE, "owner": "user", "user": "root"}
    elif name == "sandboxes_restore" and "restored" in IDS:
        case.path_parameters = {"sandbox": IDS["restored"]}
        case.body = {"checkpoint": IDS["restored_checkpoint"]}


def _give_one(given: dict[str, Any], field: str, default: str | None) -> None:
    """Give a text, or its bytes, and not both; the default if there is neither."""
    raw = f"{field}_base64"
    if given.get(field) is not None:
        given.pop(raw, None)
    elif given.get(raw) is not None:
        given[raw] = MINE_BASE64
    elif default is not None:
        given[field] = default


def _say_one(body: dict[str, Any]) -> None:
    """Give one of message, results and resume. Results are given for the call that the conversation waits for."""
    if body.get("message") is not None:
        body |= {"tool_results": None, "resume": False}
    elif body.get("tool_results") is not None:
        body["resume"] = False


def _build_one(body: dict[str, Any]) -> None:
    """Give a plan, or a Dockerfile that can be read: nearly no other text can."""
    if body.get("plan") is not None:
        body |= {"dockerfile": None, "files": None, "arguments": {}, "ready_command": []}
    elif body.get("dockerfile") is not None:
        body["dockerfile"] = "FROM host\nRUN true"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _use_what_exists(case: Case, name: str) -> None:
    if case.meta is None or case.meta.is_negative_at(ParameterLocation.PATH):
        return
    given: dict[str, Any] = case.path_parameters or {}
    if case.operation.path.startswith("/api/v1/configs/{config}/workspace") and "sandboxed" in IDS:
        given["config"] = IDS["sandboxed"]
        given.update({name: IDS[name] for name in given if name == "external_id"})
        return
    if name == "chat" and isinstance(case.body, dict) and case.body.get("conversation_id") is not None:
        case.body["conversation_id"] = IDS["conversation"]
    ends = case.method == "DELETE" and case.operation.path.endswith("}")
    ended = list(given)[-1:] if ends or name in {*ENDS, GOES_ON, *MAKES} else []
    for parameter in given.keys() & IDS.keys():
        if parameter not in ended:
            given[parameter] = IDS[parameter]
        elif given[parameter] in IDS.values():
            given[parameter] = "another" if isinstance(IDS[parameter], str) else IDS[parameter] + 1000


def _make_what_can_be_used(body: dict[str, Any], name: str) -> None:
    for field in ELSEWHERE.get(name, ()):
        body.pop(field, None)
    if name == "processes_spawn":
        body |= {"command": ["cat"], "stdin": True}
    if name == "builds_create":
        body |= {"plan": {"steps": []}, "dockerfile": None}
        _build_one(body)
    if name == "sandboxes_fork":
        body |= {"count": MAX_FORKS, "names": None, "checkpoint": None}


@schemathesis.hook
def after_call(_context: HookContext, case: Case, response: Response) -> None:
    """Delete what was made long ago, and of which a tenant may have a number."""
    if response.status_code != 201:
        return
    body = response.json()
    made["webhooks"].extend([body["webhook"]["id"]] if "webhook" in body else ())
    made["sandboxes"].extend(each["name"] for each in body.get("items", [body]) if {"limits", "name"} <= each.keys())
    for kind, ids in made.items():
        while len(ids) > LEFT:
            url = f"{case.operation.base_url}/api/v1/{kind}/{ids.popleft()}"
            requests.delete(url, headers={"X-API-Key": os.environ["ATOLL_FUZZ_KEY"]}, timeout=60)
