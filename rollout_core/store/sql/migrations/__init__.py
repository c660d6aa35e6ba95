"""Versions of the store's schema, see ``rollout_core.store.sql.database``."""
