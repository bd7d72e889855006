"""How images are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from atoll.contract.errors import InvalidRequest
from atoll.runtime.images.fetch import _tls
from atoll.runtime.images.reference import ImageReference

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12", "docker.io/library/python:3.12"),
        ("docker.io/python:3.12", "docker.io/library/python:3.12"),
        ("index.docker.io/library/python", "docker.io/library/python:latest"),
        ("docker://owner/name", "docker.io/owner/name:latest"),
        (f"ghcr.io/org/name@{DIGEST}", f"ghcr.io/org/name@{DIGEST}"),
        (f"ghcr.io/org/name:1@{DIGEST}", f"ghcr.io/org/name@{DIGEST}"),
        ("localhost/x", "localhost/x:latest"),
        ("localhost:5000/x:tag", "localhost:5000/x:tag"),
        ("127.0.0.1:5000/a/b/c", "127.0.0.1:5000/a/b/c:latest"),
        ("[::1]:5000/x", "[::1]:5000/x:latest"),
        ("a/b/c:1", "docker.io/a/b/c:1"),
    ],
)
def test_a_name_is_completed_as_docker_does(text: str, name: str):
    reference = ImageReference.parse(text)
    assert (reference.kind, reference.name, reference.is_local) == ("registry", name, False)
    assert ImageReference.parse(reference.name) == reference
    assert ImageReference.parse(reference.short) == reference


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "Python", "a b", "a//b", "/a", "a/", "-a", "a:", "a:b:c", "a@b", f"a@{DIGEST}0", "a:tag!", "a/../b"),
        *("--help", "a\n", "a;b", "https://a/b", "localhost:5000:x/y", "dir:relative", "tar:", "tar:a\0b", "x" * 600),
    ],
)
def test_what_is_not_a_name_is_refused_with_what_is(text: str):
    with pytest.raises(InvalidRequest):
        ImageReference.parse(text)


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("dir:/srv/root", "dir:/srv/root", "/srv/root"),
        ("dir:/srv/../srv/./root/", "dir:/srv/root", "/srv/root"),
        ("tar:/a/b:c.tar", "tar:/a/b:c.tar", "/a/b:c.tar"),
        ("docker-archive:/a.tar", "docker-archive:/a.tar", "/a.tar"),
        ("oci:/no/such/layout:1.0", "oci:/no/such/layout:1.0", "/no/such/layout"),
        ("oci:/no/such/layout", "oci:/no/such/layout", "/no/such/layout"),
    ],
)
def test_a_path_of_the_machine_is_told_apart_from_a_name(text: str, name: str, path: str):
    reference = ImageReference.parse(text)
    assert (reference.name, reference.path, reference.is_local) == (name, Path(path), True)
    assert ImageReference.parse(reference.name) == reference


@given(st.text(max_size=80))
def test_any_text_is_a_name_or_refused_and_a_name_stays_what_it_is(text: str):
    try:
        reference = ImageReference.parse(text)
    except InvalidRequest:
        return
    assert ImageReference.parse(reference.name) == reference


@pytest.mark.parametrize("repository", ["localhost:5000/x", "localhost/x", "127.0.0.1:5000/x", "[::1]:5000/x"])
def test_a_registry_on_this_machine_may_speak_plain_http(repository: str):
    assert _tls("--tls-verify", repository) == ["--tls-verify=false"]


@pytest.mark.parametrize(
    "repository",
    ["docker.io/library/x", "localhost.example.org/x", "127.0.0.1.example.org/x", "10.0.0.1:5000/x", "[::2]/x"],
)
def test_any_other_registry_must_prove_who_it_is(repository: str):
    assert _tls("--tls-verify", repository) == []
