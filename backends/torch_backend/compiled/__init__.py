"""Compiled decode on a CPU: static graphs of torch's operators and of the kernels in `native/`.

layers (GraphedLayer)      the model's layers, replaced by modules that note how they are called in the
warm-up |  calls v layer_function             a layer as a function of its tensors and weights: layers that
are alike share a graph |                        chunks: the same for a prompt's chunk, run as traced, without
compiling v trace -> fusion            a function's graph as text, with norms, gates and residuals moved into
the kernels | v decode_step                a pool's whole step: the graph before the layers, stacks of layers,
the graph after them |  texts v code (CompiledCode)        writes the texts to a folder, starts the process
`build`, and later loads what it compiled

A graph is known by its text: equal texts are one file, in every process and at every start. Until it is
compiled, and for good where there is no compiler, a graph runs as it was traced, once the kernels are there.
`trust` says which files are loaded.
"""
