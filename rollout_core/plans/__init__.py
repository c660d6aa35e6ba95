"""What is checked and estimated before a run starts (the dry run)."""
