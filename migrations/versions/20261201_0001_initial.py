"""The archive's first schema: what `graphstore.records` describes, and four views for people.

A released migration is frozen: it repeats what it needs and imports nothing of the product.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

# Times are UTC. `tokens` counts each message of a block once, earlier versions that the client replaced included.
VIEWS = {
    "v_sessions": """
        SELECT s.name, s.client, s.model, s.kind, s.state, s.turns,
               (SELECT count(*) FROM exchanges e WHERE e.session_id = s.id) AS exchanges,
               (SELECT count(*) FROM blocks b WHERE b.session_id = s.id) AS blocks,
               (SELECT sum(m.tokens) FROM messages m WHERE m.id IN
                   (SELECT n.message_id FROM block_nodes bn JOIN nodes n ON n.id = bn.node_id
                    WHERE bn.session_id = s.id)) AS tokens,
               (SELECT sum(e.input_tokens) FROM exchanges e WHERE e.session_id = s.id) AS input_tokens,
               (SELECT sum(e.cached_tokens) FROM exchanges e WHERE e.session_id = s.id) AS cached_tokens,
               (SELECT sum(e.output_tokens) FROM exchanges e WHERE e.session_id = s.id) AS output_tokens,
               (SELECT count(*) FROM selections x WHERE x.session_id = s.id AND x.applied) AS compactions,
               p.name AS forked_from,
               datetime(s.created_at, 'unixepoch') AS started_utc,
               datetime(s.last_active_at, 'unixepoch') AS last_active_utc,
               s.title, s.state_reason, s.id AS session_id
        FROM sessions s LEFT JOIN sessions p ON p.id = s.parent_id
    """,
    "v_turns": """
        SELECT s.name AS session, e.turn, datetime(min(e.started_at), 'unixepoch') AS started_utc,
               round(max(coalesce(e.ended_at, e.started_at)) - min(e.started_at), 1) AS seconds,
               count(*) AS exchanges, f.outcome, f.boundary, f.reason, round(f.idle_s) AS idle_s,
               f.blocks_total, f.blocks_left_out, f.messages_total, f.messages_sent,
               round(100.0 * f.chars_sent / nullif(f.chars_total, 0), 1) AS sent_percent,
               sum(e.input_tokens) AS input_tokens, sum(e.cached_tokens) AS cached_tokens,
               round(100.0 * sum(e.cached_tokens) / nullif(sum(e.input_tokens), 0), 1) AS cached_percent,
               sum(e.output_tokens) AS output_tokens, sum(e.fell_back) AS fell_back,
               sum(e.ending NOT IN ('complete', 'running')) AS broken, f.selection_id, s.id AS session_id
        FROM exchanges e
        JOIN sessions s ON s.id = e.session_id
        JOIN exchanges f ON f.id = (SELECT min(x.id) FROM exchanges x
                                    WHERE x.session_id = e.session_id AND x.turn = e.turn)
        GROUP BY e.session_id, e.turn
    """,
    "v_blocks": """
        SELECT s.name AS session, b.ordinal, b.kind, b.label, b.cost,
               (SELECT sum(m.tokens) FROM messages m WHERE m.id IN
                   (SELECT n.message_id FROM block_nodes bn JOIN nodes n ON n.id = bn.node_id
                    WHERE bn.session_id = b.session_id AND bn.ordinal = b.ordinal)) AS tokens,
               CASE WHEN v.kept = 0 THEN 'left out' ELSE 'sent' END AS now, v.rule, v.detail,
               round(b.u, 4) AS u, b.observed, b.stale, b.edits, s.id AS session_id
        FROM blocks b
        JOIN sessions s ON s.id = b.session_id
        LEFT JOIN selection_blocks v ON v.selection_id = s.selection_id AND v.ordinal = b.ordinal
    """,
    "v_selections": """
        SELECT s.name AS session, x.turn, x.id AS selection_id, datetime(x.created_at, 'unixepoch') AS decided_utc,
               CASE WHEN x.applied THEN 'applied' ELSE 'only noted' END AS effect, x.reason,
               x.budget, x.cost, x.total_cost, round(100.0 * x.cost / nullif(x.total_cost, 0), 1) AS kept_percent,
               v.ordinal, CASE WHEN v.kept THEN 'kept' ELSE 'left out' END AS verdict, v.rule, v.detail,
               v.rank, round(v.score, 3) AS score, round(v.z_u, 3) AS z_u, round(v.z_lex, 3) AS z_lex,
               round(v.exploration, 3) AS exploration, b.kind, b.cost AS block_cost, b.label, s.id AS session_id
        FROM selections x
        JOIN sessions s ON s.id = x.session_id
        JOIN selection_blocks v ON v.selection_id = x.id
        LEFT JOIN blocks b ON b.session_id = x.session_id AND b.ordinal = v.ordinal
    """,
}


def upgrade() -> None:
    op.create_table(
        "messages",
        sa.Column("id", ID, autoincrement=False, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("codec", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_messages")),
        sa.UniqueConstraint("digest", name=op.f("uq_messages_digest")),
    )
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_meta")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", ID, autoincrement=False, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("parent_id", ID, nullable=True),
        sa.Column("message_id", ID, nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["message_id"], ["messages.id"], name=op.f("fk_nodes_message_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["nodes.id"], name=op.f("fk_nodes_parent_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("digest", name=op.f("uq_nodes_digest")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("scope", sa.LargeBinary(), nullable=False),
        sa.Column("upstream", sa.Text(), nullable=False),
        sa.Column("dialect", sa.Text(), nullable=False),
        sa.Column("client", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("instructions_id", ID, nullable=True),
        sa.Column("tools_id", ID, nullable=True),
        sa.Column("parent_id", ID, nullable=True),
        sa.Column("fork_depth", sa.Integer(), nullable=True),
        sa.Column("head_node_id", ID, nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("state_reason", sa.Text(), nullable=True),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("selection_id", ID, nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_active_at", sa.Double(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["head_node_id"], ["nodes.id"], name=op.f("fk_sessions_head_node_id")),
        sa.ForeignKeyConstraint(["instructions_id"], ["messages.id"], name=op.f("fk_sessions_instructions_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["sessions.id"], name=op.f("fk_sessions_parent_id")),
        sa.ForeignKeyConstraint(["tools_id"], ["messages.id"], name=op.f("fk_sessions_tools_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("name", name=op.f("uq_sessions_name")),
    )
    op.create_index(op.f("ix_sessions_head_node_id"), "sessions", ["head_node_id"], unique=False)
    op.create_index(op.f("ix_sessions_scope_client_id"), "sessions", ["scope", "client_id"], unique=False)
    op.create_index(op.f("ix_sessions_scope_last_active_at"), "sessions", ["scope", "last_active_at"], unique=False)
    op.create_table(
        "blocks",
        sa.Column("session_id", ID, autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("cost", sa.Integer(), nullable=False),
        sa.Column("edits", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("u", sa.Double(), server_default=sa.text("0"), nullable=False),
        sa.Column("observed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("stale", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_blocks_session_id")),
        sa.PrimaryKeyConstraint("session_id", "ordinal", name=op.f("pk_blocks")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "edges",
        sa.Column("session_id", ID, autoincrement=False, nullable=False),
        sa.Column("support", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("dependent", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_edges_session_id")),
        sa.PrimaryKeyConstraint("session_id", "support", "dependent", name=op.f("pk_edges")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "exchanges",
        sa.Column("id", ID, autoincrement=False, nullable=False),
        sa.Column("session_id", ID, nullable=True),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("dialect", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("boundary", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("idle_s", sa.Double(), nullable=True),
        sa.Column("selection_id", ID, nullable=True),
        sa.Column("head_node_id", ID, nullable=True),
        sa.Column("instructions_id", ID, nullable=True),
        sa.Column("tools_id", ID, nullable=True),
        sa.Column("blocks_total", sa.Integer(), nullable=False),
        sa.Column("blocks_left_out", sa.Integer(), nullable=False),
        sa.Column("messages_total", sa.Integer(), nullable=False),
        sa.Column("messages_sent", sa.Integer(), nullable=False),
        sa.Column("chars_total", sa.Integer(), nullable=False),
        sa.Column("chars_sent", sa.Integer(), nullable=False),
        sa.Column("bytes_total", sa.Integer(), nullable=False),
        sa.Column("bytes_sent", sa.Integer(), nullable=False),
        sa.Column("prefix_messages", sa.Integer(), nullable=False),
        sa.Column("prefix_bytes", sa.Integer(), nullable=False),
        sa.Column("first_byte_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("ending", sa.Text(), nullable=False),
        sa.Column("fell_back", sa.Boolean(), nullable=False),
        sa.Column("usage", sa.Text(), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cache_write_tokens", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("reasoning_tokens", sa.BigInteger(), nullable=True),
        sa.Column("response_id", sa.Text(), nullable=True),
        sa.Column("transformations", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["head_node_id"], ["nodes.id"], name=op.f("fk_exchanges_head_node_id")),
        sa.ForeignKeyConstraint(["instructions_id"], ["messages.id"], name=op.f("fk_exchanges_instructions_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_exchanges_session_id")),
        sa.ForeignKeyConstraint(["tools_id"], ["messages.id"], name=op.f("fk_exchanges_tools_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_exchanges")),
    )
    op.create_index(op.f("ix_exchanges_session_id"), "exchanges", ["session_id"], unique=False)
    op.create_table(
        "answers",
        sa.Column("exchange_id", ID, autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("message_id", ID, nullable=False),
        sa.ForeignKeyConstraint(["exchange_id"], ["exchanges.id"], name=op.f("fk_answers_exchange_id")),
        sa.ForeignKeyConstraint(["message_id"], ["messages.id"], name=op.f("fk_answers_message_id")),
        sa.PrimaryKeyConstraint("exchange_id", "position", name=op.f("pk_answers")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "block_nodes",
        sa.Column("session_id", ID, autoincrement=False, nullable=False),
        sa.Column("node_id", ID, autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_block_nodes_node_id")),
        sa.ForeignKeyConstraint(
            ["session_id", "ordinal"],
            ["blocks.session_id", "blocks.ordinal"],
            name=op.f("fk_block_nodes_session_id_ordinal"),
        ),
        sa.PrimaryKeyConstraint("session_id", "node_id", name=op.f("pk_block_nodes")),
        sqlite_with_rowid=False,
    )
    op.create_index(op.f("ix_block_nodes_node_id"), "block_nodes", ["node_id"], unique=False)
    op.create_table(
        "selections",
        sa.Column("id", ID, autoincrement=False, nullable=False),
        sa.Column("session_id", ID, nullable=False),
        sa.Column("exchange_id", ID, nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("applied", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.Column("budget", sa.Integer(), nullable=False),
        sa.Column("cost", sa.Integer(), nullable=False),
        sa.Column("protected_cost", sa.Integer(), nullable=False),
        sa.Column("total_cost", sa.Integer(), nullable=False),
        sa.Column("notice", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["exchange_id"], ["exchanges.id"], name=op.f("fk_selections_exchange_id")),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_selections_session_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_selections")),
    )
    op.create_index(op.f("ix_selections_session_id"), "selections", ["session_id"], unique=False)
    op.create_table(
        "selection_blocks",
        sa.Column("selection_id", ID, autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kept", sa.Boolean(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("z_u", sa.Double(), nullable=True),
        sa.Column("z_lex", sa.Double(), nullable=True),
        sa.Column("exploration", sa.Double(), nullable=True),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["selection_id"], ["selections.id"], name=op.f("fk_selection_blocks_selection_id")),
        sa.PrimaryKeyConstraint("selection_id", "ordinal", name=op.f("pk_selection_blocks")),
        sqlite_with_rowid=False,
    )
    if op.get_bind().dialect.name == "sqlite":
        for name, query in VIEWS.items():
            op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    raise NotImplementedError("delete the file instead")
