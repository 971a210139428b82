"""Worked examples: programs that use or feed the server and are no part of it."""
