"""Runs migrations over the connection that the caller opened; there is no ini file and no URL.

`graphstore.store.archive` calls this at start, inside one transaction. It sets up no logging and reads no environment.
"""

from alembic import context

from graphstore.store.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
