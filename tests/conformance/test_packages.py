"""Installing packages as people and models type it, from the indexes that this machine is configured for."""

from __future__ import annotations

import os
import shutil

import anyio
import pytest

from atoll import NetworkPolicy
from atoll.runtime.engine import LocalEngine
from atoll.testing.plugin import STRICT
from atoll.testing.waiting import eventually

PIP = "pip install --no-input --disable-pip-version-check --retries 1 --no-cache-dir --target lib six"
NPM = "npm install --no-audit --no-fund --fetch-retries=0 --prefix lib left-pad"


@pytest.fixture
async def indexes(engine: LocalEngine) -> NetworkPolicy:
    """The preset, where this machine reaches its own index."""
    policy = NetworkPolicy(allow="registries")
    found = await engine._provisioner.find_indexes(policy)
    assert found is not None
    host, _, port = found.allow[-1].rpartition(":")
    try:
        with anyio.fail_after(10):
            await (await anyio.connect_tcp(host, int(port))).aclose()
    except OSError as error:
        if STRICT:
            raise
        pytest.skip(f"a package index does not answer: {error}")
    return policy


async def test_packages_are_installed_from_the_indexes_that_this_machine_is_configured_for(
    engine: LocalEngine, indexes: NetworkPolicy
) -> None:
    async with await engine.create(network=indexes) as box:
        done = await box.exec(f"{PIP} && PYTHONPATH=lib python3 -c 'import six; print(six.__name__)'", timeout_s=50)
        assert done.stdout.endswith("six\n"), done.stderr
        done = await box.exec(f"{NPM} && ls lib/node_modules", timeout_s=50)
        assert done.stdout.endswith("left-pad\n"), done.stderr
        assert {record.verdict for record in await box.audit()} == {"allowed"}

        async def told() -> bool:
            return all(record.received_bytes for record in await box.audit())

        await eventually(told, "each connection has ended, and what it brought is written down")
        # Nothing else is allowed by that.
        refused = await box.exec("curl -sS http://example.com/")
        assert "to allow it, add the rule example.com:80" in refused.stdout


async def test_packages_that_are_not_allowed_fail_with_the_rule_that_is_missing(
    engine: LocalEngine, indexes: NetworkPolicy
) -> None:
    async with await engine.create(network=NetworkPolicy()) as box:
        refused = await box.exec(PIP, timeout_s=50)
        assert refused.exit_code != 0
        assert "403 Forbidden" in refused.stderr
        assert "to allow it, add the rule " in refused.stderr
        refused = await box.exec(NPM, timeout_s=50)
        assert refused.exit_code != 0
        assert "403" in refused.stderr
        assert {record.verdict for record in await box.audit()} == {"denied"}


@pytest.mark.skipif(os.geteuid() != 0, reason="an unprivileged user's root cannot write to the machine's /usr")
@pytest.mark.skipif(not STRICT and shutil.which("apt-get") is None, reason="this is not Debian or Ubuntu")
async def test_root_inside_installs_packages_of_the_distribution(engine: LocalEngine, indexes: NetworkPolicy) -> None:
    async with engine.create(network=indexes) as box:
        installed = await box.exec("apt-get update && apt-get install -y hello", user="root", timeout_s=55)
        assert installed.exit_code == 0, installed.stdout + installed.stderr
        assert (await box.exec("hello")).stdout == "Hello, world!\n"


async def test_the_user_installs_programs_with_pip_and_npm(engine: LocalEngine, indexes: NetworkPolicy) -> None:
    async with engine.create(network=indexes) as box:
        installed = await box.exec("pip install --retries 1 cowsay && npm install -g semver", timeout_s=55)
        assert installed.exit_code == 0, installed.stdout + installed.stderr
        said = await box.exec("cowsay -t hello && semver 1.2.3")
        assert "hello" in said.stdout
        assert said.stdout.endswith("1.2.3\n")
