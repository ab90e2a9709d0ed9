"""What can be asked of an audit, each option declared once: flags, record, checks and documentation come from here.

Neither JAX nor NumPy is imported here: `dime-jax --help` needs it.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dime_jax._util.flags import REQUIRED, option

if TYPE_CHECKING:
    from dime_jax.core.denoiser import Denoiser
    from dime_jax.data import Source

    File: TypeAlias = str | os.PathLike[str]
    Model: TypeAlias = str | os.PathLike[str] | Denoiser
    Images: TypeAlias = str | Source
else:  # in the record of an audit all have names
    File = Model = Images = str

EXAMPLE, CAPTIONS = "digits", ("own", "none")
IMAGES, BESIDE, COST, JUDGING = "images", "a second model", "cost", "judging"
NO_REFERENCE, TRAIN, SMALL = "none", "train:", "small"


class Profile(NamedTuple):
    """How much work an audit is: images per class in each half, and query budgets; None for all there is."""

    calibration_size: int | None
    test_size: int | None
    queries: tuple[int, ...] | None  # for each, every attack's largest tier that costs no more
    every_heldout: bool = True  # whether candidates are compared with all held-out images that did not calibrate


# DIME with one probe costs 2 queries. More of them gain little once the difficulty of pictures is out.
PROFILES = {
    "light": Profile(60, 100, (2,), every_heldout=False),
    "quick": Profile(150, 300, (2,)),
    "paper": Profile(500, None, None),
}


@dataclasses.dataclass(frozen=True)
class OutputOption:
    """Where an audit or a comparison is written."""

    output: str | os.PathLike[str] = option(
        REQUIRED, "the directory to write to; an interrupted run in it is resumed", "", "DIR", type=pathlib.Path
    )

    @property
    def directory(self) -> pathlib.Path:
        """The output directory."""
        return pathlib.Path(self.output)


@dataclasses.dataclass(frozen=True)
class ReferenceOptions:
    """How a reference is trained; None for what follows from the number of images and the size of the network."""

    size: str = option(
        "same", "the network: the model's own architecture, or a narrower one for large models", choices=("same", SMALL)
    )
    steps: int | None = option(
        None, "make N updates (default: 96 passes over the images, but 1,000 at least and 5,000 at most)", type=int
    )
    batch_size: int = option(16, "use N images in an update")
    learning_rate: float | None = option(
        None, "Adam's learning rate (default: 0.001, or 0.0002 from 6 million weights on)", type=float
    )
    seed: int = option(0, "the seed of the fresh weights, the order of images and the noise")


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """What is asked of an audit; None means that it is left open. In JSON the options have this order."""

    model: Model = option(
        EXAMPLE,
        "a checkpoint (.pt, .ckpt, .safetensors), a diffusers folder, hf:OWNER/NAME on the Hugging Face Hub, "
        "http(s)://HOST/v2/models/NAME, a model directory, or a model that ships with dime_jax",
        metavar="MODEL",
    )
    members: Images | None = option(
        None, "images the model was trained on: a folder, or KIND:PLACE such as cifar10:DIR", metavar="IMAGES"
    )
    heldout: Images | None = option(None, "similar images that it was not trained on", metavar="IMAGES")
    candidates: Images | None = option(None, "the images in question: are they members?", metavar="IMAGES")
    reference: Model | None = option(
        None,
        "a second model, given like --model, that was not trained on any of these images, such as the base of a "
        "fine-tune: its scores of the same queries are taken out (default: with --lora, the model without the LoRA; "
        "'none' for no reference); or train:N, to train one on N of the held-out images first, and train:N:small for "
        "a narrower one",
        BESIDE,
        "MODEL",
    )
    reference_lora: Sequence[str] | None = option(
        None,
        "a LoRA to merge into the reference, with its strength; may be given more than once",
        BESIDE,
        "FILE[:X]",
        action="append",
    )
    images: Images | None = option(None, "with --split: the images that it refers to", IMAGES, "IMAGES")
    split: File | None = option(
        None, "a split file (.npz) of SecMI or dime-mia, in place of --members and --heldout", IMAGES, "FILE"
    )
    labels: File | None = option(None, "for class-conditional models: a CSV file of id,label", IMAGES, "FILE")
    groups: File | None = option(
        None,
        "a CSV file of id,group: images of one owner or shoot are not independent evidence and are resampled together; "
        "known images are called members/ID and heldout/ID",
        IMAGES,
        "FILE",
    )
    captions: str | None = option(
        None,
        "for text-to-image models: query with each image's own caption (default), or without one",
        choices=CAPTIONS,
    )
    attacks: Sequence[str] | None = option(None, "the attacks to run (default: all)", COST, "ATTACK", nargs="+")
    attack_module: File | None = option(
        None, "a Python file of yours that registers attacks; it is run, so name only one you trust", JUDGING, "FILE.py"
    )
    queries: Sequence[int] | None = option(
        None,
        "make at most N queries per image: each attack runs at its largest tier within N, and attacks that need more "
        "are left out; with several numbers, the tier for each (default: set by the profile)",
        COST,
        nargs="+",
        type=int,
    )
    profile: str = option("quick", "how much to spend: light is for slow models", COST, choices=PROFILES)
    grid: Sequence[Mapping[str, int | float]] | None = option(
        None, "parameters in place of the grid's, such as [{'t': 70}]", heading=None
    )
    calibration_size: int | None = option(
        None,
        "choose settings with at most N members and N held-out images (default: set by the profile)",
        COST,
        type=int,
    )
    test_size: int | None = option(
        None, "test at most N members and N held-out images (default: set by the profile)", COST, type=int
    )
    variations: bool = option(
        False,
        "also query mirrored, cropped and re-encoded copies of each candidate, in case the model was trained on one of "
        "them; takes 8 times the queries for candidates",
        JUDGING,
    )
    decide_with: str | None = option(
        None, "the attack that judges candidates (default: best on the calibration half)", JUDGING, "ATTACK@QUERIES"
    )
    level: float = option(0.05, "the false discovery rate of the verdicts, and the level of the test on the whole set")
    delta: float = option(0.0, "δ in the lower bound on ε of differential privacy", JUDGING)
    randomised: bool = option(
        False,
        "state that a coin toss decided, before training, whether each image became a member: only then is the bound "
        "on ε an audit of differential privacy",
        JUDGING,
    )
    seed: int = option(0, "the seed of all random choices and draws", JUDGING)
