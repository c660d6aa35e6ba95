"""Models online: an OpenAI-compatible server in front of an engine that is a process of its own."""
