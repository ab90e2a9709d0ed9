"""The results page from a folder of finished work, and its figures: what `experiments.tables --kept` writes.

    STUDY/seed_N/...                  W/seed_N/attack of `experiments.attack`, a model each
    STUDY/seed_N/ARM/attack/...       W/seed_N of `experiments.dp_defense`, without weights and states
    STUDY/.../progress.json           of `experiments.progress`
    synthetic/dataset_size.json, query_budget.json      of `experiments.synthetic`
    .../ideal_gap.json                of `experiments.figures --model`

Nothing on the page comes from anywhere else, so a run that is put there, or taken out, changes the page alone.
"""

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dime_jax._util import files, records
from dime_jax.evidence.metrics import Estimate
from dime_jax.report import figures
from experiments import markdown, model_figures, progress, synthetic, tables
from experiments.attack import CONFIG_FILE
from experiments.runs import read_run

_DPI = 130
_ATTACKED = 200  # attacks on small models choose timesteps up to here


class Drawing(NamedTuple):
    """A kind of kept file: its type, how it is drawn, and what the page says about it."""

    kind: object
    draw: Callable[..., Figure]
    to_section: Callable[..., str]


class Kept(NamedTuple):
    """What a folder of finished work holds.

    Attributes:
      runs: of `experiments.attack`.
      dp_studies: workdirs of `experiments.dp_defense`.
      drawn: other files, with what is made of them.
    """

    runs: list[pathlib.Path]
    dp_studies: list[pathlib.Path]
    drawn: list[tuple[pathlib.Path, Drawing]]


def find_kept(folder: pathlib.Path) -> Kept:
    """Everything below a folder, by name."""
    runs, studies = [], dict[pathlib.Path, None]()
    for file in sorted(folder.rglob(CONFIG_FILE)):
        record = json.loads(file.read_text(encoding="utf-8"))
        if "dp" in record.get("config", {}):
            studies[file.parents[2]] = None  # STUDY/ARM/attack/config.json
        elif "file" in record:
            runs.append(file.parent)
    drawn = [(file, drawing) for name, drawing in DRAWINGS.items() for file in sorted(folder.rglob(f"{name}.json"))]
    return Kept(runs, list(studies), drawn)


def to_page(folder: pathlib.Path, page: pathlib.Path) -> str:
    """The results page of all that a folder holds.

    Args:
      folder: see the module.
      page: where it will be written, for links from there.
    """
    kept = find_kept(folder)
    found = [tables.make_table(read_run(run)) for run in kept.runs]
    sections = [tables.results_page(found, page), *tables.dp_sections(kept.dp_studies, page)]
    for file, drawing in kept.drawn:
        picture = file.with_suffix(".png").resolve().relative_to(page.resolve().parent).as_posix()
        sections.append(drawing.to_section(_read(file, drawing), picture))
    return "\n".join(sections)


def write_page(folder: pathlib.Path, page: pathlib.Path) -> None:
    """Write the page, and draw the figures that it shows beside their numbers."""
    with figures.style(**{"savefig.dpi": _DPI}):
        for file, drawing in find_kept(folder).drawn:
            drawing.draw(_read(file, drawing)).savefig(file.with_suffix(".png"))
    files.write_atomically(page, to_page(folder, page).encode())


def _read(file: pathlib.Path, drawing: Drawing) -> object:
    return records.parse(drawing.kind, json.loads(file.read_bytes()), str(file))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ the synthetic studies

_SYNTHETIC = """\
The ideal denoiser of Gaussian clusters in closed form (`experiments.synthetic`): test points are pooled over
independent training sets, so the paired intervals are about points and training sets of this kind. Both methods take
l2 norms, so that SimA-MC on DIME's own queries *is* DIME's level, and the first lead is what crowding adds. Leads in
points of AUC; ASR leads are differences of the two maxima, without interval.

```
python -m experiments.synthetic --config=experiments/configs/synthetic.py --workdir=W
```

The numbers are `dataset_size.json` and `query_budget.json`, beside the figures; `config.json` has every value, and the
seed.
"""


def dataset_size_section(panels: Sequence[synthetic.Panel], picture: str) -> str:
    """The three questions in closed form, over the size of the training set."""
    return _synthetic_section("## The closed form: more training points\n", panels, picture, lambda p: f"n = {p.n}")


def query_budget_section(panels: Sequence[synthetic.Panel], picture: str) -> str:
    """The same over the number of queries."""
    return _synthetic_section("## The closed form: more queries\n", panels, picture, lambda p: f"q = {p.q}")


def _synthetic_section(
    title: str, panels: Sequence[synthetic.Panel], picture: str, name: Callable[[synthetic.Panel], str]
) -> str:
    header = ["", "mean lead", "largest lead", "lead at most noise", "rank correlation with noise", "ASR behind at"]
    return "\n".join(
        [
            title,
            _SYNTHETIC,
            f"![AUC, ASR and TPR over noise]({picture})\n",
            _peaks(panels, name),
            "#### Does crowding help? DIME against its level\n",
            markdown.table(header, [_lead_row(name(panel), panel, "sima_mc_shared") for panel in panels]),
            "#### Is DIME ahead of the baseline? Against SimA-MC on Gaussian queries\n",
            markdown.table(header, [_lead_row(name(panel), panel, "sima_mc_gaussian") for panel in panels]),
            "#### How do results hold over the noise? DIME against its level\n",
            markdown.table(["t", "ᾱ", *map(name, panels)], list(_by_noise(panels))),
        ]
    )


def _peaks(panels: Sequence[synthetic.Panel], name: Callable[[synthetic.Panel], str]) -> str:
    """Where the lead is largest, in a sentence."""
    peaks = [int(np.argmax([lead.value for lead in panel.auc_lead])) for panel in panels]
    inside = all(peak < len(panel.t) - 1 for peak, panel in zip(peaks, panels))
    where = ", ".join(f"t = {panel.t[peak]} for {name(panel)}" for peak, panel in zip(peaks, panels))
    words = "not at the highest noise, but at middle noise" if inside else "here"
    return f"The lead over the level is largest {words}: at {where}.\n"


def _lead_row(name: str, panel: synthetic.Panel, rival: str) -> list[str]:
    leads = panel.auc_lead if rival == "sima_mc_shared" else panel.gaussian_lead
    values = [lead.value for lead in leads]
    peak = int(np.argmax(values))
    behind = [panel.t[level] for level, lead in enumerate(asr_leads(panel, rival)) if lead < 0]
    correlation = synthetic.noise_correlation(values, panel.sigma)
    return [
        name,
        f"{100 * np.mean(values):+.1f}",
        f"{markdown.percent(leads[peak], '+')} at t = {panel.t[peak]} (ᾱ = {panel.abar[peak]:.3f})",
        f"{markdown.percent(leads[-1], '+')} at t = {panel.t[-1]}",
        "" if correlation is None else f"{correlation:+.2f}",
        ", ".join(f"t = {t}" for t in behind) or "no t",
    ]


def asr_leads(panel: synthetic.Panel, rival: str) -> list[float]:
    """DIME's ASR minus the rival's at each noise level."""
    return [ours.value - theirs.value for ours, theirs in zip(panel.curves["dime"].asr, panel.curves[rival].asr)]


def _by_noise(panels: Sequence[synthetic.Panel]) -> Iterator[list[str]]:
    for level, t in enumerate(panels[0].t):
        leads: list[Estimate] = [panel.auc_lead[level] for panel in panels]
        yield [str(t), f"{panels[0].abar[level]:.3f}", *(markdown.percent(lead, "+") for lead in leads)]


# ---------------------------------------------------------------------------------------------- distance from the ideal

_GAP = """\
How far is a trained network from the object that the theory is about, the ideal denoiser of its own training set? The
paper leaves it open. Here is our answer for the digits model, fingerprint `{model}`, at {images} members and {images}
held-out images, against the ideal denoiser of its {train} members: RMS of the difference of ε per value, at noised
members (the root of the loss in excess of the least possible) and at √ᾱ x, where DIME asks; the median crowding V/(d
σ²) of both; and Spearman's rank correlation between network and ideal over all images.

```
python -m experiments.figures --model --output=W
```
"""


def ideal_gap_section(gap: model_figures.IdealGap, picture: str) -> str:
    """How far the network is from the ideal, in ε and in crowding."""
    header = ["t", "RMS, noised members", "members", "held-out"]
    header += [f"crowding of {side}, network / ideal" for side in ("members", "held-out")]
    header += ["rank correlation of the level", "of crowding"]
    rows = []
    for place, t in enumerate(gap.t):
        errors = [gap.noised_error, gap.image_error["member"], gap.image_error["heldout"]]
        crowding = [
            f"{gap.crowding['network'][side][place]:.3f} / {gap.crowding['ideal'][side][place]:.2g}"
            for side in ("member", "heldout")
        ]
        ranks = [gap.rank_correlation[name][place] for name in ("level", "crowding")]
        rows.append(
            [
                str(t),
                *(f"{error[place]:.3f}" for error in errors),
                *crowding,
                *("" if rank is None or np.isnan(rank) else f"{rank:+.2f}" for rank in ranks),
            ]
        )
    words = _GAP.format(model=gap.model[:16], images=gap.images, train=gap.train)
    return "\n".join(
        [
            "## How far is a trained network from the ideal denoiser?\n",
            words,
            f"![distance from the ideal denoiser over t]({picture})\n",
            markdown.table(header, rows),
            _ranks(gap),
        ]
    )


def _ranks(gap: model_figures.IdealGap) -> str:
    """How far the network ranks images as the ideal does, at the noise levels that attacks use, in a sentence."""
    ranges = []
    for name, words in (("crowding", "crowding"), ("level", "the level")):
        ranks = [rank for t, rank in zip(gap.t, gap.rank_correlation[name]) if t <= _ATTACKED and rank is not None]
        finite = [rank for rank in ranks if np.isfinite(rank)]
        ranges.append(f"that of {words} between {min(finite):+.2f} and {max(finite):+.2f}" if finite else "")
    return f"Rank correlations with the ideal up to t = {_ATTACKED}: {' and '.join(filter(None, ranges))}.\n"


DRAWINGS = {
    "progress": Drawing(progress.TrainingProgress, progress.draw, progress.to_section),
    "dataset_size": Drawing(list[synthetic.Panel], synthetic.draw_attack_panels, dataset_size_section),
    "query_budget": Drawing(list[synthetic.Panel], synthetic.draw_attack_panels, query_budget_section),
    "ideal_gap": Drawing(model_figures.IdealGap, model_figures.draw_ideal_gap, ideal_gap_section),
}
