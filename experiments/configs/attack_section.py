"""What configs share: `config.data`, the images and who is a member, and `config.attack`, how a model is attacked."""

from ml_collections.config_dict import ConfigDict, placeholder

from dime_jax._util import validate


def new_config(variant: str, variants: tuple[str, ...], source: str) -> ConfigDict:
    """Return a config with `seed`, `data` and `attack`; a variant that is not among those of the file is refused."""
    validate.check_choice(variant, variants, "variant")
    config = ConfigDict()
    config.seed = 0
    config.data = data_section(source)
    config.attack = attack_section()
    return config


def data_section(source: str) -> ConfigDict:
    """Images and split; `experiments.study_data.open_study` opens them for training and attacks alike."""
    data = ConfigDict()
    data.source = source  # as `dime_jax.data.open_source` takes it; "cifar10:" wants its folder on the command line
    data.heldout = ""  # a second source that holds the held-out images; "" if `source` holds both
    data.heldout_options = ConfigDict()  # such as {"labels": "as_published"}
    data.split = "random"  # or one of experiments.study_data.SPLITS
    data.split_file = ""  # for "file": SecMI's or dime-mia's .npz
    data.split_size = placeholder(int)  # members, and as many held-out images; images per class for "per_class"
    data.split_seed = 0
    # The most members, and held-out images, of the split to use, drawn with split_seed: for small studies.
    data.max_members = placeholder(int)
    data.max_heldout = placeholder(int)
    # Without the images of a study whose max_members and max_heldout are `reserved`: the `part`-th draw of the others,
    # of which no two overlap. So models of several seeds share no image with each other or with the pilot.
    data.reserved = placeholder(int)
    data.part = 0
    data.generate = False  # write a miniature of the source, its split file and a checkpoint into the workdir
    return data


def attack_section() -> ConfigDict:
    """All attacks over the authors' grids on the model that was trained in the same workdir."""
    attack = ConfigDict()
    # "trained": WORKDIR/model; "converted": `checkpoint`, converted to WORKDIR/model-HASH; "closed_form": the ideal
    # denoiser of the members; else a model as `dime_jax.open_model` takes it.
    attack.model = "trained"
    attack.checkpoint = ""
    attack.model_flags = ""  # for guided-diffusion checkpoints that are not among the published ones
    # A second model that is asked the same, as `dime_jax.open_model` takes it: what its answers explain is taken out.
    attack.reference = ""
    attack.image_shape = (32, 32, 3)  # of the closed form; other models know theirs
    attack.transform = ""  # instead of the source's own pipeline
    attack.halves = "by_id"  # or "as_published", the authors' permutation
    attack.calibration_share = 0.5  # of members and held-out images, for "by_id"; the rest is for testing
    attack.seed = placeholder(int)  # of the attacks' noises and probes; config.seed if unset
    attack.calibration_size = placeholder(int)  # members, and as many held-out images; the whole half if unset
    attack.test_size = placeholder(int)
    attack.names = ()  # all
    attack.profile = "paper"  # whose grids: "paper" or "quick"
    # Queries per image: for each number the largest tier of each attack that costs no more; all tiers if empty.
    # Attacks of fixed cost always run.
    attack.budgets = ()
    # Instead of the profile's values, by attack: {"all": {"t": (30, 70)}, "secmi": {"t": (80,), "k": (15,)}}.
    # An attack's own entry is used instead of the one for "all".
    attack.grids = ConfigDict()
    attack.micro_batch = placeholder(int)
    attack.max_queries = placeholder(int)
    attack.max_queries_per_image = placeholder(int)
    return attack


def smoke(config: ConfigDict) -> None:
    """Turn a config into one that takes seconds and needs nothing but a workdir: generated files, a few queries."""
    config.data.generate = True
    config.attack.update(model="converted", names=("loss", "pia_l4", "sima_l4", "dime"), budgets=(2,))
    config.attack.update(calibration_size=4, test_size=4, micro_batch=2)
    config.attack.grids = ConfigDict({"all": {"t": (100,), "gamma": (0.1, 0.4)}})
