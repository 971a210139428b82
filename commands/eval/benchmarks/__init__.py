"""Published benchmarks, read from their published files: prompts, extraction of answers, and scoring."""
