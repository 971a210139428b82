"""What the README shows is what happens."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backends.registry import BUILT_IN
from cache.policy import PolicyName
from tests.e2e.process import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _block(language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if containing in block)
    return str(block)


def _output(arguments: list[str]) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60).stdout


def _numbers(json_text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r'"(\w+)":([\d.]+)', json_text)}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_answers(smollm2_server: Server) -> None:
    command = _block("sh", "symbol for water").replace("http://127.0.0.1:8000", smollm2_server.url)

    assert '"content":"The chemical symbol for water is H2O."' in _output(["bash", "-c", command])


@pytest.mark.long
def test_the_openai_sdk_streams(smollm2_server: Server) -> None:
    program = _block("python", "openai").replace("http://127.0.0.1:8000", smollm2_server.url)

    assert _output([sys.executable, "-c", program]) == "The chemical symbol for water is H2O."


@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_long_text_is_answered_from_a_small_slot(small_smollm2_server: Server) -> None:
    command = _block("sh", "secret code").replace("http://127.0.0.1:8000", small_smollm2_server.url)
    answer = _output(["bash", "-c", command])

    assert '"content":"The secret code is 482913."' in answer
    assert '"cache":{"pool":"snapstream","policy":"snapstream",' in answer
    documented = _numbers(_block("json", "cache"))
    assert set(documented) == {"kept_tokens", "evicted_tokens", "compression"}
    measured = _numbers(answer)
    assert {name: measured[name] for name in documented} == pytest.approx(documented, rel=0.01)


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "results" / "README.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]

    assert len(links) > 5 or page.name not in {"README.md", "CHANGELOG.md"}
    assert [link for link in links if not leads_somewhere(page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether the file is there, and in it the heading that the link names."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not anchor or not target.exists():
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", prose(target), flags=re.MULTILINE)
    return anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def prose(page: Path) -> str:
    """Return a page without its blocks of code, whose comments look like headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_tables_name_every_policy_and_backend() -> None:
    rows = set(re.findall(r"^\| `([a-z0-9-]+)`", README, flags=re.MULTILINE))

    assert rows == {*map(str, PolicyName), *BUILT_IN}
