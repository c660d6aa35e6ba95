"""Which model the store's latest resources serve: the evidence that one is better, and the history of what was."""
