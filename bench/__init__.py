"""Developer benchmarks: measurements against other software and against the hardware's limits.

Run them from the root of the repository as `python -m bench.NAME`. They are not part of the package, and the
package does not import them. `snapserve bench`, the load generator for users, is `commands/loadtest`.

- Speed beside other software: peers, prefixes, engine.
- Steps beside the hardware's limits: decode, floor, gpu, long_contexts, bounded_prefill.
- A server's behaviour: start, two_keys, two_keys_modelled, live_view, soak, structured.
- What policies lose: comparison, agreement, real_models, long_answers, sparse_control, speculative_prefill.
- Models of random weights: make_model, make_gguf. Pictures of the page: screenshots. The tests: mutation.

What several of them use is in `systems` (how servers and engines are started and loaded) and `fidelity` (runs
of policies and of kvpress on the same cases). `fidelity.kvpress_worker` and `systems.openvino_engine` run in
another project's environment and do not import ours.
"""
