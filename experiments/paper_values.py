"""The tables of Do & Alabi, "DIME: Query-Efficient Framework for Membership Inference on Diffusion Models".

paper_values.csv has the rows as printed, in per cent: ASR, AUC, TPR@1%FPR (Table 3 prints the first two as fractions).
Rows are named as our attacks that compute the same statistic: the paper's PIA takes the l2 norm, and its SimA-MC, by
its code, the l4 norm of the mean vector (see docs/REPRODUCTION.md).
"""

import csv
import pathlib
from typing import NamedTuple

_FILE = pathlib.Path(__file__).with_name("paper_values.csv")
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
TABLES = {
    **dict.fromkeys(("cifar10", "cifar100", "stl10u", "celeba"), "Table 1"),
    "imagenet256": "Table 2",
    "dp_celeba": "Table 3",
}
# Variants whose setting is the paper's: for ImageNet that includes the scrambled labels of its held-out images, for
# DP-SGD two recipes.
VARIANTS = {"imagenet256": "as_published", "dp_celeba": "as_published"}


class Published(NamedTuple):
    """One cell group of the paper's tables, in per cent."""

    asr: float
    auc: float
    tpr_at_1pct_fpr: float


# Fingerprints of the models behind the paper's tables, by study: those of the published checkpoints, once converted.
# None is known so far; a run with the paper's config is then taken at its word about its checkpoint.
FINGERPRINTS: dict[str, str] = {}


def heading(study: str, papers_setting: bool) -> str:
    """Return what a study is called; a table of the paper is named only over its own setting."""
    dataset = DATASETS.get(study, study)
    return f"{TABLES[study]}, {dataset}" if papers_setting else dataset


def published(study: str, epsilon: float | None = None) -> dict[tuple[str, int | None], Published]:
    """Return the paper's values for a study by (attack, q), where q is None for attacks of fixed cost.

    Args:
      study: named as its config; the result is empty if the paper has no such study.
      epsilon: the privacy budget of an arm under DP-SGD; None for training without it.
    """
    found = {}
    with _FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["study"] == study and (float(row["epsilon"]) if row["epsilon"] else None) == epsilon:
                values = Published(*(float(row[name]) for name in Published._fields))
                found[row["attack"], int(row["q"]) if row["q"] else None] = values
    return found
