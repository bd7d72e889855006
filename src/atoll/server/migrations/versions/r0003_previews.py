"""Previews of the server."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from atoll.server.tables import UtcDateTime

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "previews",
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("sandbox_id", sa.Text, primary_key=True),
        sa.Column("port", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("sandbox", sa.Text, nullable=False),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
    )
