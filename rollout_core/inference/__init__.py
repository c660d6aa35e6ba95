"""Generation: the backend protocol, its implementations, and the per-sample ledger that cannot lose a completion."""
