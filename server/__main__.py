"""`python -m server` is `snapserve`."""

import sys

from server.cli import main

sys.exit(main())
