"""Recipe of the demonstration model: its text, tokenizer, curriculum, training and evaluation."""
