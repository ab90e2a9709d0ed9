"""Does an audit without known members accuse pictures that the model never saw, because somebody changed them?

    python -m experiments.changed_innocents --config=experiments/configs/cifar10.py:overnight --workdir=W ...

asks a trained model of a study about never-seen images as they are, and about others of them changed in seven ways, by
the three queries of `attacks.loss_level`. It prints, and writes to WORKDIR/changed/changed.json,

1. which share of them has a p-value of at most 5 % or 1 %, by kind: plain, and after what the picture explains, as
   fitted to other never-seen images and then frozen;
2. what random audits say, `--audits` of each mix, in which the kinds take turns: 40 candidates, of which 4 or all are
   changed in one way and none is a member, beside 300 held-out images, at a false discovery rate of 5 %. How many
   withhold all verdicts, since the candidates are another kind of picture than the held-out images; which share of the
   changed images is not judged for that reason; and how many audits name a changed image.

With fewer than 1,500 never-seen images, a third is changed. Takes about ten minutes.
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np
from absl import flags
from ml_collections.config_dict import ConfigDict
from PIL import ImageEnhance, ImageFilter

from dime_jax import data, evidence, scoring
from dime_jax._util import files, records
from dime_jax.attacks import get_attack
from dime_jax.data.roles import own_transforms
from dime_jax.data.variations import ORIGINAL, VARIATIONS, Change, encoded, varied
from dime_jax.evidence import Pile
from dime_jax.findings import withholding
from dime_jax.protocol import calibration, stages, statistics
from dime_jax.protocol.calibration import Calibration
from dime_jax.protocol.statistics import Statistics
from dime_jax.scoring.planning import Job
from dime_jax.scoring.score_table import ScoreTable
from experiments.attack import load_model
from experiments.fresh_models import every_heldout
from experiments.launch import launch
from experiments.study_data import open_study

FITTED, HELDOUT, CANDIDATES, FEW, LEVEL = 300, 300, 40, 4, 0.05
LIMITS = (0.05, 0.01)
_MOST = 1500

CHANGES: dict[str, Change] = {
    ORIGINAL: lambda image: image,
    "JPEG 75": lambda image: encoded(image, 75),
    "JPEG 40": lambda image: encoded(image, 40),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(0.7)),
    "resized": VARIATIONS["at half its size"],
    "mirrored": VARIATIONS["mirrored"],
    "dimmed": lambda image: ImageEnhance.Brightness(image).enhance(0.8),
    "sharpened": lambda image: image.filter(ImageFilter.SHARPEN),
}
KINDS = tuple(name for name in CHANGES if name != ORIGINAL)


class Places(NamedTuple):
    """Where never-seen images are: those that are only used as they are, and then every version of the others.

    Attributes:
      unchanged: how many there are of the former.
      changed: how many there are of the latter.
    """

    unchanged: int
    changed: int

    def of(self, kind: str) -> np.ndarray:
        """Return where the others are, changed in one way, or as they are."""
        return self.unchanged + list(CHANGES).index(kind) * self.changed + np.arange(self.changed)


class Asked(NamedTuple):
    """Never-seen images, and what the model answered about them.

    Attributes:
      places: of the images.
      frozen: the rule of three queries.
      table: its answers.
      pictures: statistics that say how hard pictures are.
      likeness: statistics [n, k] by which a kind of pictures is told.
    """

    places: Places
    frozen: Calibration
    table: ScoreTable
    pictures: Statistics
    likeness: np.ndarray

    @property
    def pile(self) -> Pile:
        """The scores of the rule, and the statistics to fit them to."""
        everything, frozen = np.arange(len(self.likeness)), calibration.to_adjust(self.frozen)
        return frozen.pile(stages.terms_of(self.table, frozen, everything), self.pictures.of(everything))


class Audited(NamedTuple):
    """What one audit says: whether it withholds all verdicts, and which changed images it judges and which it names."""

    withheld: bool
    judged: np.ndarray
    named: np.ndarray


def versions(source: data.Source, images: np.ndarray) -> tuple[data.Source, Places]:
    """Make a source of some images, the first third of them in every version."""
    changed = len(images) // 3
    of_each, places = np.arange(len(images)) * len(CHANGES), Places(len(images) - changed, changed)
    used = [of_each[changed:], *(of_each[:changed] + kind for kind in range(len(CHANGES)))]
    return varied(source, images, CHANGES).take(np.concatenate(used)), places


def audit(asked: Asked, pile: Pile, changed: np.ndarray, others: np.ndarray, heldout: np.ndarray, seed: int) -> Audited:
    """Judge candidates as `findings.candidates` does.

    Args:
      asked: the images.
      pile: of all of them.
      changed: places of the candidates that are changed; what is said of these is returned.
      others: places of the other candidates.
      heldout: places of the held-out images.
      seed: of what is drawn at random.
    """
    candidates = np.concatenate([changed, others])
    likeness = evidence.likeness(asked.likeness[candidates], asked.likeness[heldout], seed=seed)
    withheld = withholding.unlike_set(likeness) is not None
    judged, p_values = ~likeness.unlike & (not withheld), np.full(len(candidates), np.nan)
    first = np.arange(len(candidates)) < len(changed)
    for part in (judged & first, judged & ~first):
        piles = pile.take(candidates[part]), pile.take(heldout)
        p_values[part] = evidence.difficulty_p_values(*piles[0][:2], *piles[1][:2], combine=asked.frozen.combine)
        if not np.any(p_values <= LEVEL):
            break  # no image whose p exceeds the level is named, whatever the others' p
    named = evidence.candidate_verdicts(p_values, len(heldout), LEVEL).rejected
    return Audited(withheld, judged[first], named[first])


def random_audits(asked: Asked, changed: int, count: int, seed: int) -> dict[str, records.Json]:
    """Run audits in which some candidates are changed; return them by kind, and all together.

    Args:
      asked: the images.
      changed: how many candidates are; the others are as they are, and none is a member.
      count: how many audits; the kinds take turns.
      seed: of all draws.
    """
    rng, turns = np.random.default_rng(seed), np.arange(count) % len(KINDS)
    columns, pile = np.empty((count, 3)), asked.pile
    for number, turn in enumerate(turns):
        unchanged = rng.permutation(asked.places.unchanged)[: HELDOUT + CANDIDATES - changed]
        chosen = rng.choice(asked.places.of(KINDS[turn]), changed, replace=False)
        said = audit(asked, pile, chosen, unchanged[HELDOUT:], unchanged[:HELDOUT], number)
        columns[number] = said.withheld, 1 - said.judged.mean(), said.named.any()
    by_kind = {kind: columns[turns == turn] for turn, kind in enumerate(KINDS)}
    return {kind: _summary(rows) for kind, rows in {"all kinds": columns, **by_kind}.items() if len(rows)}


def _summary(rows: np.ndarray) -> records.Json:
    withheld, not_judged, names = rows.T
    return {
        "audits": len(rows),
        "withheld": int(withheld.sum()),
        "share_of_changed_not_judged": float(not_judged.mean()),
        "name_a_changed_image": int(names.sum()),
    }


def below_limits(asked: Asked) -> dict[str, records.Json]:
    """Return the share of images with a p-value up to each limit, by kind: plain, and after what the picture explains.

    What the picture explains is fitted to the first unchanged images; the others are those that p-values compare with.
    """
    fitted, compared = np.arange(FITTED), np.arange(FITTED, asked.places.unchanged)
    table, pictures = asked.table, asked.pictures

    def shares(frozen: Calibration) -> dict[str, records.Json]:
        beside = stages.frozen_scores(table, frozen, compared, pictures)
        scores = {kind: stages.frozen_scores(table, frozen, asked.places.of(kind), pictures) for kind in CHANGES}
        p_values = {kind: evidence.conformal_p_values(of_kind, beside) for kind, of_kind in scores.items()}
        return {kind: [float(np.mean(p <= limit)) for limit in LIMITS] for kind, p in p_values.items()}

    found: dict[str, records.Json] = {}
    for name, job in _jobs(asked.frozen).items():
        plain = calibration.fixed_rule(job.attack, table.schedule, job.setting)
        adjusted = calibration.adjust(plain, stages.terms_of(table, plain, fitted), pictures.of(fitted))
        found |= {name: shares(plain)} if job.label != asked.frozen.label else {}
        found[f"{name}, adjusted"] = shares(adjusted)
    return found


def _jobs(frozen: Calibration) -> dict[str, Job]:
    """The rule, and readings of its answers alone."""
    setting = frozen.setting
    level = {"t": setting["t_level"], "gamma": setting["gamma_level"], "q": 1}
    return {
        "loss": Job(get_attack("loss_mc"), {"t": setting["t_loss"], "q": 2}),
        "level": Job(get_attack("level_only"), level),
        "rule": stages.frozen_job(frozen),
    }


def ask(config: ConfigDict, workdir: str | pathlib.Path) -> Asked:
    """Ask a model of a study about images that it never saw."""
    directory, study = pathlib.Path(workdir) / "changed", open_study(config, workdir)
    denoiser = load_model(config, pathlib.Path(workdir), study)
    source = own_transforms(study.source, denoiser.image_shape)
    images = np.random.default_rng(config.seed).permutation(every_heldout(config, workdir))[:_MOST]
    source, places = versions(source, images)
    everything, frozen = np.arange(len(source)), stages.fixed_rule(denoiser.schedule)
    table = scoring.score(
        denoiser,
        source,
        list(_jobs(frozen).values()),
        directory / "table",
        indices=stages.shuffled(everything, config.seed),
        seed=config.seed,
        options=scoring.ScoringOptions(),
    )
    transform = data.transform_for(source, denoiser.image_shape)
    statistics.make(directory, source, everything, transform)
    likeness = evidence.image_statistics(np.stack([transform(source[place].image) for place in range(len(source))]))
    return Asked(places, frozen, table, statistics.read(directory), likeness)


def judge(asked: Asked, audits: int, seed: int) -> dict[str, records.Json]:
    """Return what changed.json holds."""
    return {
        "seed": seed,
        "unchanged": asked.places.unchanged,
        "changed": asked.places.changed,
        "queries_made": asked.table.queries_made,
        "share_with_p_up_to": {"limits": list(LIMITS), **below_limits(asked)},
        "audits": {
            "a few are changed": random_audits(asked, FEW, audits, seed),
            "all are changed": random_audits(asked, CANDIDATES, audits, seed),
        },
    }


def main(config: ConfigDict, workdir: str, config_file: str = "") -> None:
    """Judge a model, write what came out, and print it."""
    found = {"file": config_file, **judge(ask(config, workdir), flags.FLAGS.audits, config.seed)}
    files.write_json(pathlib.Path(workdir) / "changed" / "changed.json", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    flags.DEFINE_integer("audits", 400, "how many random audits of each mix")
    launch(main, "experiments/configs/cifar10.py", many=True)
