"""Tenants, API keys, quotas, the audit log and idempotency keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from atoll.server.tables import Number, UtcDateTime

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("policy", sa.JSON, nullable=False),
        sa.Column("quotas", sa.JSON, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE")),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("secret_sha256", sa.Text, nullable=False),
        sa.Column("created_at", UtcDateTime, nullable=False),
        sa.Column("expires_at", UtcDateTime),
        sa.Column("revoked_at", UtcDateTime),
        sa.Column("last_used_at", UtcDateTime),
    )
    op.create_index("api_keys_of_tenant", "api_keys", ["tenant"])
    op.create_table(
        "model_usage",
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("month", sa.Text, primary_key=True),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", Number, primary_key=True, autoincrement=True),
        sa.Column("time", UtcDateTime, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("key", sa.Text),
        sa.Column("key_name", sa.Text),
        sa.Column("client", sa.Text),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("resource", sa.Text),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("audit_of_tenant", "audit", ["tenant", "id"])
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("request_hash", sa.Text, nullable=False),
        sa.Column("resource", sa.Text, nullable=False),
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("started_at", UtcDateTime, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("body", sa.LargeBinary),
    )
    op.create_index("idempotency_by_age", "idempotency", ["started_at"])
    for statement in _APPEND_ONLY[op.get_bind().dialect.name]:
        op.execute(statement)


_REASON = "the audit log is append-only"
_APPEND_ONLY = {
    "sqlite": [
        f"CREATE TRIGGER audit_{verb.lower()} BEFORE {verb} ON audit BEGIN SELECT RAISE(ABORT, '{_REASON}'); END"
        for verb in ("UPDATE", "DELETE")
    ],
    "postgresql": [
        f"""CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN RAISE EXCEPTION '{_REASON}'; END $$""",
        """CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
            FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()""",
    ],
}
