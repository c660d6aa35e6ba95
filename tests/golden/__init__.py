"""The fence: what is stored or typed, written down in ``*.json``, so that code can move without changing any of it."""
