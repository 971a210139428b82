"""Synthetic tasks over long contexts: each writes cases of any length for any tokenizer from a seed.

They know no server and no model.
"""
