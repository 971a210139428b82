"""Send held-out questions to a server of the demo model, and print how many answers are exact.

`python -m examples.demo_model.ask --base-url URL --num-tokens 8192 [--within-last 450]` works with every
cache policy. An answer is two words. The first comes from the prompt's prefill. The second is the first to
depend on the entries that the slot kept.
"""

import argparse
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tqdm import tqdm
from transformers import AutoTokenizer

from examples.demo_model.corpus import Case, make_case

DEMO_MODEL = Path(__file__).parents[2] / "server" / "demo_model"
NUM_CONCURRENT = 8
MAX_TOKENS = 16


def num_exact(base_url: str, cases: Iterable[Case]) -> int:
    """Return how many cases the server answers exactly. Raises httpx.HTTPError."""
    with (
        httpx.Client(base_url=base_url, timeout=600) as client,
        ThreadPoolExecutor(NUM_CONCURRENT) as executor,
    ):
        return sum(tqdm(executor.map(lambda case: _is_exact(client, case), cases), unit="question"))


def _is_exact(client: httpx.Client, case: Case) -> bool:
    body = {"model": "snapserve-demo", "messages": case.messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    response = client.post("/v1/chat/completions", json=body).raise_for_status()
    answer: str = response.json()["choices"][0]["message"]["content"]
    return answer.strip() == case.answer


def main() -> None:
    """Send the questions and print the share of exact answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--num-tokens",
        type=int,
        nargs="+",
        default=[4096],
        help="lengths of the documents in turn, in tokens",
    )
    parser.add_argument(
        "--within-last",
        type=int,
        help="the fact is within this many last tokens of the document (default: anywhere)",
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    cases = [
        make_case(
            arguments.seed + index,
            arguments.num_tokens[index % len(arguments.num_tokens)],
            lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            within_last=arguments.within_last,
        )
        for index in range(arguments.cases)
    ]
    exact = num_exact(arguments.base_url, cases)
    print(f"{exact} of {len(cases)} exact = {exact / len(cases):.1%}")


if __name__ == "__main__":
    main()
