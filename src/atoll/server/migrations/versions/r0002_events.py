"""Events, what was last seen of sandboxes, webhooks and their deliveries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from atoll.server.tables import Number, UtcDateTime

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("id", Number, primary_key=True, autoincrement=True),
        sa.Column("time", UtcDateTime, nullable=False),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("sandbox", sa.Text),
        sa.Column("sandbox_id", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("details", sa.JSON, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_of_tenant", "events", ["tenant", "id"])
    op.create_table(
        "sandbox_states",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("expires_at", UtcDateTime),
    )
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("types", sa.JSON, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
    )
    op.create_index("webhooks_of_tenant", "webhooks", ["tenant"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", Number, primary_key=True, autoincrement=True),
        sa.Column("webhook", sa.Text, sa.ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
        sa.Column("event", Number),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("next_attempt_at", UtcDateTime),
        sa.Column("delivered_at", UtcDateTime),
        sa.Column("response_status", sa.Integer),
        sa.Column("error", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_index("webhook_deliveries_of_webhook", "webhook_deliveries", ["webhook", "id"])
    op.create_index("webhook_deliveries_due", "webhook_deliveries", ["status", "next_attempt_at"])
