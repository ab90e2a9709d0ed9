"""The PyTorch example of docs/audit_function.md, run as it is printed."""

import pathlib
import re

import pytest

from dime_jax.scoring import score_table

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "audit_function.md"


@pytest.mark.parity
def test_the_pytorch_example_runs_as_printed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})
    assert "No sign that this model remembers" in capsys.readouterr().out
    for half in ("calibration", "test"):  # what the page says it costs
        table = score_table.read_table(tmp_path / "out" / "torch" / half)
        assert table.queries_made == 11 * len(table.index)
