"""The benchmarks by name."""

from collections.abc import Mapping

from server.eval.benchmarks.aime24 import Aime24
from server.eval.benchmarks.benchmark import Benchmark
from server.eval.benchmarks.livecodebench import LiveCodeBench
from server.eval.benchmarks.longbench_v2 import LongBenchV2

BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in (LongBenchV2(), Aime24(), LiveCodeBench())}
