"""`snapserve bench`: a load generator for OpenAI-compatible servers, with the metrics of `vllm bench serve`.

It sees a server through HTTP only. It needs no tokenizer, no torch and no model.
"""
