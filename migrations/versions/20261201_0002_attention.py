"""Attention: jobs for the replay worker, what replays measured, and what a fork inherits of it.

A released migration is frozen: it repeats what it needs and imports nothing of the product.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# Times are UTC. Views that gained a column are made anew, with it at the end of its group.
VIEWS = {
    "v_selections": """
        SELECT s.name AS session, x.turn, x.id AS selection_id, datetime(x.created_at, 'unixepoch') AS decided_utc,
               CASE WHEN x.applied THEN 'applied' ELSE 'only noted' END AS effect, x.reason,
               x.budget, x.cost, x.total_cost, round(100.0 * x.cost / nullif(x.total_cost, 0), 1) AS kept_percent,
               v.ordinal, CASE WHEN v.kept THEN 'kept' ELSE 'left out' END AS verdict, v.rule, v.detail,
               v.rank, round(v.score, 3) AS score, round(v.z_u, 3) AS z_u, round(v.z_past, 3) AS z_past,
               round(v.z_lex, 3) AS z_lex, round(v.exploration, 3) AS exploration, b.kind, b.cost AS block_cost,
               b.label, s.id AS session_id
        FROM selections x
        JOIN sessions s ON s.id = x.session_id
        JOIN selection_blocks v ON v.selection_id = x.id
        LEFT JOIN blocks b ON b.session_id = x.session_id AND b.ordinal = v.ordinal
    """,
    "v_observations": """
        SELECT s.name AS session, o.turn, o.since_turn, datetime(o.created_at, 'unixepoch') AS replayed_utc, o.model,
               round(o.seconds, 1) AS seconds, o.tokens, o.rows, b.ordinal, b.tokens AS block_tokens,
               round(b.mass, 5) AS mass, b.density, round(b.mass_assistant, 5) AS mass_assistant, b.density_assistant,
               b.replaced, k.kind, k.label, s.id AS session_id
        FROM observations o
        JOIN sessions s ON s.id = o.session_id
        JOIN observation_blocks b ON b.observation_id = o.id
        LEFT JOIN blocks k ON k.session_id = o.session_id AND k.ordinal = b.ordinal
    """,
}


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    op.add_column("sessions", sa.Column("evidence", sa.Text(), server_default=sa.text("''"), nullable=False))
    op.add_column("selection_blocks", sa.Column("z_past", sa.Double(), nullable=True))
    op.create_table(
        "replay_jobs",
        sa.Column("id", ID, nullable=False),
        sa.Column("session_id", ID, nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("exchange_id", ID, nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["exchange_id"], ["exchanges.id"], name=op.f("fk_replay_jobs_exchange_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_replay_jobs_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replay_jobs")),
        sa.UniqueConstraint("session_id", "turn", name=op.f("uq_replay_jobs_session_id_turn")),
    )
    op.create_index(op.f("ix_replay_jobs_state_queued_at"), "replay_jobs", ["state", "queued_at"], unique=False)
    op.create_table(
        "observations",
        sa.Column("id", ID, nullable=False),
        sa.Column("session_id", ID, nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("since_turn", sa.Integer(), nullable=False),
        sa.Column("exchange_id", ID, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("layers", sa.Text(), nullable=False),
        sa.Column("dependency_layer", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("tokens_computed", sa.Integer(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("rows_assistant", sa.Integer(), nullable=False),
        sa.Column("unobserved", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["exchange_id"], ["exchanges.id"], name=op.f("fk_observations_exchange_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_observations_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_observations")),
        sa.UniqueConstraint("session_id", "turn", name=op.f("uq_observations_session_id_turn")),
    )
    op.create_table(
        "observation_blocks",
        sa.Column("observation_id", ID, autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("mass", sa.Double(), nullable=False),
        sa.Column("density", sa.Double(), nullable=False),
        sa.Column("mass_assistant", sa.Double(), nullable=False),
        sa.Column("density_assistant", sa.Double(), nullable=False),
        sa.Column("by_layer", sa.LargeBinary(), nullable=False),
        sa.Column("replaced", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["observation_id"], ["observations.id"], name=op.f("fk_observation_blocks_observation_id")
        ),
        sa.PrimaryKeyConstraint("observation_id", "ordinal", name=op.f("pk_observation_blocks")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "observation_edges",
        sa.Column("observation_id", ID, autoincrement=False, nullable=False),
        sa.Column("support", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("dependent", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mass", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["observation_id"], ["observations.id"], name=op.f("fk_observation_edges_observation_id")
        ),
        sa.PrimaryKeyConstraint("observation_id", "support", "dependent", name=op.f("pk_observation_edges")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "inheritances",
        sa.Column("session_id", ID, autoincrement=False, nullable=False),
        sa.Column("parent_id", ID, nullable=False),
        sa.Column("ordinals", sa.Text(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["parent_id"], ["sessions.id"], name=op.f("fk_inheritances_parent_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_inheritances_session_id")),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_inheritances")),
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_workers")),
    )
    if sqlite:
        for name, query in VIEWS.items():
            op.execute(f"DROP VIEW IF EXISTS {name}")
            op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    raise NotImplementedError("the archive was copied to <path>.backup-0001 before the upgrade: use that file")
