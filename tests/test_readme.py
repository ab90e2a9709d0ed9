"""The README's example runs as printed."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_example_runs(example, capsys):
    names: dict = {}
    exec(example, names)
    assert names["result"].auc.low > 0.95
    assert names["model"].queries.count == 11_000
    assert "Estimate" in capsys.readouterr().out
