"""Networks as E2B writes them, as policies of Atoll.

Owns the translation. E2B allows all that is not denied; a policy of Atoll refuses all that is not allowed. What has no
equal is refused with 501, never left out. Not here: what a tenant may allow (`atoll.server.policy`).
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field
from starlette.exceptions import HTTPException

from atoll.contract.errors import InvalidRequest
from atoll.contract.network import ANY, PRESETS, NetworkPolicy
from atoll.server.tenants import TenantPolicy
from atoll.surfaces.e2b.control import E2bBody

_EVERYTHING = frozenset({"0.0.0.0/0", "::/0"})
_ADDRESS = re.compile(r"[0-9a-fA-F:.]+(/[0-9]+)?")


class NetworkBody(E2bBody):
    """The network of a sandbox. What is unset is E2B's default."""

    allow_out: list[str] | None = Field(default=None, max_length=1000)
    deny_out: list[str] | None = Field(default=None, max_length=1000)
    allow_public_traffic: bool | None = None
    allow_internet_access: bool | None = Field(default=None, alias="allow_internet_access")

    def shown(self) -> dict[str, Any]:
        """As it was asked for."""
        fields = {"allow_out", "deny_out", "allow_public_traffic"}
        return self.model_dump(by_alias=True, exclude_none=True, include=fields)

    def policy(self, tenant: TenantPolicy, *, internet: bool | None) -> NetworkPolicy | None:
        """The policy that it means. None: no connection leaves the sandbox.

        Without a word about it, a sandbox reaches what its tenant may reach.

        Raises:
            InvalidRequest: a rule is not one.
            HTTPException: it denies some addresses and not all, which a policy of Atoll cannot say.
        """
        allowed, denied = self.allow_out or [], self.deny_out or []
        wanted = [ANY if rule in _EVERYTHING else rule for rule in allowed]
        if internet is False or _EVERYTHING & {*denied}:
            return NetworkPolicy(allow=tuple(wanted)) if wanted else None
        if denied:
            raise HTTPException(
                501, "denyOut with some addresses is not supported: deny all (0.0.0.0/0), and allow what is needed"
            )
        if names := [rule for rule in allowed if not _ADDRESS.fullmatch(rule)]:
            raise InvalidRequest(
                f"allowOut has the domain {names[0][:253]!r}: when specifying allowed domains, deny all other traffic "
                "with denyOut: ['0.0.0.0/0']"
            )
        everything = [ANY] if ANY in tenant.networks else [rule for rule in tenant.networks if rule not in PRESETS]
        return NetworkPolicy(allow=tuple(everything + wanted)) if everything + wanted else None
