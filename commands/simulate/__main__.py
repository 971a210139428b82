"""Print the tables of `docs/simulator-options.md`."""

from commands.simulate.options import options_tables

print(options_tables(), end="")
