"""Load OpenVINO GenAI's continuous batching in a closed loop.

It runs in OpenVINO's environment and imports nothing of ours. Usage: `python bench/systems/openvino_engine.py
JOB.json RESULT.json`. The job has the model's folder, the prompts (token ids, and the most tokens of each
answer), the number of requests in flight, the precision of the KV cache, and optionally an eviction (sink,
recent and total tokens). The result has the times of every request, from which `bench.peers` computes the
same figures as for all others.
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
    """Serve all prompts. Return the times of each request and the seconds in all."""
    start = time.perf_counter()
    records: list[dict[str, Any]] = []
    in_flight: dict[int, Any] = {}
    while len(records) < len(prompts) or in_flight:
        while len(records) < len(prompts) and len(in_flight) < max_concurrency:
            index = len(records)
            prompt = prompts[index]
            sent = time.perf_counter()
            token_ids = ov.Tensor(np.array([prompt["token_ids"]], dtype=np.int64))
            in_flight[index] = pipeline.add_request(index, token_ids, options(prompt["max_tokens"]))
            record = {
                "sent": sent,
                "contents": [],
                "ended": sent,
                "num_input_tokens": len(prompt["token_ids"]),
                "num_output_tokens": 0,
            }
            records.append(record)
        pipeline.step()
        for index in [index for index, handle in in_flight.items() if has_ended(handle, records[index])]:
            del in_flight[index]
    return {"duration": time.perf_counter() - start, "records": records}


def has_ended(handle: Any, record: dict[str, Any]) -> bool:
    """Record the tokens that a step produced for a request, and return whether the request has ended."""
    if handle.can_read():
        record["ended"] = time.perf_counter()
        record["contents"].append(record["ended"])
        record["num_output_tokens"] += sum(len(output.generated_ids) for output in handle.read().values())
    return bool(handle.get_status() != genai.GenerationStatus.RUNNING)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    result_path = Path(sys.argv[2])
    start = time.perf_counter()
    pipeline = open_pipeline(job)
    seconds_to_ready = time.perf_counter() - start
    if job["warmups"]:
        run(pipeline, job["warmups"], job["max_concurrency"])
    figures = run(pipeline, job["prompts"], job["max_concurrency"])
    result_path.write_text(json.dumps({"seconds_to_ready": seconds_to_ready, **figures}))


if __name__ == "__main__":
    main()
