"""Templates that the newest E2B SDK builds, and sandboxes that begin as them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from e2b import AsyncTemplate, Sandbox, SandboxException, Template, wait_for_file
from e2b.exceptions import BuildException
from e2b.template.logger import LogEntry

from atoll.testing.server import RunningServer
from atoll.testing.waiting import BOUND_S, wait_until


@pytest.fixture(scope="module", autouse=True)
def no_layers_left(server: RunningServer) -> Iterator[None]:
    yield
    with httpx2.Client(base_url=server.url, headers=server.headers, timeout=BOUND_S) as client:
        for each in client.get("/api/v1/checkpoints").json()["items"]:
            client.delete(f"/api/v1/checkpoints/{each['id']}").raise_for_status()


@pytest.fixture
def name() -> str:
    return f"t{uuid.uuid4().hex[:10]}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("context")
    (root / "app" / "deep").mkdir(parents=True)
    (root / "app" / "main.py").write_text("print('main')\n")
    (root / "app" / "deep" / "data.txt").write_text("data\n")
    (root / "app" / "debug.log").write_text("not copied\n")
    (root / "one.txt").write_text("one\n")
    (root / ".dockerignore").write_text("**/*.log\n")
    return root


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, headers=server.headers, timeout=BOUND_S) as client:
        yield client


def delete(client: httpx2.Client, name: str) -> None:
    assert client.delete(f"/templates/{name}").status_code == 204


def test_a_template_of_steps_and_files_is_built_and_used(files: Path, name: str, client: httpx2.Client) -> None:
    template = (
        Template(file_context_path=files)
        .from_image("host")
        .set_envs({"WHO": "world"})
        .set_envs({"GREETING": "hello $WHO"})
        .set_workdir("/srv/app")
        .run_cmd('echo "$GREETING from $(id -un) in $PWD" > greeting')
        .copy("app", "/srv/app/copied/")
        .copy("*.txt", "/srv/app/texts/", mode=0o600)
        .run_cmd("sudo sh -c 'echo root by sudo > /root/by-sudo'")
        .run_cmd("id -un > /root/who", user="root")
        .set_start_cmd("touch /tmp/is-ready && sleep 1000", wait_for_file("/tmp/is-ready"))
    )
    log: list[LogEntry] = []
    built = Template.build(template, name, tags=["v1"], on_build_logs=log.append)
    said = "\n".join(each.message for each in log)
    assert "RUN id -un > /root/who" in said
    assert Template.exists(name) is False, "only v1 was asked for"
    assert Template.exists(f"{name}:v1")
    sandbox = Sandbox.create(f"{name}:v1", timeout=120)
    try:
        seen = sandbox.commands.run(
            "cat greeting; echo $GREETING; pwd; find copied texts -type f -printf '%p %m %u\\n' | sort"
        )
        assert seen.stdout.splitlines() == [
            "hello world from user in /srv/app",
            "hello world",
            "/srv/app",
            "copied/deep/data.txt 644 user",
            "copied/main.py 644 user",
            "texts/one.txt 600 user",
        ]
        assert sandbox.files.exists("/tmp/is-ready")
        assert sandbox.commands.run("cat /root/who", user="root").stdout == "root\n"
        assert sandbox.commands.run("sudo cat /root/by-sudo").stdout == "root by sudo\n"
        assert any("sleep 1000" in " ".join([each.cmd, *each.args]) for each in sandbox.commands.list())
        assert sandbox.get_info().template_id == f"{name}:v1"
    finally:
        sandbox.kill()
    again: list[LogEntry] = []
    rebuilt = Template.build(template, f"{name}:v2", on_build_logs=again.append)
    assert rebuilt.build_id != built.build_id
    assert sum("kept from before" in each.message for each in again) == 5
    assert "Skipping upload" in "\n".join(each.message for each in again)
    assert Template.assign_tags(f"{name}:v2", ["stable"]).tags == ["stable"]
    assert {each.tag: each.build_id for each in Template.get_tags(name)}["stable"] == rebuilt.build_id
    Template.remove_tags(name, "v1")
    assert sorted(each.tag for each in Template.get_tags(name)) == ["stable", "v2"]
    (listed,) = [each for each in client.get("/templates").json() if each["templateID"] == name]
    assert (listed["buildStatus"], listed["names"]) == ("ready", [name])
    delete(client, f"{name}:stable")
    delete(client, f"{name}:v2")
    assert client.get(f"/templates/{name}").status_code == 404


def test_the_images_of_the_machine_are_not_told_to_who_builds(name: str) -> None:
    with pytest.raises(BuildException, match="the image no-such-image:latest cannot be fetched") as failed:
        Template.build(Template().from_image("no-such-image"), name)
    assert "present here" not in str(failed.value)


def test_a_failed_step_is_named_with_its_output_and_nothing_is_left(name: str, client: httpx2.Client) -> None:
    template = Template().from_image("host").run_cmd("true").run_cmd("echo the cause; exit 7")
    before = client.get("/v2/sandboxes").json()
    with pytest.raises(
        BuildException, match=r"(?s)step 2 of 2: RUN echo the cause; exit 7 failed with exit code 7.*the cause"
    ):
        Template.build(template, name)
    assert not Template.exists(name)
    assert client.get("/v2/sandboxes").json() == before
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create(name)


async def test_a_build_in_the_background_from_a_dockerfile_and_one_on_top_of_it(
    files: Path, name: str, client: httpx2.Client
) -> None:
    dockerfile = "FROM host\nENV A=1\nWORKDIR /data\nCOPY one.txt ./\nRUN cat one.txt > two.txt\n"
    template = AsyncTemplate(file_context_path=files).from_dockerfile(dockerfile)
    info = await AsyncTemplate.build_in_background(template, name)
    status = await AsyncTemplate.get_build_status(info, logs_offset=0)
    assert status.build_id == info.build_id

    def is_ready() -> bool:
        said = client.get(f"/templates/{name}/builds/{info.build_id}/status").json()
        assert said["status"] != "error", said
        return bool(said["status"] == "ready")

    wait_until(is_ready, "the template is built")
    other = f"{name}-more"
    await AsyncTemplate.build(AsyncTemplate().from_template(name).run_cmd("echo $A > three.txt", user="root"), other)
    sandbox = Sandbox.create(other, timeout=60)
    assert sandbox.commands.run("cat /data/two.txt /data/three.txt; id -un").stdout.split() == ["one", "1", "user"]
    sandbox.kill()
    delete(client, name)
    delete(client, other)


def test_links_to_upload_cannot_be_forged_moved_or_used_late(
    name: str, server: RunningServer, client: httpx2.Client
) -> None:
    client.post("/v3/templates", json={"name": name}).raise_for_status()
    files = "ab" * 32
    url = client.get(f"/templates/{name}/files/{files}").json()["url"]
    with httpx2.Client(timeout=BOUND_S) as anyone:
        assert anyone.put(url, content=b"x").status_code == 200
        assert client.get(f"/templates/{name}/files/{files}").json()["present"] is True
        for changed in (
            url.replace(files, "cd" * 32),
            url.replace("tenant=default", "tenant=other"),
            url.replace("until=1", "until=2"),
            url.replace("signature=", "signature=0"),
            url.partition("?")[0],
        ):
            assert anyone.put(changed, content=b"x").status_code == 403, changed
        assert anyone.put(url, content=b"").status_code == 400
        assert anyone.get(url).status_code == 401
    assert client.get(f"/templates/{name}/files/..x").status_code == 400
    assert client.get(f"/templates/unknown/files/{files}").status_code == 404


def test_a_build_counts_as_a_sandbox_and_its_base_is_what_the_policy_allows(name: str, client: httpx2.Client) -> None:
    policy, quotas = {"images": ["host"]}, {"sandboxes": 0}
    client.post("/api/v1/tenants", json={"name": name, "policy": policy, "quotas": quotas}).raise_for_status()
    key = client.post("/api/v1/keys", json={"name": "k", "role": "admin"}, headers={"Atoll-Tenant": name}).json()[
        "text"
    ]
    try:
        with pytest.raises(BuildException, match="quota"):
            Template.build(Template().from_image("host").run_cmd("true"), "t", api_key=key)
        with pytest.raises(BuildException, match="not allowed for this tenant; allowed: host"):
            Template.build(Template().from_image("debian:12"), "t", api_key=key)
    finally:
        client.delete(f"/api/v1/tenants/{name}?destroy=true").raise_for_status()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"fromImage": "host", "fromTemplate": "base"}, 400),
        ({"fromImage": "dir:/etc"}, 403),
        ({"fromTemplate": "unknown"}, 404),
        ({"fromImage": "host", "fromImageRegistry": {"type": "aws"}}, 501),
        ({"fromImage": "host", "steps": [{"type": "ADD", "args": ["a", "b"]}]}, 400),
        ({"fromImage": "host", "steps": [{"type": "ENV", "args": ["A"]}]}, 400),
        ({"fromImage": "host", "steps": [{"type": "COPY", "args": ["a", "/b"], "filesHash": "../x"}]}, 400),
    ],
)
def test_what_cannot_be_built_is_refused(client: httpx2.Client, name: str, body: object, status: int) -> None:
    build = client.post("/v3/templates", json={"name": name}).json()["buildID"]
    answer = client.post(f"/v2/templates/{name}/builds/{build}", json=body)
    assert answer.status_code == status, answer.text
