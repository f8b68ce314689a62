"""A server that answers over HTTP with an exported model."""
