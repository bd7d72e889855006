"""What a tenant may ask for: requests are checked against its policy before the engine sees them.

Owns the comparison: whether an image, a mount, a network rule, a runtime, a limit or a lifetime is within what the
operator allows. Not here: the policy (`tenants.py`), sums over sandboxes (`quotas.py`), and what all of these mean,
which the engine checks again. Used by the routes that create, fork, import, and change networks, limits and lifetimes.

What is refused is `Forbidden`, with what is allowed. The result of a check is what the engine is to be given: with the
policy's defaults, and mounts whose symlinks were followed here and must not lead elsewhere later (`ResolvedMount`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network

from atoll.contract.errors import Forbidden
from atoll.contract.frozen import Frozen
from atoll.contract.model import Limits, Mount, ResolvedMount, RuntimeName, SandboxSpec
from atoll.contract.network import ANY, Network, NetworkPolicy, Rule, parse_rule
from atoll.runtime.egress.policy import NAT64, SPECIAL
from atoll.runtime.images.reference import HOST, ImageReference
from atoll.server.tenants import WRITABLE, TenantPolicy


class AdmittedSandbox(Frozen):
    """The options of a sandbox that a tenant may have: what it asked for, and what the policy adds."""

    image: str
    mounts: tuple[Mount, ...] = ()
    network: NetworkPolicy | None = None
    runtime: RuntimeName | None = None
    limits: Limits = Limits()
    ttl_s: float | None = None


def check_create(
    policy: TenantPolicy,
    *,
    image: str,
    mounts: Sequence[Mount] = (),
    network: NetworkPolicy | None = None,
    runtime: RuntimeName | None = None,
    limits: Limits | None = None,
    ttl_s: float | None = None,
) -> AdmittedSandbox:
    """For a sandbox that is created, forked, imported or begun from a checkpoint. `image` is that of the request, else
    the engine's default, else that of the checkpoint.

    Raises:
        Forbidden: the policy does not allow it; the message says what it allows.
        InvalidRequest: the image is not an image reference.
    """
    check_image(policy, image)
    return AdmittedSandbox(
        image=image,
        mounts=check_mounts(policy, mounts),
        network=check_network(policy, network),
        runtime=check_runtime(policy, runtime),
        limits=check_limits(policy, limits),
        ttl_s=check_ttl(policy, ttl_s),
    )


def check_inherited(
    policy: TenantPolicy,
    inherited: SandboxSpec,
    *,
    mounts: Sequence[Mount] = (),
    network: NetworkPolicy | None = None,
    limits: Limits | None = None,
    ttl_s: float | None = None,
) -> AdmittedSandbox:
    """For a sandbox from a checkpoint: what it inherits, with what is given in its place. An inherited lifetime that is
    too long is the policy's longest. The mounts of the result are those that are given; inherited ones are checked.

    Raises:
        what `check_create` raises.
    """
    given = limits.model_dump(exclude_none=True) if limits is not None else {}
    if ttl_s is None and inherited.ttl_s is not None:
        ttl_s = min(inherited.ttl_s, policy.max_ttl_s or inherited.ttl_s)
    check_mounts(policy, inherited.mounts)
    return check_create(
        policy,
        image=inherited.image,
        mounts=mounts,
        network=network or inherited.network,
        runtime=inherited.runtime,
        limits=inherited.limits.model_copy(update=given),
        ttl_s=ttl_s,
    )


def check_runtime(policy: TenantPolicy, runtime: RuntimeName | None) -> RuntimeName | None:
    """The runtime to use: the one asked for, else the policy's first, else the engine's choice (None).

    Raises:
        Forbidden: the policy does not allow it.
    """
    if policy.runtimes is None or runtime in policy.runtimes:
        return runtime
    if runtime is None:
        return policy.runtimes[0]
    raise _forbidden("runtime", runtime, policy.runtimes)


def check_limits(policy: TenantPolicy, limits: Limits | None) -> Limits:
    """The limits to ask the engine for: those given, else the policy's defaults, else its most.

    Raises:
        Forbidden: a limit is higher than the policy allows.
    """
    chosen: dict[str, float | None] = {}
    for name in Limits.field_names():
        sources = (limits or Limits(), policy.default_limits, policy.max_limits)
        value = next((set_to for each in sources if (set_to := getattr(each, name)) is not None), None)
        most = getattr(policy.max_limits, name)
        if most is not None and value is not None and value > most:
            raise Forbidden(
                f"the limit {name} of a sandbox may be at most {most:g} for this tenant; {value:g} was asked for",
                limit=name,
                asked=value,
                allowed=most,
            )
        chosen[name] = value
    return Limits.model_validate(chosen)


def check_ttl(policy: TenantPolicy, ttl_s: float | None) -> float | None:
    """The lifetime of a sandbox: the one asked for, else the policy's longest.

    Raises:
        Forbidden: it is longer than the policy allows.
    """
    most = policy.max_ttl_s
    if most is None or ttl_s is None:
        return most if ttl_s is None else ttl_s
    if ttl_s > most:
        raise Forbidden(
            f"a sandbox of this tenant may live for at most {most:g} s; {ttl_s:g} s was asked for",
            asked=ttl_s,
            allowed=most,
        )
    return ttl_s


def _forbidden(what: str, asked: str, allowed: Sequence[str]) -> Forbidden:
    shown = ", ".join(allowed) or "none"
    return Forbidden(
        f"the {what} {asked!r} is not allowed for this tenant; allowed: {shown}",
        hint="an operator changes what a tenant may use with atoll tenants update",
        **{what: asked, "allowed": list(allowed)},
    )


# -------------------------------------------------------------------------------------------------------------- images


def check_image(policy: TenantPolicy, image: str) -> None:
    """
    Raises:
        Forbidden: the policy does not allow it.
        InvalidRequest: it is not an image reference.
    """
    reference = ImageReference.parse(image)
    if reference.kind == "template":
        return  # the tenant's own: its image was checked when it was built
    if not any(_matches(pattern, reference) for pattern in policy.images):
        raise _forbidden("image", image, policy.images)


def _matches(pattern: str, reference: ImageReference) -> bool:
    if HOST in (reference.kind, pattern):
        return pattern == reference.kind == HOST
    if reference.path is not None:
        # Only by a pattern of its kind. Of a symlink, both the path and what it leads to are to be allowed.
        kind, colon, place = pattern.partition(":")
        if not colon or kind != reference.kind or not place.startswith("/"):
            return False
        selector = reference.selector
        paths = {str(reference.path) + selector, os.path.realpath(reference.path) + selector}
        return all(_glob(place).fullmatch(path) for path in paths)
    registry, rest = _registry_globs(pattern)
    domain, _, path = reference.name.partition("/")
    return bool(registry.fullmatch(domain.lower()) and rest.fullmatch(path))


# No address, port or name of this machine: the server itself connects to the registry, and is not to be sent to others
# in its network. A name that leads there is the operator's to keep out, in its DNS or by naming registries.
_ANY_REGISTRY = re.compile(r"(?:[a-z0-9-]+\.)+[a-z][a-z0-9-]*")


@lru_cache(maxsize=4096)
def _registry_globs(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """For the registry's name, and for the rest. They are apart, so that `*.example.com/*` matches no path of another
    registry. Short names are filled up as those of images are; without a tag, any tag and digest matches."""
    head, slash, rest = pattern.partition("/")
    if pattern == "*":
        rest = "*"
    elif not slash or not (re.search(r"[.:]", head) or head in ("*", "localhost")):
        head, rest = "docker.io", pattern if slash else f"library/{pattern}"
    elif head.lower() in ("docker.io", "index.docker.io"):
        head, rest = "docker.io", rest if "/" in rest or rest.startswith("*") else f"library/{rest}"
    has_end = rest.endswith("*") or re.search(r"[:@]", rest)
    return _ANY_REGISTRY if head == "*" else _glob(head.lower()), _glob(rest, "" if has_end else "[:@].*")


@lru_cache(maxsize=4096)
def _glob(pattern: str, end: str = "") -> re.Pattern[str]:
    """`*` is any characters; nothing else is special. `end` is a regular expression."""
    return re.compile(".*".join(map(re.escape, pattern.split("*"))) + end, re.DOTALL)


# -------------------------------------------------------------------------------------------------------------- mounts


def check_mounts(policy: TenantPolicy, mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """The mounts with symlinks followed. What the tenant cannot mount is refused alike, whether it exists or not.

    Raises:
        Forbidden: the policy does not allow one.
    """
    return tuple(mount if mount.volume is not None else _resolve(policy, mount) for mount in mounts)


def _resolve(policy: TenantPolicy, mount: Mount) -> ResolvedMount:
    try:
        path = os.path.realpath(mount.source, strict=True) if mount.source.startswith("/") else ""
    except (OSError, ValueError):
        path = ""
    for allowed in policy.mounts:
        root = os.path.realpath(allowed.removesuffix(WRITABLE))
        if (path == root or path.startswith(root + "/")) and (mount.is_read_only or allowed.endswith(WRITABLE)):
            return ResolvedMount(source=path, target=mount.target, read_only=mount.is_read_only)
    writes = "" if mount.is_read_only else " for writing"
    raise _forbidden("mount", f"{mount.source}{writes}", policy.mounts)


# ------------------------------------------------------------------------------------------------------------ networks


def check_network(policy: TenantPolicy, network: NetworkPolicy | None) -> NetworkPolicy | None:
    """The network policy that was asked for.

    Raises:
        Forbidden: one of its rules allows more than any rule of the tenant's policy.
    """
    allowed = [parse_rule(rule) for rule in policy.networks]
    for rule in network.rules if network is not None else ():
        if not any(covers(each, rule) for each in allowed):
            raise _forbidden("network rule", str(rule), policy.networks)
    return network


def covers(wide: Rule, narrow: Rule) -> bool:
    """Whether all that the rule `narrow` allows, `wide` allows as well."""
    if not (wide.ports[0] <= narrow.ports[0] and narrow.ports[1] <= wide.ports[1]):
        return False
    if wide.preset is not None or narrow.preset is not None:
        return wide.preset == narrow.preset
    if narrow.network is not None:
        return _covers_network(wide, narrow.network)
    name = narrow.name or ""
    if name.startswith("*."):
        return wide.covers_name(name[1:]) if wide.name != name else True
    return wide.name == ANY if name == ANY else wide.covers_name(name)


def _covers_network(wide: Rule, narrow: Network) -> bool:
    """A rule for addresses reaches the special ones among them only if it is inside their block: a narrow rule may so
    allow what a wide one does not. `*` is all public addresses."""
    if wide.network is None:
        return wide.name == ANY and not _special_blocks(narrow)
    if not _is_subnet(narrow, wide.network):
        return False
    return _special_blocks(narrow) <= _special_blocks(wide.network)


def _special_blocks(network: Network) -> frozenset[Network]:
    """The special blocks that a network is inside of, of IPv4 for addresses that NAT64 translates."""
    if isinstance(network, IPv6Network) and network.subnet_of(NAT64):
        network = IPv4Network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return frozenset(block for block, _ in SPECIAL if _is_subnet(network, block))


def _is_subnet(network: Network, of: Network) -> bool:
    if isinstance(network, IPv4Network):
        return isinstance(of, IPv4Network) and network.subnet_of(of)
    return isinstance(of, IPv6Network) and network.subnet_of(of)
