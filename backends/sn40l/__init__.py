"""A simulated SN40L, and other machines described in the same way: what a decode or prefill step costs there, and why.

Nothing here runs a model or knows a request: `hardware` and `model_config` describe, `placement` puts parts in memories, `decode` and
`prefill` turn both into kernels with times, `calibration` fits the few numbers that nobody publishes, `plan` and `sweep` ask questions.
Whatever is computed here is simulated, and everything printed from it says so.
"""
