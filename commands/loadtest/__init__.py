"""`snapserve bench`: a load generator for any OpenAI-compatible server, with the metrics and the names of `vllm bench serve`.

It sees a server from outside, through HTTP and nothing else, and needs only httpx: no tokenizer, no torch, nothing of the floors below.
"""
