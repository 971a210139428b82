"""The trained demo model answers questions about documents it has never seen, through the HTTP API."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from examples.demo_model.corpus import Case, make_case
from tests.e2e.process import Server

NUM_CASES = 200


def num_exact(server: Server, cases: Iterable[Case]) -> int:
    """Ask every case, eight at a time, and count the answers that are right to the character."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)

    def is_exact(case: Case) -> bool:
        completion = client.chat.completions.create(
            model="snapserve-demo", messages=[{"role": "user", "content": case.prompt}], temperature=0, max_tokens=16
        )
        return (completion.choices[0].message.content or "").strip() == case.answer

    with ThreadPoolExecutor(8) as executor:
        return sum(executor.map(is_exact, cases))


def test_full_policy_retrieves_from_documents_of_up_to_4096_tokens(full_server: Server, count_tokens: Callable[[str], int]) -> None:
    lengths = (512, 1024, 2048, 3072, 4096)
    cases = [make_case(seed, lengths[seed % len(lengths)], count_tokens) for seed in range(NUM_CASES)]

    assert num_exact(full_server, cases) >= 0.95 * NUM_CASES


def test_small_slots_retrieve_what_the_ring_reaches(small_slot_server: Server, count_tokens: Callable[[str], int]) -> None:
    cases = [make_case(seed, 8192, count_tokens, within_last=450) for seed in range(24)]

    assert num_exact(small_slot_server, cases) >= 0.95 * len(cases)
