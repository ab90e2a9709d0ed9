"""What tables of runs have in common: what a study is called, whether it is the paper's own, where its files are."""

import pathlib

from dime_jax.protocol import pipeline
from experiments import paper_values
from experiments.runs import Row, Run

METRICS = {"asr": "ASR", "auc": "AUC", "tpr_at_1pct_fpr": "TPR@1%FPR"}
DATASETS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "stl10u": "STL10-U",
    "celeba": "CelebA",
    "imagenet256": "ImageNet",
    "dp_celeba": "CelebA under DP-SGD",
    "dp_digits": "Digits under DP-SGD",
    "digits": "Digits",
    "latent_digits": "A latent model of digits with captions",
}
PAPERS_TABLES = {
    **dict.fromkeys(("cifar10", "cifar100", "stl10u", "celeba"), "Table 1"),
    "imagenet256": "Table 2",
    "dp_celeba": "Table 3",
}
# Variants whose setting is the paper's: for ImageNet that includes the scrambled labels of its held-out images, for
# DP-SGD two recipes.
PAPER_VARIANTS = {"imagenet256": "as_published", "dp_celeba": "as_published"}


def heading(run: Run, papers_setting: bool) -> str:
    """What a study is called; a table of the paper is named only over its own setting."""
    dataset = DATASETS.get(run.study, run.study)
    return f"{PAPERS_TABLES[run.study]}, {dataset}" if papers_setting else dataset


def is_papers_setting(run: Run) -> bool:
    """Whether the paper's values belong beside this run's.

    Its config must be the paper's, and its checkpoint the published one where that one's fingerprint is known.
    """
    known = paper_values.FINGERPRINTS.get(run.study)
    same_model = known in (None, run.results.fingerprints["model"])
    return run.variant == PAPER_VARIANTS.get(run.study, "paper") and run.is_unchanged and same_model


def where(directory: pathlib.Path, page: pathlib.Path) -> str:
    """A link if the run lies near the page, else where the commands put it."""
    beside = page.resolve().parent
    if directory.resolve().is_relative_to(beside):
        path = directory.resolve().relative_to(beside).as_posix()
        return f"[calibration]({path}/calibration), [test]({path}/test)"
    return "`W/attack/calibration`, `W/attack/test`"


def settings(run: Run) -> str:
    """The frozen setting of every row, in one line."""
    return "; ".join(f"{row.title}: {setting(row)}" for row in run.rows)


def at_edge(run: Run) -> list[str]:
    """Rows whose timestep is the first or last of their grid, where a wider one might have done better."""
    times: dict[str, set[float]] = {}
    for job in pipeline.read_jobs(run.directory):
        times.setdefault(job.attack.name, set()).add(job.setting.get("t", 0))
    return [
        row.title
        for row in run.rows
        if row.calibration.setting.get("t", 0) in (min(times[row.attack]), max(times[row.attack]))
        and len(times[row.attack]) > 1
    ]


def setting(row: Row) -> str:
    """A frozen setting: "t=50 gamma=0.4"."""
    return " ".join(f"{name}={value:g}" for name, value in row.result.setting.items())
