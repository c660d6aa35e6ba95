"""Rewards that models give at endpoints: questions, what answers mean, what they cost, the ledger that keeps them."""
