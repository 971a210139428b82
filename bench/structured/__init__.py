"""Check a running server's structured output with random schemas and prompts.

`python -m bench.structured http://127.0.0.1:8000 --schemas 1000` validates each answer by `jsonschema`. An
answer that ends in `stop` must satisfy its schema. The report counts the answers that end in `length`, and
the rejected schemas by reason.
"""
