"""The published benchmarks through an engine they start, the fake backend, and scripted servers."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands.cli import main
from commands.eval.benchmarks.measure import cut_in_the_middle
from commands.eval.options import EVAL_MODEL
from commands.eval.prompts import load_tokenizer
from server.options.models import DEMO_MODEL
from tests.commands.eval.benchmarks.test_livecodebench import answer
from tests.commands.eval.benchmarks.test_livecodebench import row as program_row
from tests.commands.eval.benchmarks.test_questions import LONG
from tests.commands.loadtest.scripted import Reply, scripted
from tests.server.serving import RunningServer

AIME = [
    {"id": 60, "problem": "What is 5 × 5?", "answer": "025"},
    {"id": 61, "problem": "What is 1 + 1?", "answer": "2"},
]


def named(model: str, base_url: str) -> tuple[str, ...]:
    return ("--base-url", base_url, "--served-model-name", model, "--tokenizer", str(EVAL_MODEL))


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reply(text: str) -> Reply:
    return Reply(
        [
            json.dumps(
                {"choices": [{"text": text}], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
            ).encode()
        ]
    )


def _choose(letter: str, _: int, __: dict[str, Any]) -> Reply:
    return reply(f"The correct answer is ({letter})")


@pytest.mark.long
def test_its_own_engine_answers_longbench_from_packed_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = "The cat of Anna is called Blacky. " * 400
    rows = [
        LONG | {"_id": str(number), "length": length, "context": context}
        for number, length in enumerate(("short", "long"))
    ]
    sizes = ("--length", "400", "--max-tokens", "8")
    assert main(["eval", "longbench-v2", "--data", write(tmp_path, rows), *sizes, "--json"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    run = result["runs"][0]
    assert (result["suite"], result["from_packed_slot"], run["packed_share"]) == ("longbench-v2", True, 1)
    assert {name: len(group["scores"]) for name, group in run["groups"].items()} == {
        "easy": 2,
        "short": 1,
        "long": 1,
    }
    assert run["serve_options"][-4:-2] == ["--slot-capacity", "100"]
    assert 380 <= int(run["serve_options"][-1]) <= 400
    assert "  short" in output.err


def test_answers_are_scored_by_group_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        LONG | {"_id": str(number), "difficulty": name}
        for number, name in enumerate(("easy", "easy", "hard"))
    ]
    data, files = write(tmp_path, rows), []
    for letter in "AB":
        files.append(str(tmp_path / f"{letter}.json"))
        with scripted(partial(_choose, letter)) as server:
            asked = (*named("m", server.url), "--data", data, "--no-chat-template")
            assert main(["eval", "longbench-v2", *asked, "--json", files[-1]]) == 0
    result = json.loads(Path(files[1]).read_text())
    assert (result["mean"], result["num_cases"], result["from_packed_slot"]) == (100, 3, False)
    assert main(["eval", "compare", *files]) == 0
    assert "+100.0" in capsys.readouterr().out


def test_samples_of_a_question_have_separate_seeds_and_are_averaged(tmp_path: Path) -> None:
    with scripted(lambda _, body: reply("\\boxed{25}" if body.get("seed") == 7 else "\\boxed{2}")) as server:
        asked = (*named("m", server.url), "--data", write(tmp_path, AIME))
        drawn = ("--num-samples", "4", "--temperature", "0.6", "--top-p", "0.95", "--seed", "6")
        assert main(["eval", "aime24", *asked, *drawn, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["runs"][0]["tasks"]["aime24"]["scores"] == [25, 75]
    bodies = [body for body in server.bodies if "seed" in body]
    assert sorted(body["seed"] for body in bodies) == [6, 6, 7, 7, 8, 8, 9, 9]
    assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body in bodies} == {
        (0.6, 0.95, 32768)
    }


def test_programs_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(
        tmp_path,
        [
            program_row(),
            program_row(question_id="b", difficulty="hard", public_test_cases="[]", private_test_cases="[]"),
        ],
    )
    assert main(["eval", "livecodebench", "--data", data]) == 2
    assert "entry 2, is no question of livecodebench: it has no tests" in capsys.readouterr().err
    with scripted(lambda _, __: reply(answer("print(sum(map(int, input().split())))"))) as server:
        asked = (*named("m", server.url), "--data", data, "--num-cases", "1")
        assert main(["eval", "livecodebench", *asked, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["mean"], result["runs"][0]["groups"].keys()) == (100, {"easy"})


@pytest.mark.parametrize(("name", "rows"), [("aime24", AIME), ("livecodebench", [program_row()])])
def test_a_running_server_is_measured(
    running: RunningServer, name: str, rows: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--length", "600", "--max-tokens", "16")
    asked = ("--base-url", running.url, "--tokenizer", str(DEMO_MODEL), "--data", write(tmp_path, rows))
    assert main(["eval", name, *asked, *sizes, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["mean"], result["from_packed_slot"]) == (0, True)  # it makes tokens up


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--data must be given"),
        (("--data", "none.jsonl"), "--data none.jsonl cannot be read"),
        (("--max-tokens", "400", "--length", "400"), "--max-tokens 400 must be less than --length 400"),
        (("--num-samples", "2"), "--num-samples above 1 requires a --temperature above 0"),
        (("--temperature", "3"), "--temperature must be a number from 0 to 2"),
    ],
)
def test_invalid_options_are_refused_before_any_work(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options if not options or "--data" in options else ("--data", "x", *options)
    assert main(["eval", "aime24", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_that_is_not_truncated_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path, [{"id": 1, "problem": "word " * 300, "answer": 1}])
    assert main(["eval", "aime24", "--data", data, "--length", "200", "--max-tokens", "20"]) == 2
    assert "--length 200 is too short: question 1 has" in capsys.readouterr().err


def test_the_middle_is_left_out() -> None:
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    text = " ".join(f"word{number}" for number in range(300))
    cut = cut_in_the_middle(tokenizer, text, 100)
    assert 94 <= len(tokenizer.encode(cut, add_special_tokens=False)) <= 100
    start = next(number for number, (one, other) in enumerate(zip(text, cut, strict=False)) if one != other)
    assert text.startswith(cut[:start])
    assert text.endswith(cut[start + 20 :])
    assert cut_in_the_middle(tokenizer, "short", 100) == "short"
