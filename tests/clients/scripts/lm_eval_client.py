"""lm-evaluation-harness: likelihoods by completions with the server's own tokenizer, and answers by chat."""

import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

BASE_URL, TASKS = sys.argv[1], Path(sys.argv[2])
manager = TaskManager(include_path=str(TASKS), include_defaults=False)
COMMON = "model=snapserve-demo,tokenizer_backend=remote,num_concurrent=2,max_retries=1"

by_likelihood = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=f"base_url={BASE_URL}/v1/completions,{COMMON}",
    tasks=["pets_choice"],
    task_manager=manager,
    bootstrap_iters=0,
)
chosen = by_likelihood["results"]["pets_choice"]
assert chosen["acc,none"] >= 0.75, chosen

by_answer = lm_eval.simple_evaluate(
    model="local-chat-completions",
    model_args=f"base_url={BASE_URL}/v1/chat/completions,model=snapserve-demo,num_concurrent=2,max_retries=1",
    tasks=["pets_answer"],
    task_manager=manager,
    apply_chat_template=True,
    bootstrap_iters=0,
)
answered = by_answer["results"]["pets_answer"]
assert answered["exact_match,none"] >= 0.75, answered
print("ok")
