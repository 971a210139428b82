"""Recipe of the evaluation models: small models that solve the evaluation suite's tasks with a full cache."""
