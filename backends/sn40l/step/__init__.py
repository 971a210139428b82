"""The time of one decode or prefill step of a deployment."""
