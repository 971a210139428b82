"""A simulated SN40L, and other machines described in the same way: the cost of a decode or prefill step.

This package runs no model and knows no request. Its rooms, lowest first: `description` reads machines and
models, `step` makes kernels with times, `comparison` has steps of several deployments, and `evidence` holds
published figures against ours and fits the few unpublished numbers. All results are simulated, and all output
says so.
"""
