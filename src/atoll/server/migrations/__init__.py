"""Migrations of the server's database, one module in `versions/` for each revision; alembic runs them.

To change a table: change `server/tables.py`, write the next revision in `versions/` (its number, and in `down_revision`
the one before), and set `HEAD`. There is no way back: an older Atoll refuses a newer database. Called by
`server/database.py`, under a lock; alembic is imported only when there is something to do.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from atoll.contract.errors import InvalidRequest

HEAD = "0005"
"""The revision of this version. A test compares it with the modules."""


def upgrade(connection: sa.Connection, revision: str = "head") -> None:
    """Bring the tables to `revision`, in the connection's transaction.

    Raises:
        InvalidRequest: the database has a revision that this version does not know.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise InvalidRequest(
            "the server's database was made by a newer version of Atoll; use that version, or restore the copy of the "
            "database from before the upgrade",
            hint=str(error),
        ) from error
