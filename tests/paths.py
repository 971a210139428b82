"""Where the files are that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DEMO_MODEL = ROOT / "server" / "demo_model"
