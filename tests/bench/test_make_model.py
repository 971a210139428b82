from bench.make_model import make_tokenizer

TEXTS = ("def add(one, other):\n    return one + other\n", "class Sum:\n    pass\n")


def test_decoding_restores_the_text() -> None:
    tokenizer = make_tokenizer(iter(TEXTS))
    text = "def sum(other): # naïve ✓\n\treturn 1"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_mark_the_turns_of_a_chat() -> None:
    tokenizer = make_tokenizer(iter(TEXTS))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "add"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.encode("<|im_start|>")[0] == 1
