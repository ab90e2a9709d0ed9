"""The images of an audit: opened, drawn and checked as its settings say."""

import functools
import pathlib

import numpy as np

from dime_jax import data
from dime_jax.auditing.config import AuditConfig
from dime_jax.auditing.models import trained_on
from dime_jax.core.denoiser import Denoiser
from dime_jax.data import Halves, Source, Split
from dime_jax.data.role_checks import CheckedImages, check_roles
from dime_jax.data.roles import Named, Roles, open_roles, with_captions, with_labels
from dime_jax.loading import model_directory
from dime_jax.protocol.options import EXAMPLE
from dime_jax.remote.options import SERVED

FEWEST_IMAGES = 20  # with 19 held-out images no p-value is below 0.05


def open_images(config: AuditConfig, denoiser: Denoiser) -> CheckedImages:
    """Open, join and check the images of an audit; writes unusable_images.csv into its directory if there are any.

    Raises:
      ValueError: as `data.role_checks.check_roles`; and for fewer than 20 images of a side, or missing labels.
    """
    roles = _open(config, denoiser)
    *half_sizes, _, every = config.sizes()
    # Both halves get as many images, so nothing beyond twice the larger half is used; finding duplicates takes time.
    # But candidates are compared with every held-out image there is: each makes their p-values finer.
    halved = len(roles.split.member) and None not in half_sizes
    enough = 2 * max(size for size in half_sizes if size is not None) if halved else None
    heldout = None if enough is None or (every and len(roles.candidates)) else enough + config.reference_images
    split = Split(_draw(roles.split.member, enough, config.seed), _draw(roles.split.heldout, heldout, config.seed))
    images = _check(config, denoiser, roles._replace(split=split))
    _check_counts(images.split, members_known=len(split.member) > 0)
    return images


def open_as_given(config: AuditConfig, denoiser: Denoiser) -> tuple[CheckedImages, Halves]:
    """The images of a run that keep the roles they were given, copies or not, and their halves, which are checked.

    What the reference was trained on is held out no more.
    """
    roles = _open(config, denoiser)
    halves = cut(config, roles.split, roles.source, roles.source.identities)
    images = _check(config, denoiser, roles._replace(split=halves.together()), as_given=True)
    dropped = np.setdiff1d(halves.together().heldout, images.split.heldout)
    split, *kept = (Split(one.member, one.heldout[~np.isin(one.heldout, dropped)]) for one in (roles.split, *halves))
    return images._replace(split=split), Halves(*kept)


def cut(config: AuditConfig, split: Split, source: Source, groups: np.ndarray | None) -> Halves:
    """The halves of a split, as large as the settings say; a group of images is never cut."""
    sizes = config.sizes()
    return data.halves(
        split,
        source.ids,
        seed=config.seed,
        groups=groups,
        calibration_size=sizes.calibration_size,
        test_size=sizes.test_size,
    )


def _open(config: AuditConfig, denoiser: Denoiser) -> Roles:
    named = Named(config.members, config.heldout, config.images, config.split, config.candidates)
    example = functools.partial(example_split, folder=_folder(config), fingerprint=denoiser.fingerprint)
    roles = open_roles(named, denoiser.image_shape, example, config.seed, config.members_known)
    source = with_labels(roles.source, config.labels, denoiser.name, denoiser.num_classes)
    return roles._replace(source=with_captions(source, config.captions, denoiser.name, denoiser.takes_text))


def _check(config: AuditConfig, denoiser: Denoiser, roles: Roles, as_given: bool = False) -> CheckedImages:
    named = [role for role in roles.by_name() if getattr(config, role) is not None]
    apart, unknown = trained_on(config)
    images = check_roles(
        roles, denoiser.image_shape, config.directory, named=named, groups=config.groups, as_given=as_given, apart=apart
    )
    return images._replace(warnings=[*images.warnings, *unknown])


def _folder(config: AuditConfig) -> pathlib.Path | None:
    """Where the model's weights lie, or its one LoRA."""
    if not config.use.lora:
        return None if isinstance(config.model, Denoiser) else pathlib.Path(config.model)
    adapter = model_directory.find_adapter(config.use.lora[0])
    return None if len(config.use.lora) > 1 else adapter if adapter.is_dir() else adapter.parent


def example_split(source: Source, folder: pathlib.Path | None, fingerprint: str) -> Split:
    """Who is a member of the digits: as the split beside the weights says; the shipped model is known by heart.

    Beside a LoRA, members are what it was trained on, and held-out images what neither it nor its base has seen.

    Raises:
      ValueError: for other models, of which nobody knows.
    """
    shipped = model_directory.SHIPPED / EXAMPLE
    if folder is not None and (folder / "split.npz").is_file():
        return data.read_split(folder / "split.npz", source)
    if fingerprint.removeprefix(SERVED) != model_directory.read_spec_file(shipped)["fingerprint"]:
        raise ValueError(
            "heldout must be given, and members if you know any: no split.npz beside the model tells them apart"
        )
    return data.read_split(shipped / "split.npz", source)


def _draw(side: np.ndarray, size: int | None, seed: int) -> np.ndarray:
    if size is None or len(side) <= size:
        return side
    return np.sort(np.random.default_rng(seed).choice(side, size, replace=False))


def _check_counts(split: Split, members_known: bool) -> None:
    for side, name in ((split.member, "members"), (split.heldout, "held-out images")):
        if len(side) < FEWEST_IMAGES and (name != "members" or members_known):
            raise ValueError(f"{name} must be at least {FEWEST_IMAGES}, got {len(side)} that are usable and not copies")
