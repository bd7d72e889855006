"""What alembic runs for an upgrade, by this name: the revisions, on the caller's connection and in its transaction.

Nothing imports it.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
