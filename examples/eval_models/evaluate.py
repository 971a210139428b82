"""Score a model on the suite with a full cache, under plain transformers.

`python -m examples.eval_models.evaluate --model DIR --lengths 512 4096 --cases 50` decodes greedily in
float32. Training never draws its cases. It prints the mean score of each task at each length.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from commands.eval.scoring import score
from commands.eval.tasks.case import Case, LengthError
from commands.eval.tasks.suite import TASKS, case_source
from examples.training import evaluator

SPARE_TOKENS = 8


class Evaluator(evaluator.Evaluator):
    """An evaluation model, which answers cases of the suite."""

    def case(self, task: str, seed: int, index: int, length: int) -> Case:
        """Return a case whose prompt has at most `length` tokens. Raises `LengthError`."""
        return TASKS[task].make(case_source(task, seed, index), length - 1, self.count_tokens)

    def answer(self, case: Case) -> str:
        """Return the model's continuation of the prompt, a little longer than the right one."""
        prompt = torch.tensor([self.tokenizer.encode(case.prompt)])
        return self.generate(prompt, self.count_tokens(case.answer) + SPARE_TOKENS)


def table(scores: dict[str, dict[int, float]], lengths: list[int]) -> str:
    """Format scores by task and length as a Markdown table, in percent."""
    lines = [
        "| task | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|---|" + "---:|" * len(lengths),
    ]
    for task, of_length in scores.items():
        lines.append(
            f"| {task} | "
            + " | ".join(f"{of_length[length]:.1%}" if length in of_length else "–" for length in lengths)
            + " |"
        )
    means = (
        sum(of_length.get(length, 0.0) for of_length in scores.values()) / len(scores) for length in lengths
    )
    return "\n".join([*lines, "| mean | " + " | ".join(f"{mean:.1%}" for mean in means) + " |"])


def main() -> None:
    """Score the model and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print wrong answers to stderr")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = Evaluator(arguments.model)
    scores: dict[str, dict[int, float]] = {task: {} for task in arguments.tasks}
    with (
        tqdm(total=len(scores) * len(arguments.lengths) * arguments.cases, unit="case") as bar,
        torch.inference_mode(),
    ):
        for task in arguments.tasks:
            for length in arguments.lengths:
                total = 0.0
                for index in range(arguments.cases):
                    bar.update()
                    try:
                        case = model.case(task, arguments.seed, index, length)
                    except LengthError:
                        break
                    answer = model.answer(case)
                    total += score(case, answer)
                    if arguments.show and score(case, answer) < 1:
                        print(f"{task}: expected {case.answer!r}, got {answer!r}", file=sys.stderr)
                else:
                    scores[task][length] = total / arguments.cases
    print(table(scores, arguments.lengths))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"lengths": arguments.lengths, "cases": arguments.cases, "scores": scores}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
