"""A reference that an audit trains itself, on some of the held-out images, before it asks anything.

    OUT/reference_model/    the training, and the model: see `training.reference`

The images are drawn by the audit's seed, so that one that remains and an innocent candidate stand in the same relation
to the reference: neither trained it, nor did any image that belongs together with them.
"""

import numpy as np

from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.images import FEWEST_IMAGES
from dime_jax.data import Split
from dime_jax.data.groups import ALONE
from dime_jax.data.role_checks import CheckedImages
from dime_jax.loading.opening import OpenedModel, open_model
from dime_jax.protocol import stages, statistics
from dime_jax.protocol.options import ReferenceOptions

PLACE = "reference_model"


def train_beside(config: AuditConfig, model: OpenedModel, images: CheckedImages) -> tuple[CheckedImages, OpenedModel]:
    """Train the reference of an audit, or finish that; returns the images without those that train it, and the model.

    Raises:
      ValueError: in one line, before anything is trained, if too few held-out images would be left or the directory
        holds another audit; and as `training.train_reference`.
    """
    from dime_jax.training import train_reference  # needs the extra `train`

    heldout, place = images.split.heldout, config.directory / PLACE
    if not place.exists() and (stages.is_begun(config.directory) or statistics.exist(config.directory)):
        raise ValueError(f"{config.directory} holds another audit: choose another directory")
    chosen = draw_whole_groups(images, config.reference_images, config.seed)
    rest = np.setdiff1d(heldout, chosen)
    if len(rest) < FEWEST_IMAGES:
        raise ValueError(
            f"--reference {config.reference} must leave at least {FEWEST_IMAGES} held-out images, got {len(rest)} of "
            f"{len(heldout)} that are usable and not copies"
        )
    options = ReferenceOptions(size=config.reference_size, seed=config.seed)
    trained = train_reference(model, images.source, place, options, indices=chosen, silent=config.options.silent)
    reference = open_model(trained, say=config.options.say)
    reference.denoiser.name = PLACE
    reference.denoiser.release()
    origin = f"trained on {len(chosen):,} of the held-out images"
    return images._replace(split=Split(images.split.member, rest)), reference._replace(origin=origin)


def draw_whole_groups(images: CheckedImages, count: int, seed: int) -> np.ndarray:
    """Draw up to so many held-out images, int64 in ascending order: whole groups, and none with members or candidates.

    Args:
      images: of the audit.
      count: the most to draw; fewer only if the groups do not add up to that.
      seed: of the order in which images and groups are taken as long as they fit.
    """
    heldout, members = images.split.heldout, images.split.member
    groups, others = images.groups[heldout], images.groups[np.concatenate([members, images.candidates])]
    unit = np.where(groups == ALONE, -2 - np.arange(len(heldout)), groups)  # an image on its own is one, too
    free = np.setdiff1d(unit, others)
    chosen: list[int] = []
    for one in np.random.default_rng(seed).permutation(free):
        together = heldout[unit == one]
        if len(chosen) + len(together) <= count:
            chosen.extend(together.tolist())
        if len(chosen) == count:
            break
    return np.array(sorted(chosen), np.int64)
