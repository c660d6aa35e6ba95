"""Models taken out: as a Hugging Face folder, an adapter or a GGUF file, with a card written from what is recorded."""
