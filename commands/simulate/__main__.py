"""Prints the tables of `docs/reference/simulator-options.md`."""

from commands.simulate.options import options_tables

print(options_tables(), end="")
