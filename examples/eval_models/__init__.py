"""Small models that do the evaluation suite's tasks with a full cache: tokenizers, training text, training and evaluation."""
