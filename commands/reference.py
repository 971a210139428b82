"""Prints the tables of options in `docs/reference`.

`python -m commands.reference FILE` prints what the file has, for example `configuration.md`.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Final

from backends.options import OptionGroup
from cache.policy import PolicyName
from cache.policy_options import LayerBudgets, PolicyOptions, SelectionName
from cache.scorer import WindowScorer
from commands.eval.options import QUESTIONS as EVAL_QUESTIONS
from commands.simulate.options import QUESTIONS as SIMULATE_QUESTIONS
from server.options.command_line import groups_of, options_of
from server.options.serve import serve_groups
from server.options.slots import SelectionOptions


def _options_table(groups: Iterable[type[OptionGroup]]) -> str:
    """Return the options as Markdown tables, one for each group."""
    lines: list[str] = []
    for group in filter(options_of, groups):
        if group.is_hidden:
            continue
        lines += [f"### {group.title}", "", "| flag | variable | default | meaning |", "|---|---|---|---|"]
        for option in options_of(group):
            metavar = option.metavar.replace("|", "\\|") + " …" * (option.is_list and not option.is_joined)
            flag = f"`{option.flag} {metavar}`"
            if option.is_switch:
                flag = f"`{option.flag}`, `--no-{option.name}`"
            lines.append(f"| {flag} | `{option.variable}` | {option.default_text} | {option.text} |")
        lines.append("")
    return "\n".join(lines)


def _selection_table() -> str:
    """Return the numbers of each selection as Markdown, for policy snapstream."""
    lines = [f"| key | {' | '.join(SelectionName)} | meaning |", "|---" * (len(SelectionName) + 2) + "|"]
    for option in options_of(SelectionOptions):
        values = [_shown(name, option.key) for name in SelectionName]
        lines.append(f"| `{option.name}` | {' | '.join(values)} | {option.text} |")
    return "\n".join(lines) + "\n"


def _shown(name: SelectionName, key: str) -> str:
    policy = PolicyOptions(PolicyName.SNAPSTREAM).with_selection(name)
    if key in WindowScorer.__dataclass_fields__:
        return str(getattr(policy.scorer, key))
    if key == "layer_budgets":
        return str(policy.layer_budgets or LayerBudgets.MEASURED)
    return "no" if policy.lend_ring is False else "yes"


def _evaluation_tables() -> str:
    return "\n".join(
        f"## `snapserve eval {question.name}`: options\n\n{_options_table(groups_of(question.options))}"
        for question in EVAL_QUESTIONS
    )


TABLES: Final[dict[str, Callable[[], str]]] = {
    "configuration.md": lambda: _options_table(serve_groups()),
    "evaluation.md": _evaluation_tables,
    "selection.md": _selection_table,
    "simulator-options.md": lambda: _options_table(question.options for question in SIMULATE_QUESTIONS),
}

if __name__ == "__main__":
    print(TABLES[sys.argv[1]](), end="")
