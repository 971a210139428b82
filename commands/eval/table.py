"""Results of the suite as text for people."""

from cache.policy import PolicyName
from commands.eval.result import SuiteResult
from commands.eval.run import packed_share
from commands.eval.statistics import mean_interval, score_interval
from commands.shared.table import table

NOT_PACKED = (
    "These figures do not come from packed slots alone: this server does not say which tokens it read from its cache as it is after "
    "prefill (`num_prefill_tokens` is an extension). The first token of each answer is prefill's, which sees the whole prompt."
)
NOTHING_EVICTED = (
    "no token was evicted, so this is what the whole cache scores, and says nothing of a smaller one."
)


def suite_table(result: SuiteResult) -> str:
    """Return a row a task or group and a column a setting, with 95 % intervals."""
    header = f"{result.model_id}: {result.title}"
    rows = []
    for name in result.runs[0].tasks:
        tasks = [run.tasks[name] for run in result.runs]
        rows.append([name, *(_cell(task.mean, score_interval(task.scores)) for task in tasks)])
    for name in result.runs[0].groups:
        groups = [run.groups[name] for run in result.runs]
        rows.append([f"  {name}", *(_cell(group.mean, score_interval(group.scores)) for group in groups)])
    if len(result.runs[0].tasks) > 1:
        rows.append(
            [
                "mean",
                *(
                    _cell(run.mean, mean_interval([task.scores for task in run.tasks.values()]))
                    for run in result.runs
                ),
            ]
        )
    rows.append(
        ["from the packed slot", *(_share(packed_share(list(run.tasks.values()))) for run in result.runs)]
    )
    rows.append(
        [
            "tokens for each one held",
            *("unknown" if run.held is None else f"{run.held.compression:5.1f}" for run in result.runs),
        ]
    )
    if result.base_url is not None:
        rows.append(
            ["pools", *("unknown" if run.held is None else ", ".join(run.held.pools) for run in result.runs)]
        )
    lines = [header, "", table(["", *(run.setting.label for run in result.runs)], rows)]
    if not result.is_packed:
        lines += ["", NOT_PACKED]
    if whole := [
        run.setting.label
        for run in result.runs
        if run.setting.policy is not PolicyName.FULL and run.held and run.held.num_evicted == 0
    ]:
        lines += ["", f"{', '.join(whole)}: {NOTHING_EVICTED}"]
    return "\n".join(lines)


def _cell(mean: float, interval: tuple[float, float]) -> str:
    return f"{mean:5.1f} ({interval[0]:.1f} to {interval[1]:.1f})"


def _share(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:5.1f} %"
