"""The demonstration model: the text it learns from, its tokenizer, its training and its evaluation."""
