"""The tables of the server's database.

Owns the columns, the same on SQLite and on PostgreSQL. Not here: how a database gets them (`migrations/`, one revision
for each change; a test compares what they make with what is here), and what the rows mean (`tenants.py`, `keys.py`,
`quotas.py`, `audit.py`, `idempotency.py`, `events.py`, `webhooks.py`, `bundles.py`, `configs.py`, `conversations.py`,
`workspaces.py`). Sandboxes have no table: their manifests are the
truth; `sandbox_states` is only what was last seen of them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """A moment. SQLite keeps no time zone: there it is UTC, as text that sorts."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        moment: datetime = value.replace(tzinfo=UTC) if dialect.name == "sqlite" else value.astimezone(UTC)
        return moment


Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""64 bits on both. SQLite counts a primary key up by itself only if it is called INTEGER."""


def tenant_column(*, primary_key: bool = False, nullable: bool = False) -> sa.Column[Any]:
    """The tenant that a row belongs to, and is removed with."""
    owner = sa.ForeignKey("tenants.name", ondelete="CASCADE")
    return sa.Column("tenant", sa.Text, owner, primary_key=primary_key, nullable=nullable)


tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("policy", sa.JSON, nullable=False),
    sa.Column("quotas", sa.JSON, nullable=False),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    tenant_column(nullable=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("scopes", sa.JSON, nullable=False),
    sa.Column("secret_sha256", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("revoked_at", UtcDateTime),
    sa.Column("last_used_at", UtcDateTime),
    sa.Index("api_keys_of_tenant", "tenant"),
)

model_usage = sa.Table(
    "model_usage",
    metadata,
    tenant_column(primary_key=True),
    sa.Column("month", sa.Text, primary_key=True),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", Number, primary_key=True, autoincrement=True),
    sa.Column("time", UtcDateTime, nullable=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text),  # no foreign key: what a tenant did is kept when it is gone
    sa.Column("key", sa.Text),
    sa.Column("key_name", sa.Text),
    sa.Column("client", sa.Text),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("resource", sa.Text),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Index("audit_of_tenant", "tenant", "id"),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    tenant_column(primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("request_hash", sa.Text, nullable=False),
    sa.Column("resource", sa.Text, nullable=False),
    sa.Column("instance", sa.Text, nullable=False),
    sa.Column("started_at", UtcDateTime, nullable=False),
    sa.Column("status", sa.Integer),
    sa.Column("body", sa.LargeBinary),
    sa.Index("idempotency_by_age", "started_at"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", Number, primary_key=True, autoincrement=True),
    sa.Column("time", UtcDateTime, nullable=False),
    tenant_column(),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("sandbox", sa.Text),
    sa.Column("sandbox_id", sa.Text),
    sa.Column("reason", sa.Text),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Index("events_of_tenant", "tenant", "id"),
    sqlite_autoincrement=True,  # a number is never used again, whatever is removed
)

sandbox_states = sa.Table(
    "sandbox_states",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    tenant_column(),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("expires_at", UtcDateTime),
)

webhooks = sa.Table(
    "webhooks",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    tenant_column(),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("types", sa.JSON, nullable=False),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),  # encrypted
    sa.Index("webhooks_of_tenant", "tenant"),
)

webhook_deliveries = sa.Table(
    "webhook_deliveries",
    metadata,
    sa.Column("id", Number, primary_key=True, autoincrement=True),
    sa.Column("webhook", sa.Text, sa.ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    sa.Column("event", Number),  # no foreign key: a delivery may outlive its event
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("next_attempt_at", UtcDateTime),
    sa.Column("delivered_at", UtcDateTime),
    sa.Column("response_status", sa.Integer),
    sa.Column("error", sa.Text),
    sa.Index("webhook_deliveries_of_webhook", "webhook", "id"),
    sa.Index("webhook_deliveries_due", "status", "next_attempt_at"),
    sqlite_autoincrement=True,
)

previews = sa.Table(
    "previews",
    metadata,
    tenant_column(primary_key=True),
    sa.Column("sandbox_id", sa.Text, primary_key=True),
    sa.Column("port", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sandbox", sa.Text, nullable=False),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

bundles = sa.Table(
    "bundles",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    tenant_column(),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("manifest", sa.JSON, nullable=False),
    sa.Column("tools", sa.JSON, nullable=False),  # what a model is told about them
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("tenant", "sha256", name="bundles_of_tenant"),
)

agent_configs = sa.Table(
    "agent_configs",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    tenant_column(),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("bundle", sa.Text, sa.ForeignKey("bundles.id")),  # of the newest version: it cannot be deleted
    sa.Column("secrets", sa.Text),  # encrypted; of the newest version only
    sa.Column("secrets_version", sa.Integer, nullable=False),  # which changed them last
    sa.Column("tokens", sa.BigInteger, nullable=False),  # spent by all of its turns
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index("agent_configs_of_tenant", "tenant", "created_at"),
)

agent_config_versions = sa.Table(
    "agent_config_versions",
    metadata,
    sa.Column("config", sa.Text, sa.ForeignKey("agent_configs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

workspace_instances = sa.Table(
    "workspace_instances",
    metadata,
    sa.Column("external_id", sa.Text, primary_key=True),
    sa.Column("config", sa.Text, sa.ForeignKey("agent_configs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index("workspace_instances_of_config", "config", "created_at"),
)

conversations = sa.Table(
    "conversations",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    tenant_column(),
    sa.Column("config", sa.Text, sa.ForeignKey("agent_configs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Index("conversations_of_tenant", "tenant", "created_at"),
    sa.Index("conversations_of_config", "config", "created_at"),
)

chat_turns = sa.Table(
    "chat_turns",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("number", Number, nullable=False),  # counts up within its conversation
    sa.Column("conversation", sa.Text, sa.ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),  # of the config
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("instance", sa.Text, nullable=False),
    sa.Column("request", sa.Text, nullable=False),  # the last one that gave it something
    sa.Column("steps", sa.Integer, nullable=False),
    sa.Column("tokens", sa.JSON, nullable=False),
    sa.Column("outcome", sa.JSON),
    sa.Column("started_at", UtcDateTime, nullable=False),
    sa.Column("ended_at", UtcDateTime),
    sa.Index("chat_turns_of_conversation", "conversation", "number", unique=True),
    sa.Index("chat_turns_by_status", "status"),
    sa.Index("chat_turns_by_request", "request"),
)

chat_messages = sa.Table(
    "chat_messages",
    metadata,
    sa.Column("id", Number, primary_key=True, autoincrement=True),
    sa.Column("conversation", sa.Text, sa.ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False),
    sa.Column("turn", sa.Text, sa.ForeignKey("chat_turns.id", ondelete="CASCADE"), nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index("chat_messages_of_conversation", "conversation", "id"),
    sqlite_autoincrement=True,
)
