"""Secrets that stay outside: what the inside has of them, whom it trusts, and that no value is anywhere.

Whether values arrive where they should, and nowhere else, is tried in `tests/attacks/test_secrets.py`.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

import atoll
from atoll import Engine, InvalidRequest, Sandbox, SandboxError, Secret
from atoll.contract.model import RuntimeName
from atoll.runtime.secrets.ca_bundle import BUNDLE, VARIABLES
from tests import searching

VALUE = "sk-live-0b5f1c7a9e"
"""Of the secret that stays outside."""
SHOWN = "tk-inside-77a1c3d9"
"""Of the variable that the inside may see."""
VERIFY = "openssl verify {} /usr/local/share/ca-certificates/atoll.crt"


def secrets() -> dict[str, Secret]:
    return {"API_KEY": Secret(VALUE, hosts=["api.test"]), "OTHER": Secret(VALUE, hosts=["b.test"], header="x-api-key")}


@pytest.fixture
async def keeper(engine: Engine) -> AsyncIterator[Sandbox]:
    """A sandbox with secrets of both kinds."""
    async with await engine.create(secrets=secrets(), secret_env={"TOKEN": SHOWN}) as sandbox:
        yield sandbox


async def test_values_are_nowhere(
    keeper: Sandbox, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, as_root: None
) -> None:
    """In no memory, environment, file, layer, checkpoint, archive, record, log, listing or error."""
    caplog.set_level(logging.DEBUG)
    await (await keeper.spawn("exec sleep 31536043")).detach()
    printed = await keeper.exec("echo $API_KEY $TOKEN | tee seen; env > all; echo $API_KEY > /tmp/x")
    placeholder, shown = printed.stdout.split()
    assert placeholder != VALUE
    assert shown == SHOWN
    said = [json.dumps(info.model_dump(mode="json")) for info in await engine.list()]
    said.append(repr(keeper) + repr(keeper.info) + repr(vars(keeper.info)))

    # What runs has what it may have, which shows that it would be found.
    at = searching.processes_of(keeper.id)
    assert any(searching.in_memory(pid, SHOWN.encode()) for pid in at)
    assert not any(searching.in_memory(pid, VALUE.encode()) for pid in at)

    kept = await keeper.checkpoint("kept")
    (fork,) = await keeper.fork()
    assert (await fork.exec("echo $API_KEY $TOKEN")).stdout == f"{placeholder} {SHOWN}\n"
    await fork.sleep()
    archive = tmp_path / "archive"
    await keeper.export(archive)
    with pytest.raises(InvalidRequest) as refused:
        await engine.create(secrets=secrets(), env={"API_KEY": "x"}, secret_env={"TOKEN": SHOWN})
    said += [str(refused.value), repr(refused.value.to_dict())]

    if kept.with_memory:
        for image in engine.state_dir.glob("**/checkpoint.img"):
            assert searching.in_saved_memory(image.parent, SHOWN.encode())
            assert not searching.in_saved_memory(image.parent, VALUE.encode())
    written = {os.path.basename(path) for path in searching.in_tree(engine.state_dir, SHOWN.encode())}
    assert written - {"pages.img"} == {"seen", "all"}  # what was written inside, to its files, and saved memory
    assert searching.in_tree(engine.state_dir, VALUE.encode()) == []
    assert searching.in_tree(engine.state_dir, b"PRIVATE KEY") == []
    assert searching.in_archive(archive, SHOWN.encode())
    assert not searching.in_archive(archive, VALUE.encode())
    said += [record.getMessage() for record in caplog.records]
    assert not [text for text in said if VALUE in text or SHOWN in text]
    await fork.destroy()
    await engine.delete_checkpoint(kept.id)


async def test_whom_the_inside_trusts_is_there_however_it_lives_on(keeper: Sandbox, engine: Engine) -> None:
    async def trusts(sandbox: Sandbox) -> None:
        done = await sandbox.exec(VERIFY.format("-CAfile $SSL_CERT_FILE"))
        assert done.ok, done.stderr
        env = dict(line.split("=", 1) for line in (await sandbox.exec("env")).stdout.splitlines())
        assert {name: env.get(name) for name in VARIABLES} == VARIABLES

    await trusts(keeper)
    # Without variables too, by the directory; and what was trusted before still is.
    assert (await keeper.exec(VERIFY.format("-no-CAfile -CApath /etc/ssl/certs"))).ok
    before = Path(BUNDLE).read_bytes()
    assert (await keeper.files.read_bytes(BUNDLE)).startswith(before)
    kept = await keeper.checkpoint("kept")
    (fork,) = await keeper.fork()
    await trusts(fork)
    await fork.destroy()
    await keeper.restore("kept")
    await trusts(keeper)
    await keeper.sleep()
    await trusts(keeper)
    await engine.delete_checkpoint(kept.id)


@pytest.mark.core
async def test_an_image_that_trusts_nobody_trusts_whom_this_machine_does(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    async with await engine.create(image=f"dir:{tmp_path}", secrets=secrets()) as sandbox:
        bundle = (await sandbox.files.read_bytes(BUNDLE)).decode()
    assert bundle.startswith(Path(BUNDLE).read_text())
    assert len(ssl.create_default_context(cadata=bundle).get_ca_certs()) > 1


async def test_without_secrets_for_hosts_nobody_is_trusted_anew(engine: Engine) -> None:
    plain = {"PLAIN": Secret(VALUE, hosts=["http://plain.test"])}
    async with engine.pool("session", secrets=plain, secret_env={"TOKEN": SHOWN}) as pool:
        sandbox = await pool.get()
        assert not await sandbox.files.exists("/usr/local/share/ca-certificates/atoll.crt")
        env = (await sandbox.exec("env")).stdout
        assert f"TOKEN={SHOWN}\n" in env
        assert "PLAIN=atoll_secret_" in env
        assert "SSL_CERT_FILE" not in env
        await pool.aclose()


@pytest.mark.core
async def test_whoever_takes_a_sandbox_up_has_its_secrets_if_they_have_the_key(
    keeper: Sandbox, state_dir: Path, runtime_name: RuntimeName
) -> None:
    async with atoll.open(state_dir, settings=atoll.Settings(runtime=runtime_name)) as other:
        assert (await (await other.get(keeper.name)).exec("echo $TOKEN")).stdout == f"{SHOWN}\n"
    assert stat.S_IMODE((state_dir / "key").stat().st_mode) == 0o600
    another = atoll.Settings(runtime=runtime_name, secrets_key=SecretStr("another key than that of the directory"))
    async with atoll.open(state_dir, settings=another) as other:
        with pytest.raises(SandboxError, match="encrypted with another key") as refused:
            await other.get(keeper.name)
        assert "ATOLL_SECRETS_KEY" in str(refused.value.hint)
        assert keeper.name in [info.name for info in await other.list()]


async def test_a_sandbox_that_waited_is_given_secrets_too(engine: Engine) -> None:
    limits = atoll.Limits(open_files=300)
    await engine.warm(1, limits=limits)
    async with await engine.create(limits=limits, secrets=secrets(), secret_env={"TOKEN": SHOWN}) as sandbox:
        assert (await sandbox.exec("echo $TOKEN; " + VERIFY.format(f"-CAfile {BUNDLE}"))).stdout.split()[0] == SHOWN
        assert (await sandbox.exec(VERIFY.format(f"-CAfile {BUNDLE}"))).ok
    await engine.warm(0, limits=limits)


async def test_what_is_no_secret_is_refused_and_not_repeated(engine: Engine) -> None:
    for wrong in (
        {"secrets": {"not a name": Secret(VALUE, hosts=["api.test"])}},
        {"secrets": {"API_KEY": VALUE}},
        {"secrets": {"API_KEY": Secret(VALUE, hosts=["api.test"])}, "secret_env": {"API_KEY": VALUE}},
        {"secret_env": {"TOKEN": VALUE + "\0"}},
        {"secret_env": {"TOKEN": VALUE.encode()}},
    ):
        with pytest.raises(InvalidRequest) as refused:
            await engine.create(**wrong)
        assert VALUE not in str(refused.value) + repr(refused.value.to_dict())


async def test_a_checkpoint_of_another_brings_its_files_and_not_its_secrets(engine: Engine, as_root: None) -> None:
    own = await engine.create("own", secret_env={"TOKEN": "mine"})
    other = await engine.create("other", secret_env={"TOKEN": "theirs"})
    await other.files.write_text("f", "from the other ")
    checkpoint = await other.checkpoint()
    await own.restore(checkpoint.id, foreign=True)
    async with atoll.open(engine.state_dir) as elsewhere:
        for sandbox in (own, await elsewhere.get("own")):
            assert (await sandbox.exec("cat f; echo $TOKEN")).stdout == "from the other mine\n"
    for sandbox in (own, other):
        await sandbox.destroy()
    await engine.delete_checkpoint(checkpoint.id)
