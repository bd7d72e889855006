"""What this machine is configured for, told by the tools themselves, with settings that a test makes up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from atoll import Unenforceable
from atoll.runtime.egress import registries
from atoll.testing.plugin import STRICT


@pytest.fixture
def certificate(tmp_path: Path) -> str:
    path = tmp_path / "bundle.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\n")
    return str(path)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own."""
    for name in ("PIP_CERT", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("npm_config_userconfig", str(tmp_path / "npmrc"))
    monkeypatch.setenv("npm_config_globalconfig", str(tmp_path / "none"))


def test_indexes_of_pip_are_told_without_passwords_and_without_those_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certificate: str
) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = https://user:secret@index.test/root/pypi/+simple/\n"
        f"extra-index-url = file:///opt/simple http://10.0.0.9:8080/simple\ncert = {certificate}\n"
        "[install]\ntrusted-host = 10.0.0.9\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    (found,) = registries.pip()
    assert sorted(str(registries._rule(url)) for url in found.urls) == ["10.0.0.9:8080", "index.test:443"]
    inside = f"{registries.CERTIFICATES}/pip.pem"
    assert found.env == {
        "PIP_INDEX_URL": "https://index.test/root/pypi/+simple/",
        "PIP_EXTRA_INDEX_URL": "http://10.0.0.9:8080/simple",
        "PIP_TRUSTED_HOST": "10.0.0.9",
        "PIP_CERT": inside,
    }
    assert found.certificates == {inside: certificate}
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.test/simple")
    (found,) = registries.pip()
    assert found.env["PIP_INDEX_URL"] == "https://variable.test/simple"


def test_settings_of_pip_are_read_in_several_lines_with_quotes_and_when_pip_is_to_be_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nquiet = 2\nindex-url = https://index.test/it's\nextra-index-url =\n    http://one.test/a\n"
        '    http://two.test/"b"\n[download]\nindex-url = https://other.test/\n[install]\nindex-url = https://install.test/'
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    (found,) = registries.pip()
    assert found.env["PIP_INDEX_URL"] == "https://install.test/"
    assert found.env["PIP_EXTRA_INDEX_URL"] == 'http://one.test/a http://two.test/"b"'
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.test/it's")
    (found,) = registries.pip()
    assert found.env["PIP_INDEX_URL"] == "https://variable.test/it's"


def test_without_settings_pip_says_which_index_it_has_and_it_is_not_written_here() -> None:
    (found,) = registries.pip()
    hosts = {str(url.hostname) for url in found.urls}
    assert len(hosts) == 2, "an index, and another host for its files"
    assert found.env["PIP_INDEX_URL"].startswith("https://")
    source = Path(registries.__file__).read_text()
    assert not [host for host in hosts if host in source]


@pytest.mark.skipif(not STRICT and shutil.which("npm") is None, reason="npm is not on this machine")
def test_registries_of_npm_are_told_with_those_of_scopes(tmp_path: Path, certificate: str) -> None:
    (tmp_path / "npmrc").write_text(
        "registry=https://npm.test:4873/\n@mine:registry=https://user:secret@scoped.test/npm/\n"
        f"cafile={certificate}\n//npm.test:4873/:_authToken=secret\n"
    )
    (found,) = registries.npm()
    assert sorted(str(registries._rule(url)) for url in found.urls) == ["npm.test:4873", "scoped.test:443"]
    inside = f"{registries.CERTIFICATES}/npm.pem"
    assert found.env == {"npm_config_registry": "https://npm.test:4873/", "npm_config_cafile": inside}
    assert "secret" not in repr(found)


def test_sources_of_apt_are_read_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "# deb http://comment.test/ x\ndeb [arch=amd64 signed-by=/k.gpg] https://one.test/debian stable main\n"
        "deb-src http://user:secret@two.test:8000/debian stable main\ndeb cdrom:[Disc]/ x\ndeb file:/srv x\n"
    )
    more = tmp_path / "sources.list.d"
    more.mkdir()
    (more / "a.sources").write_text(
        "Types: deb\n# URIs: http://comment.test\nURIs: http://three.test/debian\n https://[fd00::7]/x\nSuites: s\n\n"
        "Enabled: no\nURIs: http://disabled.test\n"
    )
    (more / "b.list.save").write_text("deb http://saved.test x\n")
    (found,) = registries.apt(tmp_path)
    assert sorted(str(registries._rule(url)) for url in found.urls) == [
        "[fd00::7]:443",
        "one.test:443",
        "three.test:80",
        "two.test:8000",
    ]
    assert found.files["/etc/apt/sources.list.d/atoll.list"] == (
        "deb [arch=amd64 signed-by=/k.gpg] https://one.test/debian stable main\n"
        "deb-src http://two.test:8000/debian stable main\n"
    )
    assert found.files["/etc/apt/sources.list.d/atoll.sources"] == (
        "Types: deb\nUris: http://three.test/debian https://[fd00::7]/x\nSuites: s\n"
    )
    assert "secret" not in repr(found)


async def test_a_machine_that_is_configured_for_none_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("pip", "npm", "apt"):
        monkeypatch.setattr(registries, tool, lambda: iter(()))
    with pytest.raises(Unenforceable, match="no package index"):
        await registries.find()
