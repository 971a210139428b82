"""Questions that the demo model can answer, as tasks of lm-evaluation-harness: by choice or free text."""

import json
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from examples.demo_model.corpus import Case, make_case

NUM_CASES = 12
NUM_TOKENS = 400  # of a document
NUM_CHOICES = 4
_TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
target_delimiter: ""
"""
_CHOICE = """output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
_ANSWER = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
"""


def write_tasks(folder: Path, model: Path) -> None:
    """Write the two tasks and their data."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def render(case: Case) -> str:
        return str(tokenizer.apply_chat_template(case.messages, add_generation_prompt=True, tokenize=False))

    cases = [make_case(seed, NUM_TOKENS, count) for seed in range(NUM_CASES)]
    data = folder / "cases.jsonl"
    data.write_text("".join(json.dumps(_row(index, cases, render)) + "\n" for index in range(NUM_CASES)))
    for name, body in (("pets_choice", _CHOICE), ("pets_answer", _ANSWER)):
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, data=data) + body)


def _row(index: int, cases: list[Case], render: Callable[[Case], str]) -> dict[str, object]:
    case = cases[index]
    others = [cases[(index + step) % NUM_CASES].answer for step in range(1, NUM_CHOICES)]
    label = index % NUM_CHOICES
    return {
        "prompt": render(case),
        "question": case.prompt,
        "answer": case.answer,
        "choices": [*others[:label], case.answer, *others[label:]],
        "label": label,
    }
