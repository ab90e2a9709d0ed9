"""The attack experiment end to end on a model that it makes itself."""

import json

from experiments import attack
from experiments.configs.digits_attack import get_config


def test_smoke_needs_only_a_workdir(tmp_path, capsys):
    attack.main(get_config("smoke"), str(tmp_path / "new"))
    results = json.loads((tmp_path / "new" / "results.json").read_text())
    rows = {(row["attack"], row["queries_per_image"]) for row in results["results"]}
    assert rows == {("loss", 1), ("pia_l4", 2), ("dime", 2)}
    # 30 + 30 images: Loss 1, PIA 2, DIME 1 base response and 2 gammas; 40 + 40: 1 + 2 + 2.
    assert results["queries_made"] == 60 * 6 + 80 * 5
    assert "dime" in capsys.readouterr().out.lower()
    assert attack.run(get_config("smoke"), tmp_path / "new") == results  # nothing is asked or measured again
