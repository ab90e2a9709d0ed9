"""The tables of Do & Alabi, "DIME: Query-Efficient Framework for Membership Inference on Diffusion Models", as data.

Per cent, as printed: ASR, AUC, TPR@1%FPR. Rows are named as our attacks that compute the same statistic: the paper's
PIA takes the l2 norm, and its SimA-MC, by its code, the l4 norm of the mean vector (see docs/REPRODUCTION.md).
"""

from typing import NamedTuple

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


# (attack, query tier q or None) for each printed row, in order.
ROWS: tuple[tuple[str, int | None], ...] = (
    ("loss", None),
    ("pia_l2", None),
    ("secmi", None),
    ("sima_l4", None),
    ("sima_mc_vector", 10),
    ("sima_mc_vector", 30),
    ("dime", 1),
    ("dime", 10),
    ("dime", 30),
)

# Fingerprints of the models behind the paper's tables, by study: those of the published checkpoints, once converted.
# None is known so far; a run with the paper's config is then taken at its word about its checkpoint.
FINGERPRINTS: dict[str, str] = {}

_TABLE_1 = {
    "cifar10": (
        (77.30, 84.38, 6.59),
        (81.67, 88.58, 14.20),
        (81.45, 88.51, 10.45),
        (83.60, 90.43, 14.07),
        (84.26, 91.34, 16.95),
        (85.15, 92.00, 16.14),
        (84.18, 91.50, 30.88),
        (86.43, 93.35, 47.23),
        (87.30, 93.89, 50.77),
    ),
    "cifar100": (
        (75.31, 82.51, 9.44),
        (79.14, 86.34, 15.26),
        (80.85, 88.05, 13.34),
        (82.40, 89.40, 13.64),
        (83.22, 90.55, 19.03),
        (83.74, 90.99, 18.87),
        (83.00, 90.02, 22.79),
        (85.01, 91.75, 26.93),
        (85.20, 91.92, 24.83),
    ),
    "stl10u": (
        (93.85, 97.95, 52.14),
        (95.28, 98.77, 70.54),
        (93.98, 98.20, 57.76),
        (95.42, 98.61, 62.68),
        (97.25, 99.31, 80.92),
        (96.74, 99.23, 79.84),
        (96.87, 99.39, 86.16),
        (98.65, 99.78, 97.78),
        (98.80, 99.80, 98.00),
    ),
    "celeba": (
        (67.32, 73.50, 5.67),
        (72.63, 80.06, 9.75),
        (71.08, 78.03, 8.64),
        (71.09, 78.21, 8.91),
        (74.33, 82.05, 9.91),
        (75.03, 82.96, 12.91),
        (73.54, 81.02, 11.63),
        (76.67, 84.55, 14.08),
        (78.14, 86.31, 18.78),
    ),
}
_TABLE_2 = (
    (74.62, 80.64, 1.60),
    (67.56, 69.88, 1.07),
    (66.67, 50.59, 0.93),
    (83.84, 86.35, 7.20),
    (84.13, 89.41, 9.33),
    (82.58, 87.45, 1.87),
    (86.45, 92.50, 14.27),
    (86.96, 92.58, 15.27),
    (87.33, 92.65, 15.27),
)
# Table 3 prints ASR and AUC as fractions. Keyed by the privacy budget epsilon, None for training without DP-SGD.
_TABLE_3_ROWS: tuple[tuple[str, int | None], ...] = (
    ("loss", None),
    ("pia_l2", None),
    ("secmi", None),
    ("sima_l4", None),
    ("dime", 10),
)
_TABLE_3 = {
    1: ((53.0, 52.1, 1.00), (52.6, 51.6, 1.60), (51.7, 50.0, 1.80), (51.7, 50.5, 0.40), (52.9, 51.7, 0.40)),
    4: ((53.9, 51.8, 1.40), (50.6, 48.1, 0.60), (52.2, 48.8, 1.20), (51.5, 50.2, 0.20), (52.5, 51.5, 1.20)),
    10: ((51.9, 50.9, 1.40), (50.6, 48.3, 0.80), (52.3, 51.9, 1.00), (51.0, 48.9, 1.00), (53.7, 52.9, 0.80)),
    None: ((69.0, 75.4, 10.20), (75.3, 82.9, 15.40), (71.0, 77.7, 13.60), (74.5, 82.7, 16.20), (79.8, 86.9, 22.40)),
}


def heading(study: str, papers_setting: bool) -> str:
    """Return what a study is called; a table of the paper is named only over its own setting."""
    dataset = DATASETS.get(study, study)
    return f"{TABLES[study]}, {dataset}" if papers_setting else dataset


def published(study: str, epsilon: float | None = None) -> dict[tuple[str, int | None], Published]:
    """The paper's values for a study, which is named as its config, by (attack, q); empty if it has none."""
    if study == "dp_celeba":
        return _rows(_TABLE_3_ROWS, _TABLE_3.get(None if epsilon is None else int(epsilon), ()))
    return _rows(ROWS, _TABLE_2 if study == "imagenet256" else _TABLE_1.get(study, ()))


def _rows(
    names: tuple[tuple[str, int | None], ...], values: tuple[tuple[float, float, float], ...]
) -> dict[tuple[str, int | None], Published]:
    return {name: Published(*row) for name, row in zip(names, values)}
