"""All published benchmarks by name."""

from collections.abc import Mapping

from commands.eval.benchmarks.aime24 import Aime24
from commands.eval.benchmarks.benchmark import Benchmark
from commands.eval.benchmarks.livecodebench import LiveCodeBench
from commands.eval.benchmarks.longbench_v2 import LongBenchV2

BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (LongBenchV2(), Aime24(), LiveCodeBench())
}
