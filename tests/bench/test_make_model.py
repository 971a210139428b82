from bench.make_model import make_tokenizer

TEXTS = ("def add(one, other):\n    return one + other\n", "class Sum:\n    pass\n")


def test_the_tokenizer_gives_every_text_back() -> None:
    tokenizer = make_tokenizer(iter(TEXTS))
    text = "def sum(other): # naïve ✓\n\treturn 1"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_turns_of_a_chat_are_marked_with_control_tokens() -> None:
    tokenizer = make_tokenizer(iter(TEXTS))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "add"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.encode("<|im_start|>")[0] == 1
