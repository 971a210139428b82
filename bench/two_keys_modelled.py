"""Model how much one key's flood slows another key, with the real scheduler on a virtual clock.

It shows what `bench.two_keys` cannot tell from noise. Each row compares short prefill steps while the other
key pauses, which the scheduler takes, with long ones. A step takes what such steps took with a model of 100 M
on two quiet cores. Nothing is stored between prompts.

Usage: `python -m bench.two_keys_modelled [--chats 60] [--pauses 0 0.2 0.5 2]`. Takes seconds.
"""

import argparse
import random
import statistics
from queue import SimpleQueue
from unittest.mock import patch

from backends.clock import VirtualClock
from backends.config import prefill_shapes
from backends.fake import FakeBackend, fake_spec
from backends.interface import Batch, PrefillBatch, SamplingParams
from scheduler.config import SchedulerConfig
from scheduler.engine import EngineCore
from scheduler.fairness import DeviceTurns
from scheduler.messages import Add, AdmittedAdd, EngineInput, StopCriteria
from scheduler.scheduler import Scheduler

NUM_FLOODING = 12
LONG = 4000, 64  # tokens of a prompt and of its answer
SHORT = 200, 16
MAX_MODEL_LEN = 16_384
NUM_WARMUP_STEPS = 200  # of the flood alone
NUM_FIRST_CHATS = 5  # whose times are left out


def step_seconds(batch: Batch) -> float:
    if isinstance(batch, PrefillBatch):
        return 8e-3 + 0.33e-3 * batch.shape.num_rows * batch.shape.num_tokens
    return batch.num_steps * (6.5e-3 + 1.0e-3 * len(batch.rows))


class Keys:
    """An engine, a flood that keeps its requests in progress, and a key that sends short chats."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        shapes = prefill_shapes(512, MAX_MODEL_LEN)
        spec = fake_spec(num_slots=8, max_model_len=MAX_MODEL_LEN, prefill_shapes=shapes)
        backend = FakeBackend(spec, clock=self.clock, step_time=step_seconds)
        self._scheduler = Scheduler(spec, SchedulerConfig(max_num_waiting=1000), self.clock)
        self._inbox = SimpleQueue[EngineInput]()
        self._core = EngineCore(self._scheduler, backend, self.clock, self._inbox)
        self._num_sent = 0
        self._num_open = {"flood": 0, "other": 0}
        self._is_flooded = False
        self.num_flood_answers = 0

    def chat(self) -> float:
        """Send a short chat and return its seconds."""
        start = self.clock.now()
        self._send("other", *SHORT)
        while self._num_open["other"]:
            self.step()
        return self.clock.now() - start

    def flood(self) -> None:
        """Keep the flood's requests in progress from now on."""
        self._is_flooded = True
        while self._num_open["flood"] < NUM_FLOODING:
            self._send("flood", *LONG)

    def step(self) -> None:
        self._core.step()
        for output in self._scheduler.take_outputs():
            if output.final is not None:
                tenant = output.request_id.partition(" ")[0]
                self._num_open[tenant] -= 1
                self.num_flood_answers += tenant == "flood"
        if self._is_flooded:
            self.flood()

    def _send(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._num_sent += 1
        self._num_open[tenant] += 1
        add = Add(
            request_id=f"{tenant} {self._num_sent}",
            prompt_token_ids=tuple((self._num_sent + 7 * index) % 500 for index in range(num_prompt_tokens)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopCriteria(num_output_tokens, num_output_tokens, frozenset()),
            arrival_time=self.clock.now(),
            tenant=tenant,
        )
        self._inbox.put(AdmittedAdd(add))


def modelled(num_chats: int, pause: float) -> tuple[float, float]:
    """Return the ratio of the medians beside the flood and alone, and the flood's answers a second."""
    keys = Keys()
    alone = statistics.median(keys.chat() for _ in range(NUM_FIRST_CHATS))
    keys.flood()
    for _ in range(NUM_WARMUP_STEPS):
        keys.step()
    source = random.Random(1)
    start, num_before = keys.clock.now(), keys.num_flood_answers
    seconds = []
    for _ in range(num_chats):
        end = keys.clock.now() + pause * source.uniform(0.5, 1.5)
        while keys.clock.now() < end:
            keys.step()
        # It arrived at `end`, while the step ran that has just ended.
        seconds.append(keys.clock.now() - end + keys.chat())
    rate = (keys.num_flood_answers - num_before) / (keys.clock.now() - start)
    return statistics.median(seconds[NUM_FIRST_CHATS:]) / alone, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chats", type=int, default=60)
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.0, 0.2, 0.5, 2.0], metavar="SECONDS")
    options = parser.parse_args()
    print("| mean pause (s) | ratio, long steps | short steps | flood's answers/s, long | short |")
    print("|---|---|---|---|---|")
    for pause in options.pauses:
        ratio, rate = modelled(options.chats, pause)
        with patch.object(DeviceTurns, "expects_other", return_value=False):
            long_ratio, long_rate = modelled(options.chats, pause)
        print(f"| {pause:g} | {long_ratio:.2f} | {ratio:.2f} | {long_rate:.2f} | {rate:.2f} |", flush=True)


if __name__ == "__main__":
    main()
