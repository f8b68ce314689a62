"""Low-rank adapters for a language model, by peft: a small part is trained and saved, and merged at the end."""
