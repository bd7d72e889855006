"""The OpenAPI document is exact: what clients are generated from."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from atoll.surfaces.rest.errors import WORDS_FOR_PATTERNS, words_for
from tests.rest.test_walk import DOCUMENT, OPERATIONS

NAMES = [operation["operationId"] for _, _, operation in OPERATIONS]


def test_every_operation_has_a_name_of_its_own_and_a_tag() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert not [name for name in NAMES if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)]
    assert not [operation["operationId"] for _, _, operation in OPERATIONS if len(operation.get("tags", ())) != 1]
    assert not [operation["operationId"] for _, _, operation in OPERATIONS if not operation.get("description")]


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=NAMES)
def test_every_error_has_the_one_shape(method: str, path: str, operation: dict) -> None:
    for status, response in operation["responses"].items():
        assert "Atoll-Request-Id" in response["headers"]
        if int(status) >= 400:
            schema = response["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorBody"}, status
    assert {"400", "401", "403", "404", "429", "500", "503"} <= set(operation["responses"])


def test_nothing_of_fastapi_shows() -> None:
    assert "HTTPValidationError" not in str(DOCUMENT)


def patterns(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("pattern"), str):
            yield part["pattern"]
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            yield from patterns(each)


CHECKED_ELSEWHERE = {
    "^[^\\x00]*$",
    "^[a-z0-9][a-z0-9_.-]{0,62}$",
    "^[A-Za-z_][A-Za-z0-9_]*$",
    "^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$",
    "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
    "^[!-~]([ -~]*[!-~])?$",
}
"""Patterns that the document says and something else checks, with words of its own."""


def test_every_pattern_that_refuses_a_value_has_words_for_people() -> None:
    assert {each for each in patterns(DOCUMENT) if words_for(each) is None} == CHECKED_ELSEWHERE
    assert set(WORDS_FOR_PATTERNS) <= set(patterns(DOCUMENT))


def test_keys_are_declared() -> None:
    assert DOCUMENT["security"] == [{"ApiKey": []}, {"Bearer": []}]


def test_what_is_made_is_linked_to_what_can_be_done_with_it() -> None:
    links = {
        operation["operationId"]: set(operation["responses"].get("201", {}).get("links", {}))
        for _, _, operation in OPERATIONS
    }
    assert {"sandboxes_get", "sandboxes_delete", "sandboxes_fork", "checkpoints_create"} <= links["sandboxes_create"]
    assert {"checkpoints_get", "checkpoints_delete"} <= links["checkpoints_create"]
    assert {"webhooks_get", "webhooks_test"} <= links["webhooks_create"]
    assert {"keys_get", "keys_revoke"} <= links["keys_create"]


def test_every_operation_on_a_thing_is_linked_to_from_what_makes_it_or_lists_it() -> None:
    linked = {
        link["operationId"]
        for _, _, operation in OPERATIONS
        for response in operation["responses"].values()
        for link in response.get("links", {}).values()
    }
    on_a_thing = {operation["operationId"] for _, path, operation in OPERATIONS if "{" in path}
    # What an image is called is no answer's to say: it is pulled by its reference. An import makes what its path names,
    # and so does an upload.
    assert on_a_thing - linked == {"images_remove", "volumes_import", "builds_upload"}


def test_bodies_refuse_unknown_fields() -> None:
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for _, _, operation in OPERATIONS
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    ]
    schemas = DOCUMENT["components"]["schemas"]
    assert [name for name in bodies if schemas[name].get("additionalProperties") is not False] == []
