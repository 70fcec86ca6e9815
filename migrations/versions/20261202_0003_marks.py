"""Marks: what a person says of a block, pin or mute.

A released migration is frozen: it repeats what it needs and imports nothing of the product.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "marks",
        sa.Column("session_id", ID, autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mark", sa.Text(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_marks_session_id")),
        sa.PrimaryKeyConstraint("session_id", "ordinal", name=op.f("pk_marks")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    raise NotImplementedError("the archive was copied to <path>.backup-0002 before the upgrade: use that file")
