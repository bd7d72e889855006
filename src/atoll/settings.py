"""What the operator decides. The one module that reads the environment.

Every setting can be given in code as `atoll.open(settings=Settings(…))` or as a variable with the prefix `ATOLL_`,
`ATOLL_STATE_DIR` for `state_dir`.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from atoll.contract.errors import InvalidRequest
from atoll.contract.model import Frozen, RuntimeName

_PREFIX = "ATOLL_"


class Settings(Frozen):
    state_dir: Path | None = None
    """Where sandboxes and images are kept. Unset: /var/lib/atoll for root, else atoll below $XDG_DATA_HOME or
    ~/.local/share."""
    image: str = "host"
    """The image of sandboxes that do not name one."""
    runtime: RuntimeName | None = None
    """The runtime of sandboxes that do not name one. Unset: the fastest that works on this machine."""

    @classmethod
    def from_environment(cls) -> Settings:
        """The settings that the environment holds.

        Raises:
            InvalidRequest: a variable's value is not one that the setting can have.
        """
        variables = {name: _PREFIX + name.upper() for name in cls.model_fields}
        given = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            variable = _PREFIX + str(first["loc"][0]).upper()
            raise InvalidRequest(f"{variable}={first['input']!r}: {first['msg']}") from error

    def resolve_state_dir(self) -> Path:
        if self.state_dir is not None:
            return self.state_dir.expanduser().absolute()
        if os.geteuid() == 0:
            return Path("/var/lib/atoll")
        data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
        return Path(data).expanduser() / "atoll"
