"""Tool bundles of tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from atoll.server.tables import UtcDateTime

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "bundles",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("manifest", sa.JSON, nullable=False),
        sa.Column("tools", sa.JSON, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.UniqueConstraint("tenant", "sha256", name="bundles_of_tenant"),
    )
