"""Worked examples: programs that use the server or make models for it. The server does not import them."""
