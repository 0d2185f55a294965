"""What the README shows must run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    scope: dict[str, object] = {}  # each goes on from the one before
    for block in blocks:
        exec(block, scope)
        if "y_pred" in block:
            assert scope.pop("y_pred").shape == (10,)
            assert scope.pop("intervals").shape == (10, 2, 2)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_and_names_that_documents_mention_exist(document):
    import fullcp

    text = (README.parent / document).read_text()
    for link in re.findall(r"\]\(([^)h][^)]*)\)", text):
        assert (README.parent / link).exists(), link
    for name in re.findall(r"`(\w+Regressor)", text):
        assert hasattr(fullcp, name), name
    targets = set(re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
