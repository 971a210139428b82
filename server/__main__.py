"""`python -m server` is the command `snapserve`, which lies above the server: it is found as users find it."""

import sys
from importlib.metadata import entry_points

(command,) = entry_points(group="console_scripts", name="snapserve")
sys.exit(command.load()())
