"""The trained demo model answers questions about documents it has never seen, through the HTTP API."""

from collections.abc import Callable

from examples.demo_model.ask import num_exact
from examples.demo_model.corpus import make_case
from tests.e2e.process import Server

LENGTHS = (512, 1024, 2048, 3072, 4096)  # tokens of a document


def test_full_policy_retrieves_from_documents_of_up_to_4096_tokens(
    full_server: Server, count_tokens: Callable[[str], int]
) -> None:
    cases = [make_case(seed, LENGTHS[seed % len(LENGTHS)], count_tokens) for seed in range(20)]

    assert num_exact(full_server.url, cases) >= 19


def test_small_slots_retrieve_facts_within_reach_of_the_ring(
    small_slot_server: Server, count_tokens: Callable[[str], int]
) -> None:
    cases = [make_case(seed, 8192, count_tokens, within_last=450) for seed in range(3)]

    assert num_exact(small_slot_server.url, cases) == 3
