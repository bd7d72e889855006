"""What is secret about a sandbox, on disk: sealed with a key, and opened with no other."""

from __future__ import annotations

import base64
import stat
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import Field, SecretStr, field_validator

from atoll import InvalidRequest, SandboxError, Secret, Settings
from atoll.runtime.secrets.vault import SandboxSecrets, Vault

VALUE = "sk-live-4f9a0c77d1"


@pytest.fixture(scope="module")
def secrets() -> SandboxSecrets:
    secrets = SandboxSecrets.of({"KEY": Secret(VALUE, hosts=["api.test"])}, {"TOKEN": "a token"})
    assert secrets is not None
    return secrets


def test_what_was_sealed_is_opened_with_the_same_key_by_whoever_has_it(tmp_path: Path, secrets: SandboxSecrets) -> None:
    sealed = Vault(tmp_path, None).seal(secrets)
    assert Vault(tmp_path, None).open(sealed) == secrets
    assert VALUE.encode() not in base64.b64decode(sealed)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_key_that_is_given_leaves_none_on_disk(tmp_path: Path, secrets: SandboxSecrets) -> None:
    given = Vault(tmp_path, SecretStr("x" * 40))
    assert given.open(given.seal(secrets)) == secrets
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SandboxError, match="another key"):
        Vault(tmp_path, SecretStr("y" * 40)).open(given.seal(secrets))


def test_what_was_changed_is_not_opened(tmp_path: Path, secrets: SandboxSecrets) -> None:
    vault = Vault(tmp_path, None)
    data = base64.b64decode(vault.seal(secrets))
    for wrong in (data[:-1], data[:20] + bytes([data[20] ^ 1]) + data[21:], b"", b"x" * 11):
        with pytest.raises(SandboxError, match="changed"):
            vault.open(base64.b64encode(wrong).decode())
    with pytest.raises(SandboxError, match="changed"):
        vault.open("no base64 at all")


def test_several_that_need_a_key_at_once_get_the_same(tmp_path: Path, secrets: SandboxSecrets) -> None:
    with ThreadPoolExecutor(8) as pool:
        sealed = list(pool.map(lambda _: Vault(tmp_path, None).seal(secrets), range(16)))
    assert all(Vault(tmp_path, None).open(each) == secrets for each in sealed)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_key_that_others_can_read_or_that_is_none_is_not_used(tmp_path: Path, secrets: SandboxSecrets) -> None:
    (tmp_path / "key").write_text("k" * 43)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(InvalidRequest, match="readable by other users"):
        Vault(tmp_path, None).seal(secrets)
    (tmp_path / "key").write_text("")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(InvalidRequest, match="not created by Atoll"):
        Vault(tmp_path, None).seal(secrets)


def test_a_key_from_the_environment_is_long_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_SECRETS_KEY", "k" * 32)
    settings = Settings.from_environment()
    assert settings.secrets_key is not None
    assert "kkk" not in repr(settings) + settings.model_dump_json()
    monkeypatch.setenv("ATOLL_SECRETS_KEY", "too-short")
    with pytest.raises(InvalidRequest, match="fewer than 32") as refused:
        Settings.from_environment()
    assert "too-short" not in str(refused.value)


class MoreSecrets(Settings):
    added_later: SecretStr | None = Field(default=None, min_length=16)

    @field_validator("added_later")
    @classmethod
    def refuse_spaces(cls, value: SecretStr) -> SecretStr:
        if " " in value.get_secret_value():
            raise ValueError(f"{value.get_secret_value()} has a space")
        return value


@pytest.mark.parametrize("field", ["secrets_key", "mcp_token", "messages_token", "added_later"])
@pytest.mark.parametrize("others", [{}, {"ATOLL_IMAGE": "host"}, {"ATOLL_PREVIEW_LISTEN": "nowhere"}])
@pytest.mark.parametrize("value", ["hunter2", "hunter2 and some more characters"])
def test_an_error_about_the_environment_never_shows_a_secret(
    monkeypatch: pytest.MonkeyPatch, field: str, others: dict[str, str], value: str
) -> None:
    """Whichever the field, whatever is wrong with it, and also if another variable is wrong."""
    if " " in value and field != "added_later":
        value = "hunter2"
    for variable, text in {f"ATOLL_{field.upper()}": value, **others}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidRequest) as refused:
        MoreSecrets.from_environment()
    assert "ATOLL_" in refused.value.message
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("value", "hosts", "header"),
    [
        ("short", ["api.test"], "authorization"),
        (f"{VALUE}\n", ["api.test"], "authorization"),
        (f"{VALUE}\r\nX-Injected: 1", ["api.test"], "authorization"),
        (f"{VALUE}ü", ["api.test"], "authorization"),
        (VALUE, [], "authorization"),
        (VALUE, ["*.test"], "authorization"),
        (VALUE, ["api.test:443"], "authorization"),
        (VALUE, ["https://api.test"], "authorization"),
        (VALUE, ["api.test/path"], "authorization"),
        (VALUE, ["192.0.2.1"], "authorization"),
        (VALUE, ["::1"], "authorization"),
        (VALUE, ["-a.test"], "authorization"),
        (VALUE, [""], "authorization"),
        (VALUE, ["api.test"], "Host"),
        (VALUE, ["api.test"], "Content-Length"),
        (VALUE, ["api.test"], "x y"),
        (VALUE, ["api.test"], ""),
    ],
)
def test_what_cannot_be_a_secret_is_refused_and_not_repeated(value: str, hosts: list[str], header: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Secret(value, hosts=hosts, header=header)
    assert VALUE not in str(refused.value)
    assert refused.value.__context__ is None


def test_a_secret_does_not_show() -> None:
    secret = Secret(VALUE, hosts="API.test", header="X-Api-Key")
    assert (secret.hosts, secret.header) == (("api.test",), "x-api-key")
    assert VALUE not in f"{secret} {secret!r} {secret.model_dump()} {secret.model_dump_json()} {vars(secret)}"


def test_headers_keep_their_authority_as_long_as_it_can_sign_for_their_hosts(secrets: SandboxSecrets) -> None:
    first = secrets.with_headers({"api.test": {"x-a": "1"}, "*.wide.test": {"x-b": "2"}})
    assert (first.authority, first.header_hosts) == (secrets.authority, ("api.test", "wide.test"))
    fewer = first.with_headers({"api.test": {"x-a": "3"}})
    assert fewer.header_authority == first.header_authority
    more = fewer.with_headers({"api.test": {"x-a": "3"}, "new.test": {"x-a": "3"}})
    assert more.header_authority != first.header_authority
    assert more.with_headers({}) == secrets
    assert secrets.with_headers({"http://plain.test": {"x-a": "1"}}).header_authority is None
