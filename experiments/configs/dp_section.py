"""What configs of the DP-SGD study share: `config.dp`, the budgets and how the arm without privacy is trained."""

from ml_collections.config_dict import ConfigDict, placeholder


def dp_section(steps: int) -> ConfigDict:
    """The paper's budgets; all arms share `config.train.recipe`."""
    dp = ConfigDict()
    dp.epsilons = (1.0, 4.0, 10.0)
    dp.delta = 1e-5
    dp.clip_norm = 1.0  # of the gradient of one image; recipe.clip_norm is of the noised mean gradient, in every arm
    dp.steps = steps  # updates that the budgets are for: no fewer than recipe.steps
    dp.microbatch = placeholder(int)  # images whose gradients are in memory at once; what fits into 2 GiB if unset
    dp.vanilla = ConfigDict()
    dp.vanilla.batches = "poisson"  # the private arms' batches; or "shuffled" passes
    dp.vanilla.recipe = ConfigDict()  # what the arm without privacy does otherwise: fields of `training.TrainingRecipe`
    # Set by `experiments.dp_defense` in the config of each arm, as is attack.seed; unset for vanilla.
    dp.epsilon = placeholder(float)
    return dp
