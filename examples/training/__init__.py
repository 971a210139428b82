"""The training library of the examples: a trainer with checkpoints, batches, tokenizers and evaluation.

Each model's package is a recipe over it. The recipe holds the model's text, curriculum, start and loss.
"""
