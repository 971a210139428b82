"""`python -m bench.structured`: the command."""

import argparse
import asyncio
import sys

import bench.structured
from bench.structured.survey import survey


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.structured",
        description=bench.structured.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    findings = asyncio.run(
        survey(options.url, options.schemas, options.max_tokens, options.concurrency, options.first_seed)
    )
    print(findings)
    return 1 if findings.violations else 0


if __name__ == "__main__":
    sys.exit(main())
