"""Agent configs, their workspaces, conversations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from atoll.server.tables import Number, UtcDateTime

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "agent_configs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("bundle", sa.Text, sa.ForeignKey("bundles.id")),
        sa.Column("secrets", sa.Text),
        sa.Column("secrets_version", sa.Integer, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
    )
    op.create_index("agent_configs_of_tenant", "agent_configs", ["tenant", "created_at"])
    op.create_table(
        "agent_config_versions",
        sa.Column("config", sa.Text, sa.ForeignKey("agent_configs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
    )
    op.create_table(
        "workspace_instances",
        sa.Column("external_id", sa.Text, primary_key=True),
        sa.Column("config", sa.Text, sa.ForeignKey("agent_configs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
    )
    op.create_index("workspace_instances_of_config", "workspace_instances", ["config", "created_at"])
    op.create_table(
        "conversations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
        sa.Column("config", sa.Text, sa.ForeignKey("agent_configs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("updated_at", UtcDateTime, nullable=False),
    )
    op.create_index("conversations_of_tenant", "conversations", ["tenant", "created_at"])
    op.create_index("conversations_of_config", "conversations", ["config", "created_at"])
    op.create_table(
        "chat_turns",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("number", Number, nullable=False),
        sa.Column("conversation", sa.Text, sa.ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("steps", sa.Integer, nullable=False),
        sa.Column("tokens", sa.JSON, nullable=False),
        sa.Column("outcome", sa.JSON),
        sa.Column("started_at", UtcDateTime, nullable=False),
        sa.Column("ended_at", UtcDateTime),
    )
    op.create_index("chat_turns_of_conversation", "chat_turns", ["conversation", "number"], unique=True)
    op.create_index("chat_turns_by_status", "chat_turns", ["status"])
    op.create_index("chat_turns_by_request", "chat_turns", ["request"])
    op.create_table(
        "chat_messages",
        sa.Column("id", Number, primary_key=True, autoincrement=True),
        sa.Column("conversation", sa.Text, sa.ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
        sa.Column("turn", sa.Text, sa.ForeignKey("chat_turns.id", ondelete="CASCADE"), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("chat_messages_of_conversation", "chat_messages", ["conversation", "id"])
