"""The LLM proxy: an OpenAI-compatible server between agents and models, which records every call as a span."""
