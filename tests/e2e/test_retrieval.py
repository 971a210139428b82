"""The trained demo model answers questions about documents it has never seen, through the HTTP API."""

from collections.abc import Callable

import pytest

from examples.demo_model.ask import num_exact
from examples.demo_model.corpus import make_case
from tests.e2e.process import Server

LENGTHS = (512, 1024, 2048, 3072, 4096)  # tokens of a document


@pytest.mark.parametrize("num_cases", [20, pytest.param(60, marks=pytest.mark.long)])
def test_full_policy_retrieves_from_documents_of_up_to_4096_tokens(
    full_server: Server, count_tokens: Callable[[str], int], num_cases: int
) -> None:
    cases = [make_case(seed, LENGTHS[seed % len(LENGTHS)], count_tokens) for seed in range(num_cases)]

    assert num_exact(full_server.url, cases) >= 0.95 * num_cases


@pytest.mark.parametrize("num_cases", [2, pytest.param(8, marks=pytest.mark.long)])
def test_small_slots_retrieve_facts_within_reach_of_the_ring(
    small_slot_server: Server, count_tokens: Callable[[str], int], num_cases: int
) -> None:
    cases = [make_case(seed, 8192, count_tokens, within_last=450) for seed in range(num_cases)]

    assert num_exact(small_slot_server.url, cases) >= 0.95 * num_cases
