"""Suites of questions: how they are put, what the answers come to, and how sure that is."""
