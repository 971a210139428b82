"""A simulated SN40L, and other machines described in the same way: the cost of a decode or prefill step.

This package runs no model and knows no request. `hardware` and `model_config` describe. `placement` assigns
memories. `decode` and `prefill` make kernels with times. `calibration` fits the few unpublished numbers.
`plan` and `sweep` compare deployments. All results are simulated, and all output says so.
"""
