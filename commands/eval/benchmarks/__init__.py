"""Published benchmarks, read from their published files: their prompts, how an answer is read, and what is right."""
