"""The page that compares servers: each of our cells names a test that exists."""

import re

from tests.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
OURS = {"yes", "no", "part"}


def test_every_row_names_a_test_that_exists() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if "::" in line]
    assert len(rows) > 40
    for row in rows:
        _, _, *cells, test, _ = [cell.strip() for cell in row.split("|")]
        assert len(cells) == 5, row
        assert cells[0] in OURS, row
        assert set(cells) <= OURS | {"not documented"}, row
        path, _, name = test.strip("`").partition("::")
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), row


def test_the_counts_are_those_of_the_table_of_fields() -> None:
    from tests.server.protocol.test_other_servers import ACCEPTED, REFUSED

    accepted = sum(map(len, ACCEPTED.values()))
    refused = sum(map(len, REFUSED.values()))
    text = " ".join(PAGE.read_text().split())
    assert f"{accepted + refused} fields" in text
    assert f"{accepted} are accepted; {refused} would change" in text
