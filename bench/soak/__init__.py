"""Hours of all that clients do, in minutes: mixed traffic with disconnects and failing steps, and the books afterwards.

`python -m bench.soak --minutes 20` starts a server of its own; `--base-url` takes one that runs already and serves nobody else.
"""
