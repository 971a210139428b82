"""The counts of a request's prompts and choices."""

from server.generation.events import ChoiceDelta, Progress
from server.generation.tally import Tally


def test_progress_is_prefill_until_every_prompt_is_read() -> None:
    tally = Tally((4, 6), ("full", "full"), 1)
    assert tally.progress == "prefill 0/10"
    tally.add(0, Progress(4))
    tally.add(1, Progress(5))
    assert tally.progress == "prefill 9/10"
    tally.add(1, ChoiceDelta(0, "a", (1,)))
    assert tally.progress == "decode"
