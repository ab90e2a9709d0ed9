"""What adjusted p-values are worth on somebody else's model: random audits with published scores.

    python -m experiments.public_scores --scores=SCORES.npz --source=cifar10:DIR [--audits=400] [--seed=0]

SCORES.npz holds a score for each image of the source, in its order (`t_error`, lower for members), and who is a member
(`member`), such as those of SecMI for CIFAR-10. Each audit draws 40 candidates, half of them members, and 100 or 300
held-out images, and names candidates at a false discovery rate of 5 %, by plain and by adjusted p-values. Nothing is
asked of any model. 400 audits take about five minutes.
"""

import json
from collections.abc import Mapping

import numpy as np
from absl import flags

from dime_jax import data, evidence
from dime_jax._util import records
from dime_jax.protocol import statistics
from experiments.launch import run_app

CANDIDATES, HELDOUT, LEVEL = 40, (100, 300), 0.05


def audits(
    scores: np.ndarray, member: np.ndarray, pictures: np.ndarray, heldout: int, count: int, seed: int
) -> Mapping[str, records.Json]:
    """Return the share of members that are named, and of false names, over random audits.

    Args:
      scores: of all images [n], positive, lower for members.
      member: who is one, bool [n].
      pictures: statistics [n, k].
      heldout: how many held-out images an audit has.
      count: how many audits.
      seed: of all draws.
    """
    rng, logs = np.random.default_rng(seed), np.log(scores)
    named: dict[str, list[float]] = {"plain": [], "adjusted": []}
    false: dict[str, list[float]] = {"plain": [], "adjusted": []}
    for _ in range(count):
        inside = rng.choice(np.flatnonzero(member), CANDIDATES // 2, replace=False)
        outside = rng.choice(np.flatnonzero(~member), heldout + CANDIDATES // 2, replace=False)
        known, asked = outside[:heldout], np.concatenate([inside, outside[heldout:]])
        p_values = {
            "plain": evidence.conformal_p_values(logs[asked], logs[known]),
            "adjusted": evidence.difficulty_p_values(logs[asked], pictures[asked], logs[known], pictures[known]),
        }
        for kind, p in p_values.items():
            rejected = evidence.candidate_verdicts(p, heldout, LEVEL).rejected
            named[kind].append(float(np.mean(rejected[: len(inside)])))
            false[kind].append(float(np.sum(rejected[len(inside) :])) / max(1, int(rejected.sum())))
    return {
        kind: {
            "members_named": float(np.mean(named[kind])),
            "false_discovery_rate": float(np.mean(false[kind])),
            "its_standard_error": float(np.std(false[kind]) / np.sqrt(count)),
        }
        for kind in named
    }


def main() -> None:
    """Run the audits that the flags ask for, and print what came out."""
    values, source = np.load(flags.FLAGS.scores), data.open_source(flags.FLAGS.source)
    member = np.asarray(values["member"], bool)
    scores = np.asarray(values["t_error"], np.float64)
    if len(scores) != len(source):
        raise ValueError(f"--scores must have a score for each of the {len(source)} images, got {len(scores)}")
    transform = data.transform_for(source, source[0].image.shape)
    pictures = statistics.of_source(source, np.arange(len(source)), transform)
    for heldout in HELDOUT:
        found = audits(scores, member, pictures, heldout, flags.FLAGS.audits, flags.FLAGS.seed)
        print(json.dumps({"held-out images": heldout, "audits": flags.FLAGS.audits, **found}, indent=1))


if __name__ == "__main__":
    flags.DEFINE_string("scores", None, "an .npz file of t_error and member", required=True)
    flags.DEFINE_string("source", None, "the images, cifar10:DIR", required=True)
    flags.DEFINE_integer("audits", 400, "how many random audits for each number of held-out images")
    flags.DEFINE_integer("seed", 0, "of all draws")
    run_app(main)
