"""The table of a suite's results."""

from cache.policy import PolicyName
from commands.eval.result import SuiteResult
from commands.eval.run import Run, TaskScores, packed_share
from commands.eval.statistics import Interval, mean_interval, score_interval
from commands.shared.table import table

NOT_PACKED = (
    "These figures do not come from packed slots alone. This server does not support the extension "
    "`num_prefill_tokens`, so prefill samples the first token of each answer, "
    "and prefill sees the whole prompt."
)
NOTHING_EVICTED = "no token was evicted, so these are the scores of the whole cache, not of a smaller one."


def suite_table(result: SuiteResult) -> str:
    """Return a row for each task and group and a column for each setting, with 95 % intervals."""
    first = result.runs[0]
    rows = [[name, *(_scores(run.tasks[name]) for run in result.runs)] for name in first.tasks]
    rows += [[f"  {name}", *(_scores(run.groups[name]) for run in result.runs)] for name in first.groups]
    if len(first.tasks) > 1:
        rows.append(["mean", *map(_mean, result.runs)])
    rows.append(["from the packed slot", *map(_packed_share, result.runs)])
    rows.append(["tokens per token kept", *map(_compression, result.runs)])
    if result.base_url is not None:
        rows.append(["pools", *map(_pools, result.runs)])
    header = ["", *(run.setting.label for run in result.runs)]
    lines = [f"{result.model_id}: {result.title}", "", table(header, rows)]
    if not result.is_packed:
        lines += ["", NOT_PACKED]
    if labels := [run.setting.label for run in result.runs if _is_unexpectedly_whole(run)]:
        lines += ["", f"{', '.join(labels)}: {NOTHING_EVICTED}"]
    return "\n".join(lines)


def _is_unexpectedly_whole(run: Run) -> bool:
    """Whether a run of a policy that evicts or quantises has done nothing."""
    usage = run.slot_usage
    if run.setting.policy is PolicyName.FULL or usage is None:
        return False
    return usage.num_evicted == usage.num_quantized == 0


def _cell(mean: float, interval: Interval) -> str:
    return f"{mean:5.1f} ({interval[0]:.1f} to {interval[1]:.1f})"


def _scores(task: TaskScores) -> str:
    return _cell(task.mean, score_interval(task.scores))


def _mean(run: Run) -> str:
    return _cell(run.mean, mean_interval([task.scores for task in run.tasks.values()]))


def _packed_share(run: Run) -> str:
    share = packed_share(list(run.tasks.values()))
    return "unknown" if share is None else f"{100 * share:5.1f} %"


def _compression(run: Run) -> str:
    return "unknown" if run.slot_usage is None else f"{run.slot_usage.compression:5.1f}"


def _pools(run: Run) -> str:
    return "unknown" if run.slot_usage is None else ", ".join(run.slot_usage.pools)
