"""A soak test: mixed traffic with disconnects and failing steps for minutes, then a check of all counts.

`python -m bench.soak --minutes 20` starts a server. `--base-url` takes a running server without other
clients. `--replicas 2` starts two that share a folder of batches and a Redis, and kills one after the other
at random.
"""
