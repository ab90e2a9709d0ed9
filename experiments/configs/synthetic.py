"""Synthetic studies of the closed-form denoiser (paper, appendix "Synthetic Visualizations", and its Figure 1).

    python -m experiments.synthetic --config=experiments/configs/synthetic.py --workdir=out/synthetic

Takes under two minutes on two cores (about 90 s of CPU time); `:smoke`, for tests, under half a minute.

Expected outcome, seed 0:

* the crowded non-member's crowding passes 0.02 at t = 6, the member's and the biased non-member's at t = 295 and 298;
* AUC averaged over noise levels, DIME / SimA-MC on the same queries / SimA-MC on Gaussian queries:
  0.928 / 0.914 / 0.848 for n = 10, q = 10; 0.744 / 0.699 / 0.646 for n = 1000, q = 10; and for n = 100
  0.825 / 0.779 / 0.703 at q = 1, 0.841 / 0.803 / 0.741 at q = 10, 0.842 / 0.802 / 0.737 at q = 30;
* DIME's lead does not grow with noise throughout: it is 0 where all attacks are perfect, peaks at middle noise (later
  for smaller n) and vanishes where all are at chance.

Data of the attack study: 8 Gaussian clusters of standard deviation 0.3 in 4 dimensions, centres from N(0, I), so that
most points have close neighbours. Norms are l2 in both methods, so that on the same queries SimA-MC is B̂ itself and
all of DIME's lead is due to the crowding term.
"""

from ml_collections.config_dict import ConfigDict

from dime_jax._util import validate


def get_config(variant: str = "paper") -> ConfigDict:
    """The paper's panels, or with "smoke" the attack study at a size that takes seconds."""
    validate.check_choice(variant, ("paper", "smoke"), "variant")
    config = ConfigDict()
    config.seed = 0

    # Three candidates in the plane. The member and the biased candidate's neighbour lie alone; the crowded candidate
    # sits almost at the centre of a ring of training points.
    config.scene = ConfigDict()
    config.scene.update(member=(-3.0, -1.5), neighbour=(3.0, -1.5), biased=(3.8, -1.0), crowded=(0.03, 2.52))
    config.scene.update(ring_center=(0.0, 2.5), ring_radius=0.5, ring_points=7)
    config.scene.update(last_t=300, three_cases_t=60)
    config.scene.rise = 0.02  # crowding counts as risen above this

    # Points on a line.
    config.line = ConfigDict()
    config.line.train = ((-1.0, 1.0), (-2.0, 0.0, 2.0), (-4.2, -3.5, -3.0, -2.4, -1.9, 2.0, 2.5, 3.1, 3.6, 4.1))
    config.line.abar = (0.99, 0.9, 0.6, 0.2)
    config.line.margin = 1.5  # how far the plot goes beyond the outermost training points
    config.line.resolution = 801

    # DIME against SimA-MC on a mixture of Gaussian clusters, whose centres are drawn once from N(0, I).
    config.attack = ConfigDict()
    config.attack.update(sizes=(10, 100, 1000), fixed_q=10, budgets=(1, 10, 30), fixed_n=100)
    config.attack.update(dimension=4, clusters=8, gamma=0.4)
    config.attack.width = 0.3  # standard deviation of a cluster
    config.attack.timesteps = (5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 450)
    # At least this many of each in the calibration half and in the test half, pooled over independent training sets.
    config.attack.update(members=500, heldout=2000)

    if variant == "smoke":
        config.attack.update(sizes=(10,), fixed_q=2, budgets=(1, 2), fixed_n=10, timesteps=(5, 50, 200))
        config.attack.update(members=60, heldout=240)
    return config.lock()
