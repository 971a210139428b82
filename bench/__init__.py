"""Developer benchmarks: measurements against other software and against the hardware's limits.

Run them from the root of the repository as `python -m bench.NAME`. They are not part of the package, and the
package does not import them. `snapserve bench`, the load generator for users, is `commands/loadtest`.
Programs that run in another project's environment (`kvpress_worker`, `openvino_engine`) do not import ours.
"""
