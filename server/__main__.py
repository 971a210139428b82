"""`python -m server` runs the command `snapserve`.

The command's package depends on the server, so the server cannot import it. It is found by its entry point.
"""

import sys
from importlib.metadata import entry_points

(command,) = entry_points(group="console_scripts", name="snapserve")
sys.exit(command.load()())
