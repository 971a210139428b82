"""Score every policy against the full cache, the guessed recipe and NVIDIA's kvpress.

All have the same model, cases, budgets and split. `docs/reports/comparison.md` describes the comparison.

Usage: `python -m bench.comparison --model DIR --out DIR [--kvpress-python .venv-kvpress/bin/python]
[--settings NAME …]` and the options of `snapserve eval ruler` for cases. It writes `comparison.json`, which
`snapserve eval compare` reads, `comparison.md` and `comparison.png` to --out.

The JSON is written after every few cases of each task. Cases that it or --earlier has for the same model are
not repeated. So a call can continue an interrupted one, add cases, or merge the results of several calls.
"""

import argparse
import sys
from pathlib import Path

from bench.fidelity.comparer import SETTINGS, Comparer, settings_of, table
from bench.fidelity.presses import Kvpress
from bench.systems.system import MeasurementError
from cache.policy import PolicyName
from commands.eval.errors import EvalError
from commands.eval.options import RulerOptions
from commands.eval.plot import plot_scores
from commands.eval.ruler import RulerConfig, ruler_config
from server.options.command_line import OptionError, add_options, groups_of, read_options


def _arguments() -> tuple[argparse.Namespace, RulerConfig]:
    parser = argparse.ArgumentParser(prog="python -m bench.comparison", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--earlier",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="results of other calls to merge",
    )
    parser.add_argument("--kvpress-python", help="Python with kvpress, as scripts/setup-kvpress installs it")
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        metavar="NAME",
        help=", ".join(SETTINGS),
    )
    add_options(parser, groups_of(RulerOptions))
    arguments = parser.parse_args()
    options = read_options(RulerOptions, arguments, {})
    arguments.compression = options.served.compression
    served = options.served.model_copy(update={"policy": (PolicyName.FULL,), "base_url": None})
    return arguments, ruler_config(served, options.cases)


def main() -> int:
    try:
        arguments, config = _arguments()
        arguments.out.mkdir(parents=True, exist_ok=True)
        kvpress = (
            None
            if arguments.kvpress_python is None
            else Kvpress(arguments.kvpress_python, config.target.model)
        )
        result = Comparer(config, kvpress, arguments.out, arguments.earlier).measure(
            settings_of(arguments.settings, arguments.compression)
        )
        (arguments.out / "comparison.md").write_text(table(result))
        plot_scores(result.runs, arguments.out / "comparison.png")
        print(table(result))
    except (EvalError, OptionError, MeasurementError) as error:
        print(f"bench.comparison: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
