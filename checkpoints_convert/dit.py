"""DiT files of its authors' code: bare state dicts, or training checkpoints with an EMA.

The number of heads cannot be read off the weights: it is that of the published network of the same width. The
autoencoder comes from elsewhere.
"""

from pathlib import Path

from checkpoints_convert.checkpoint import Checkpoint, Dialect, Facts, Known, Part, by_convention, make_spec
from checkpoints_convert.diffusers import open_autoencoder
from checkpoints_convert.mapping import Naming, StateDict, width_of
from checkpoints_convert.options import ConversionOptions
from checkpoints_convert.weights_file import ChosenWeights
from dime_jax.models import DitSpec, ScheduleSpec

_CODE = "DiT"
_HEADS_BY_WIDTH = {1152: 16, 1024: 16, 768: 12, 384: 6}  # of the published ones


def naming(spec: DitSpec) -> Naming:
    """Return the names of its modules."""
    modules = {
        "patches": "x_embedder.proj",
        "embedder": "",
        "positions": "pos_embed",
        "modulation_out": "final_layer.adaLN_modulation.1",
        "dense_out": "final_layer.linear",
        **{f"block_{layer}": f"blocks.{layer}" for layer in range(spec.num_layers)},
    }
    parts = {
        **{"time_dense_0": "t_embedder.mlp.0", "time_dense_1": "t_embedder.mlp.2"},
        **{"label_embedding": "y_embedder.embedding_table", "modulation": "adaLN_modulation.1"},
        **{"qkv": "attn.qkv", "out": "attn.proj", "mlp_0": "mlp.fc1", "mlp_1": "mlp.fc2"},
    }
    return Naming(modules, parts)


def open_weights(weights: ChosenWeights, options: ConversionOptions) -> Checkpoint:
    """Return the checkpoint of a file's weights, with the autoencoder of the options."""
    if options.autoencoder is None:
        raise ValueError("holds no autoencoder: give the folder of the one that it was trained with as --autoencoder")
    # The table of positions has no dot in its name, but is the network's.
    positions = {name: tensor for name, tensor in weights.buffers.items() if name == "pos_embed"}
    state: StateDict = {**weights.state, **positions}
    network = infer_spec(state)
    autoencoder = open_autoencoder(Path(options.autoencoder))
    size = network.latent_size * autoencoder.spec.reduction
    schedule, prediction = by_convention(ScheduleSpec(), _CODE), by_convention("epsilon", _CODE)
    facts = Facts(Known((size, size), "pos_embed in the file"), schedule, prediction)
    spec, lines = make_spec(options, facts, network, autoencoder.spec)
    denoiser = Part("transformer", network, weights.file, lambda: state, lambda state: naming(network))
    parts = {"denoiser": denoiser, "autoencoder": autoencoder}
    return Checkpoint(weights.file, spec, parts, lines, weights.which)


def infer_spec(state: StateDict) -> DitSpec:
    """Return the DiT that has these tensors.

    Raises:
      ValueError: if it is not one, or has a width whose number of heads is not published.
    """
    if "pos_embed" not in state or "x_embedder.proj.weight" not in state:
        raise ValueError("not a DiT of its authors' code (x_embedder, pos_embed, blocks), nor a pipeline folder")
    width = width_of(state, [("x_embedder.proj.bias", 0), ("x_embedder.proj.weight", 0), ("pos_embed", 2)])
    if width not in _HEADS_BY_WIDTH:
        raise ValueError(f"cannot tell the number of heads of a DiT of width {width}: none of that width is published")
    patch = width_of(state, [("x_embedder.proj.weight", 2), ("x_embedder.proj.weight", 3)])
    channels = width_of(state, [("x_embedder.proj.weight", 1)])
    outputs = width_of(state, [("final_layer.linear.bias", 0), ("final_layer.linear.weight", 0)])
    side = round(width_of(state, [("pos_embed", 1)]) ** 0.5)
    return DitSpec(
        channels=channels,
        learned_sigma=outputs == 2 * channels * patch**2,
        latent_size=side * patch,
        patch_size=patch,
        width=width,
        num_layers=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        num_heads=_HEADS_BY_WIDTH[width],
        mlp_width=width_of(state, [("blocks.0.mlp.fc1.bias", 0), ("blocks.0.mlp.fc1.weight", 0)]),
        num_classes=width_of(state, [("y_embedder.embedding_table.weight", 0)]) - 1,
    )


DIALECT = Dialect("dit", ("x_embedder.", "t_embedder.", "y_embedder.", "blocks.", "final_layer."), open_weights)
