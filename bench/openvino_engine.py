"""Load OpenVINO GenAI's continuous batching, with a closed loop. It runs in an environment of OpenVINO's and imports nothing of ours.

Usage: `python bench/openvino_engine.py JOB.json RESULT.json`. The job names the model's folder, the prompts (token ids, and the most tokens
of each answer), how many are under way at once, the precision of the KV cache and, if any, an eviction (sink, recent and all tokens held).
The result has the moments of every request, from which `bench.peers` makes the same figures as for all others.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found, unused-ignore]
import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

CACHE_GIGABYTES = 4
TOKENS_PER_STEP = 512


def open_pipeline(job: dict[str, Any]) -> Any:
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GIGABYTES
    scheduling.max_num_seqs = job["max_concurrency"]
    scheduling.max_num_batched_tokens = TOKENS_PER_STEP
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    if job["eviction"] is not None:
        sink, recent, total = job["eviction"]
        scheduling.use_cache_eviction = True
        scheduling.cache_eviction_config = genai.CacheEvictionConfig(
            sink, recent, total, genai.AggregationMode.NORM_SUM
        )
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": job["kv_precision"]}
    return genai.ContinuousBatchingPipeline(
        job["model"], scheduler_config=scheduling, device="CPU", properties=properties
    )


def options(max_tokens: int) -> Any:
    """Return greedy generation of full length."""
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def run(pipeline: Any, prompts: list[dict[str, Any]], max_concurrency: int) -> dict[str, Any]:
    """Serve the prompts to their end; return the moments of each and the seconds of all."""
    start = time.perf_counter()
    records: list[dict[str, Any]] = []
    under_way: dict[int, Any] = {}
    while len(records) < len(prompts) or under_way:
        while len(records) < len(prompts) and len(under_way) < max_concurrency:
            number, prompt = len(records), prompts[len(records)]
            sent = time.perf_counter()
            token_ids = ov.Tensor(np.array([prompt["token_ids"]], dtype=np.int64))
            under_way[number] = pipeline.add_request(number, token_ids, options(prompt["max_tokens"]))
            record = {
                "sent": sent,
                "contents": [],
                "ended": sent,
                "num_input_tokens": len(prompt["token_ids"]),
                "num_output_tokens": 0,
            }
            records.append(record)
        pipeline.step()
        for number in [number for number, handle in under_way.items() if note(handle, records[number])]:
            del under_way[number]
    return {"duration": time.perf_counter() - start, "records": records}


def note(handle: Any, record: dict[str, Any]) -> bool:
    """Take the tokens that a step brought one request; return whether it has ended."""
    if handle.can_read():
        record["ended"] = time.perf_counter()
        record["contents"].append(record["ended"])
        record["num_output_tokens"] += sum(len(output.generated_ids) for output in handle.read().values())
    return bool(handle.get_status() != genai.GenerationStatus.RUNNING)


def main() -> None:
    job, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    start = time.perf_counter()
    pipeline = open_pipeline(job)
    seconds_to_ready = time.perf_counter() - start
    if job["warmups"]:
        run(pipeline, job["warmups"], job["max_concurrency"])
    figures = run(pipeline, job["prompts"], job["max_concurrency"])
    result.write_text(json.dumps({"seconds_to_ready": seconds_to_ready, **figures}))


if __name__ == "__main__":
    main()
