"""Run by Alembic for each upgrade, on the connection that ``rollout_core.store.sql.database`` hands over."""

from alembic import context

from rollout_core.store.sql.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
