"""What the README shows must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullcp.commands import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", ["README.md", "docs/training.md"])
def test_python_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}  # each goes on from the one before
    for block in blocks:
        exec(block, scope)
    if document == "README.md":
        assert len(blocks) == 3
        assert scope["y_pred"].shape == (10,)
        assert scope["intervals"].shape == (10, 2, 2)
        assert 0.8 < scope["at_90"].coverage <= 1
        assert scope["at_90"].mean_width < scope["at_95"].mean_width < 2


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_names_that_documents_mention_exist(document):
    import fullcp

    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)h][^)]*)\)", text):
        assert ((ROOT / document).parent / link).exists(), link
    for name in re.findall(r"`(\w+Regressor)", text):
        assert hasattr(fullcp, name) or hasattr(fullcp.sklearn, name), name
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^(?:FULLCP_DATA=\S* )?make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_options_that_documents_show_exist(document):
    """Each `fullcp <command> --option` of a shell block is one that the command has."""
    runner = CliRunner()
    for line in re.findall(r"^fullcp .*", (ROOT / document).read_text(), flags=re.MULTILINE):
        words = line.split("#")[0].split()
        shown = runner.invoke(app, [words[1], "--help"], env={"COLUMNS": "300"}).output
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, line
