"""The hold-out: in which arm of the comparison a session is, from its beginning on. Sessions from before are in none.

A released migration is frozen: it repeats what it needs and imports nothing of the product.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("arm", sa.Text(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("the archive was copied to <path>.backup-0003 before the upgrade: use that file")
