"""What a tenant's policy lets through, and the ways around it that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.contract.errors import Forbidden, InvalidRequest
from atoll.contract.model import Limits, Mount, ResolvedMount
from atoll.contract.network import NetworkPolicy, parse_rule
from atoll.runtime.egress.policy import PolicyEvaluator, special
from atoll.server import policy as checks
from atoll.server.tenants import TenantPolicy

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("patterns", "image"),
    [
        ("host", "host"),
        ("python", "python"),
        ("python", "python:3.12"),
        ("python", f"python@{DIGEST}"),
        ("python", "docker.io/library/python:3.12"),
        ("python", "docker://index.docker.io/library/python"),
        ("python:3.*", "python:3.12"),
        ("docker.io/python:3.*", "python:3.12"),
        ("acme/*", "acme/app:1"),
        ("acme/*", "acme/team/app:1"),
        ("ghcr.io/acme/*", "ghcr.io/acme/app"),
        ("ghcr.io/acme/*", "GHCR.io/acme/app"),
        ("*.example.com/*", "registry.example.com/a/b:1"),
        ("localhost:5000/*", "localhost:5000/a"),
        ("*", "ghcr.io/acme/app:1"),
        ("*/app", "ghcr.io/app"),
        ("dir:/srv/images/*", "dir:/srv/images/small"),
        ("host python", "python"),
    ],
)
def test_an_image_that_a_pattern_matches_is_allowed(patterns: str, image: str) -> None:
    checks.check_image(TenantPolicy(images=tuple(patterns.split())), image)


@pytest.mark.parametrize(
    ("pattern", "image"),
    [
        ("", "host"),
        ("*", "host"),
        ("*", "dir:/etc"),
        ("*", "tar:/srv/root.tar"),
        ("*", "localhost/app"),
        ("*", "localhost:5000/app"),
        ("*", "10.0.0.1/app"),
        ("*", "127.0.0.1:5000/app"),
        ("*", "127.0.0.0x1/app"),
        ("*", "[::1]/app"),
        ("*/app", "registry.example.com:2375/app"),
        ("host", "python"),
        ("h*", "host"),
        ("python", "python-evil"),
        ("python", "evil/python"),
        ("python", "evil.com/library/python"),
        ("python:3.*", "python:2.7"),
        ("python:3.12", f"python:3.12@{DIGEST}"),  # the digest decides, and may be any image's
        ("ghcr.io/acme/*", "ghcr.io/acme-evil/app"),
        ("ghcr.io/acme/*", "ghcr.io:443/acme/app"),
        ("ghcr.io/acme/*", "ghcr.io.evil.com/acme/app"),
        ("ghcr.io/acme/*", "evil.com/ghcr.io/acme/app"),
        ("*.example.com/*", "evil.com/x.example.com/app"),
        ("*.example.com/*", "example.com/app"),
        ("acme*/app", "acme.evil.com/app"),
        ("docker.io/acme/*", "acme.io/acme/app"),
        ("dir:/srv/images/*", "dir:/srv/images"),
        ("dir:/srv/images/*", "dir:/srv/images/../../etc"),
        ("dir:/srv/images/*", "dir:/srv/images-evil/x"),
        ("dir:/srv/images/*", "tar:/srv/images/x"),
        ("dir:*", "dir:/etc"),
        ("*:/srv/*", "dir:/srv/x"),
        ("py[t]hon", "python"),
        ("pyth?n", "python"),
    ],
)
def test_an_image_that_no_pattern_matches_is_refused_with_what_is_allowed(pattern: str, image: str) -> None:
    with pytest.raises(Forbidden, match=r"allowed:") as refused:
        checks.check_image(TenantPolicy(images=(pattern,) if pattern else ()), image)
    assert refused.value.details["allowed"] == ([pattern] if pattern else [])


def test_an_image_directory_behind_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/evil").symlink_to("/etc")
    with pytest.raises(Forbidden):
        checks.check_image(TenantPolicy(images=(f"dir:{tmp_path}/images/*",)), f"dir:{tmp_path}/images/evil")
    with pytest.raises(InvalidRequest):
        checks.check_image(TenantPolicy(images=("*",)), "Not An Image")


# -------------------------------------------------------------------------------------------------------------- mounts


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that may be mounted, and one beside it that may not."""
    (tmp_path / "shared/project").mkdir(parents=True)
    (tmp_path / "shared-not/project").mkdir(parents=True)
    (tmp_path / "shared/out").symlink_to("../shared-not")
    (tmp_path / "shared/in").symlink_to("project")
    (tmp_path / "link").symlink_to("shared")
    return tmp_path / "shared"


@pytest.mark.parametrize(
    "source", ["{}", "{}/project", "{}/in", "{}/../shared/project", "{}/../link/in", "{}//project/"]
)
def test_what_is_in_an_allowed_directory_may_be_mounted(shared: Path, source: str) -> None:
    (mount,) = checks.check_mounts(
        TenantPolicy(mounts=(str(shared),)), [Mount(source=source.format(shared), target="/work")]
    )
    assert isinstance(mount, ResolvedMount)
    assert mount.source == str(shared if source == "{}" else shared / "project")
    assert mount.is_read_only


@pytest.mark.parametrize(
    "source",
    [
        "/",
        "/etc",
        "{}/..",
        "{}/out",
        "{}/out/project",
        "{}-not",
        "{}/../shared-not",
        "{}/gone",
        "/gone",
        "shared",
        ".",
        "{}\0",
    ],
)
def test_what_is_elsewhere_or_nowhere_is_refused_alike(shared: Path, source: str) -> None:
    wanted = Mount(source=source.format(shared), target="/work")
    with pytest.raises(Forbidden) as refused:
        checks.check_mounts(TenantPolicy(mounts=(str(shared),)), [wanted])
    assert str(refused.value).replace(repr(wanted.source), "X") == (
        f"the mount X is not allowed for this tenant; allowed: {shared}"
    )


def test_a_directory_is_mounted_for_writing_only_if_the_policy_says_so(shared: Path) -> None:
    wanted = [Mount(source=str(shared), target="/work", read_only=False)]
    with pytest.raises(Forbidden, match="for writing"):
        checks.check_mounts(TenantPolicy(mounts=(str(shared),)), wanted)
    (mount,) = checks.check_mounts(TenantPolicy(mounts=(f"{shared}:rw",)), wanted)
    assert not mount.is_read_only
    (mount,) = checks.check_mounts(TenantPolicy(mounts=(f"{shared}:rw",)), [Mount(source=str(shared), target="/w")])
    assert mount.is_read_only


def test_volumes_are_the_tenants_own() -> None:
    volume = Mount(source="volume:data", target="/data")
    assert checks.check_mounts(TenantPolicy(), [volume]) == (volume,)


# ------------------------------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("*", "*"),
        ("*", "example.com"),
        ("*", "*.example.com:443"),
        ("*", "8.8.8.8"),
        ("*", "0.0.0.0/0"),
        ("*", "64:ff9b::808:808"),
        ("*:443", "example.com:443"),
        ("*:80-443", "example.com:80-443"),
        ("*.example.com", "a.example.com"),
        ("*.example.com", "A.Example.COM."),
        ("*.example.com", "*.a.example.com"),
        ("*.example.com", "*.example.com:80"),
        ("0.0.0.0/0", "8.8.0.0/16"),
        ("10.0.0.0/8", "10.1.0.0/16:22"),
        ("10.0.0.0/8", "::ffff:10.1.2.3"),
        ("169.254.169.254", "169.254.169.254:80"),
        ("fd00::/8", "fd00::1"),
        ("registries", "registries"),
    ],
)
def test_a_rule_that_is_not_wider_is_allowed(wide: str, narrow: str) -> None:
    checks.check_network(TenantPolicy(networks=(wide,)), NetworkPolicy(allow=narrow))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("example.com", "*"),
        ("example.com", "*.example.com"),
        ("*.example.com", "*"),
        ("*.example.com", "example.com"),
        ("*.example.com", "*.com"),
        ("*.example.com", "*.evilexample.com"),
        ("*.example.com", "example.com.evil.com"),
        ("*.a.example.com", "*.example.com"),
        ("*:443", "*"),
        ("*:443", "example.com"),
        ("*:443", "example.com:442-443"),
        ("*", "registries"),
        ("registries", "*"),
        ("registries", "packages.example.com"),
        ("*", "10.0.0.1"),
        ("*", "127.0.0.1"),
        ("*", "169.254.169.254"),
        ("*", "::ffff:127.0.0.1"),
        ("*", "64:ff9b::7f00:1"),  # 127.0.0.1, behind NAT64
        ("*", "fd00::/8"),
        ("*", "::1"),
        ("0.0.0.0/0", "10.0.0.0/8"),
        ("0.0.0.0/0", "127.0.0.1"),
        ("0.0.0.0/0", "::/0"),
        ("::/0", "64:ff9b::a00:1"),
        ("64:ff9b::/96", "64:ff9b::a00:1"),
        ("::/0", "0.0.0.0/0"),
        ("::/0", "::1"),
        ("169.254.0.0/16", "169.254.169.254"),
        ("fd00::/8", "fd00:ec2::254"),
        ("10.0.0.0/16", "10.0.0.0/8"),
        ("10.0.0.0/8", "11.0.0.1"),
        ("10.0.0.0/8:22", "10.0.0.1"),
        ("8.8.8.8", "dns.google"),
        ("example.com", "93.184.216.34"),
    ],
)
def test_a_rule_that_allows_more_is_refused(wide: str, narrow: str) -> None:
    with pytest.raises(Forbidden, match=r"network rule .* is not allowed for this tenant; allowed: "):
        checks.check_network(TenantPolicy(networks=(wide,)), NetworkPolicy(allow=narrow))


def test_what_a_covered_rule_reaches_the_covering_one_reaches() -> None:
    """The two comparisons agree: of rules here, and of connections in `runtime/egress/policy.py`."""
    rules = "* *:443 example.com *.example.com 0.0.0.0/0 10.0.0.0/8 10.0.0.1 127.0.0.1 169.254.0.0/16 169.254.169.254 "
    rules += (
        "::/0 ::1 fd00::/8 fd00:ec2::254 64:ff9b::/96 64:ff9b::a00:1 64:ff9b::808:808 64:ff9b::a9fe:a9fe 2000::/3 ::/3"
    )
    hosts = "example.com a.example.com evil.com 8.8.8.8 10.0.0.1 10.9.9.9 127.0.0.1 169.254.1.1 169.254.169.254 ::1 "
    hosts += "fd00::1 fd00:ec2::254 64:ff9b::a00:1 64:ff9b::808:808 64:ff9b::a9fe:a9fe 2606:4700::1 64:ff9b::7f00:1"
    targets = [(host, port) for host in hosts.split() for port in (80, 443)]
    from atoll.runtime.egress.policy import read_target

    def reached(rule: str) -> set[tuple[str, int]]:
        evaluator = PolicyEvaluator(NetworkPolicy(allow=rule))
        return {(host, port) for host, port in targets if evaluator.check_host(*read_target(host, port)) is None}

    covered = 0
    for wide in rules.split():
        for narrow in rules.split():
            if checks.covers(parse_rule(wide), parse_rule(narrow)):
                covered += 1
                assert reached(narrow) <= reached(wide), (wide, narrow)
    assert covered > len(rules.split())
    assert special(parse_rule("8.8.8.8").network[0]) is None  # type: ignore[index]


def test_each_rule_of_a_policy_is_checked() -> None:
    allowed = TenantPolicy(networks=("example.com", "10.0.0.0/8"))
    wanted = NetworkPolicy(allow=["example.com", "10.1.1.1"])
    assert checks.check_network(allowed, wanted) == wanted
    with pytest.raises(Forbidden, match=r"'evil.com'"):
        checks.check_network(allowed, NetworkPolicy(allow=["example.com", "evil.com"]))
    assert checks.check_network(TenantPolicy(), None) is None
    assert checks.check_network(TenantPolicy(), NetworkPolicy()) == NetworkPolicy()


# ------------------------------------------------------------------------------------------------ limits and lifetimes


def test_limits_are_those_asked_for_or_the_policys_and_never_more() -> None:
    policy = TenantPolicy(default_limits=Limits(cpus=0.5), max_limits=Limits(cpus=2, pids=100))
    assert checks.check_limits(policy, None) == Limits(cpus=0.5, pids=100)
    assert checks.check_limits(policy, Limits(cpus=2, memory_bytes=2**30)) == Limits(
        cpus=2, pids=100, memory_bytes=2**30
    )
    with pytest.raises(Forbidden, match=r"the limit cpus of a sandbox may be at most 2 for this tenant; 2.5 was"):
        checks.check_limits(policy, Limits(cpus=2.5))


def test_lifetimes_and_runtimes_are_those_of_the_policy() -> None:
    policy = TenantPolicy(max_ttl_s=60, runtimes=("runsc", "crun"))
    admitted = checks.check_create(policy, image="host")
    assert (admitted.ttl_s, admitted.runtime) == (60, "runsc")
    assert checks.check_create(policy, image="host", ttl_s=5, runtime="crun").ttl_s == 5
    with pytest.raises(Forbidden, match="at most 60 s; 61 s was asked for"):
        checks.check_create(policy, image="host", ttl_s=61)
    with pytest.raises(Forbidden, match="runtime 'runc' is not allowed"):
        checks.check_create(policy, image="host", runtime="runc")
    assert checks.check_create(TenantPolicy(), image="host").runtime is None
