"""What an object store keeps, and what it gives up: leases of runs, garbage collection, pruning, housekeeping, and what
uses how much."""
