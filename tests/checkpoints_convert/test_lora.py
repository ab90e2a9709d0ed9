"""LoRA files in every spelling against the definition, and what is not LoRA refused by name."""

import json
from pathlib import Path

import lora_spellings as spellings
import numpy as np
import pytest
import safetensors.numpy

import dime_jax as dj
from checkpoints_convert import adapters, lora, mapping
from checkpoints_convert.convert import open_checkpoint
from checkpoints_convert.lora import Lora
from checkpoints_convert.options import ConversionOptions
from dime_jax._util.files import file_digests
from dime_jax.loading import model_directory
from dime_jax.loading.conversion import convert
from tests.checkpoints_convert.torch_writer import write_zip

GOLDEN = Path(__file__).parents[1] / "golden" / "latent"
PIPELINE = open_checkpoint(GOLDEN / "stable_diffusion")
UNET, TEXT = PIPELINE.denoiser.read(), PIPELINE.parts["text_encoder"].read()
ALL = (
    spellings.factors(UNET, [*spellings.UNET, *spellings.CONVOLUTIONS]),
    spellings.factors(TEXT, spellings.TEXT, seed=1),
)
ATTENTION = (spellings.factors(UNET, spellings.ATTENTION), spellings.factors(TEXT, spellings.TEXT_ATTENTION, seed=1))
ALPHA = 2.0
RANK = spellings.RANK
FILES = {
    "kohya": (spellings.kohya(*ALL, ALPHA), ALL, ALPHA / RANK),
    "peft": (spellings.peft(*ALL), ALL, 1.0),
    "older": (spellings.older(*ALL), ALL, 1.0),
    "oldest": (spellings.oldest(*ATTENTION), ATTENTION, 1.0),
    "oldest, no prefix": (spellings.oldest(ATTENTION[0], {}, prefix=""), (ATTENTION[0], {}), 1.0),
    "alpha beside peft": (
        {**spellings.peft(*ATTENTION), f"unet.{spellings.ATTENTION[0]}.alpha": np.array(RANK, np.float32)},
        ATTENTION,
        1.0,
    ),
}


def assert_merged(state, merged, pairs, factor):
    expected = spellings.updated(state, pairs, factor)
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(merged[name], tensor, rtol=1e-5, atol=1e-6, err_msg=name)
    changed = {name for name in state if not np.array_equal(merged[name], state[name])}
    assert changed == {f"{module}.weight" for module in pairs}


def save(path, tensors, metadata=None):
    safetensors.numpy.save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize("spelling", FILES)
@pytest.mark.parametrize("scale", [1.0, -0.7])
def test_spellings(spelling, scale, tmp_path):
    tensors, (unet, text), factor = FILES[spelling]
    updates = Lora(save(tmp_path / "x.safetensors", tensors), scale).updates
    assert len(updates) == len(unet) + len(text)
    assert_merged(UNET, spellings.merged(UNET, updates, "unet"), unet, factor * scale)
    assert_merged(TEXT, spellings.merged(TEXT, updates, "text_encoder"), text, factor * scale)


def test_text_encoders_of_older_files(tmp_path):
    """Weights with the prefix text_model. are found too."""
    state = {f"text_model.{name}": tensor for name, tensor in TEXT.items()}
    pairs = {f"text_model.{module}": pair for module, pair in ALL[1].items()}
    for tensors, factor in ((spellings.kohya({}, ALL[1], ALPHA), ALPHA / RANK), (spellings.peft({}, ALL[1]), 1.0)):
        updates = Lora(save(tmp_path / "x.safetensors", tensors)).updates
        assert_merged(state, spellings.merged(state, updates, "text_encoder"), pairs, factor)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["to_q"]}, 6 / RANK),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / RANK**0.5),
        ({"lora_alpha": 1, "alpha_pattern": {"attn1.to_q": 6, "attn2.to_k": 6, "to_out.0": 6}}, 6 / RANK),
    ],
)
def test_adapter_config(config, factor, tmp_path):
    """peft's own folder: the file has no alpha, the config has."""
    pairs = ATTENTION[0]
    save(tmp_path / "adapter_model.safetensors", spellings.peft(pairs, {}, unet_prefix="base_model.model."))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert_merged(UNET, spellings.merged(UNET, Lora(tmp_path).updates, "unet"), pairs, factor)


def test_settings_in_the_file(tmp_path):
    """diffusers keeps them in the header, by part; they win over a config beside the file."""
    settings = {"unet.lora_alpha": 6, "unet.r": RANK, "text_encoder.lora_alpha": 1.5}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(settings)}
    file = save(tmp_path / "x.safetensors", spellings.peft(*ATTENTION), metadata)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 100}')
    updates = Lora(file).updates
    assert_merged(UNET, spellings.merged(UNET, updates, "unet"), ATTENTION[0], 2.0)
    assert_merged(TEXT, spellings.merged(TEXT, updates, "text_encoder"), ATTENTION[1], 0.5)


def test_pytorch_files_and_half_precision(tmp_path):
    tensors = {name: tensor.astype(np.float16) for name, tensor in spellings.peft(*ATTENTION).items()}
    write_zip(tmp_path / "x.bin", tensors)
    halved = {module: tuple(f.astype(np.float16) for f in pair) for module, pair in ATTENTION[0].items()}
    assert_merged(UNET, spellings.merged(UNET, Lora(tmp_path / "x.bin").updates, "unet"), halved, 1.0)


@pytest.mark.parametrize("contents", [{7: np.zeros((2, 2), np.float32)}, {"a": 1}, {}, [np.zeros(2, np.float32)]])
def test_what_holds_no_tensors_by_name_is_refused(tmp_path, contents):
    write_zip(tmp_path / "x.bin", contents)
    with pytest.raises(ValueError, match=r"x\.bin: not a LoRA file: it must hold tensors by name"):
        _ = Lora(tmp_path / "x.bin").updates


ONE = next(iter(ATTENTION[0]))
DOWN, UP = ATTENTION[0][ONE]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"unet.{ONE}.lora_magnitude_vector": UP}, "not supported, because .* DoRA"),
        ({"lora_unet_x.dora_scale": UP}, "not supported, because .* DoRA"),
        ({"lora_unet_x.hada_w1_a": UP}, "not supported, because .* LoHa"),
        ({"lora_unet_x.lokr_w1": UP}, "not supported, because .* LoKr"),
        ({"lora_unet_x.lora_mid.weight": UP}, "not supported, because .* Tucker"),
        ({"lora_unet_x.diff": UP}, "not supported, because .* full differences"),
        ({"lora_te2_text_model_x.lora_up.weight": UP}, "not supported, because .* SDXL"),
        ({"transformer.x.lora_A.weight": UP}, "not supported, because .* transformer"),
        ({"something.weight": UP}, "unknown LoRA tensor something.weight"),
        ({"lora_unet_x.lora_up.weight": UP}, "each layer must have a down and an up factor"),
        ({"unet.conv_in.alpha": np.ones((), np.float32)}, "each layer must have a down and an up factor"),
        (
            {"unet.nowhere.lora_A.weight": DOWN, "unet.nowhere.lora_B.weight": UP},
            "unet.nowhere.lora_[AB].* no such layer",
        ),
        ({"text_encoder.x.lora_A.weight": DOWN, "text_encoder.x.lora_B.weight": UP}, "the text_encoder has no such"),
        ({f"unet.{ONE}.lora_A.weight": DOWN[:, :-1], f"unet.{ONE}.lora_B.weight": UP}, "must update a weight of shape"),
        ({f"unet.{ONE}.lora_A.weight": DOWN[:-1], f"unet.{ONE}.lora_B.weight": UP}, "factors at .* must be"),
        ({f"unet.{ONE}.lora_A.weight": DOWN.astype(np.int64), f"unet.{ONE}.lora_B.weight": UP}, "floating-point"),
        (
            {**spellings.peft({ONE: (DOWN, UP)}, {}), f"unet.{ONE}.lora_A.default.weight": DOWN + 1},
            "each factor of a layer must be one tensor",
        ),
        (spellings.peft({ONE: (DOWN, UP * np.float32(np.nan))}, {}), "values NaN"),
        (spellings.peft({ONE: (DOWN * np.float32(1e30), UP * np.float32(1e30))}, {}), "values NaN or infinite"),
        (
            spellings.peft({ONE: (np.zeros((8193, 1), np.float32), np.zeros((1, 8193), np.float32))}, {}),
            "with a rank of at most 8192",
        ),
    ],
)
def test_refusals(tensors, message, tmp_path):
    file = save(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ValueError, match=message) as error:
        adapters.merge(PIPELINE.variables(), PIPELINE.spec, "", (Lora(file),))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "cannot honour use_dora"),
        ({"peft_type": "LOHA"}, "cannot honour peft_type=LOHA"),
        ({"bias": "all"}, "cannot honour bias=all"),
        ({"modules_to_save": ["conv_out"]}, "cannot honour modules_to_save"),
        ({"alpha_pattern": {"(a+)+": 1}}, "cannot honour the pattern"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number"),
    ],
)
def test_settings_that_cannot_be_honoured(config, message, tmp_path):
    file = save(tmp_path / "x.safetensors", spellings.peft(*ATTENTION))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        _ = Lora(file).updates


def old_way(loras):
    """The fingerprint of a pipeline with these merged into the tensors of its files, before they are converted."""
    variables = {}
    for name, part in PIPELINE.parts.items():
        state = dict(part.read())
        for update in (update for one in loras for update in one.updates if update.part == part.name):
            weight = f"{update.module.replace('text_model.', '')}.weight"
            rank, down, up = len(update.down), update.down, update.up
            delta = (up.reshape(-1, rank) @ down.reshape(rank, -1)).reshape(state[weight].shape)
            state[weight] = state[weight] + np.float32(update.factor) * delta
        variables[name] = mapping.to_variables(state, part.name_table(state))
    digests = {file.name: digest for file in PIPELINE.tokenizer_files for digest in file_digests(file).values()}
    return model_directory.fingerprint(variables, PIPELINE.spec, digests)


def test_a_lora_merged_when_a_model_is_opened_gives_the_fingerprint_of_one_merged_before(tmp_path):
    """Every kind of layer, two files on top of each other, and a directory that was converted before."""
    files = [save(tmp_path / f"{n}.safetensors", spellings.peft(*ALL)) for n in "ab"]
    directory = convert(GOLDEN / "stable_diffusion", tmp_path / "model")
    plain = dj.load_denoiser(directory)
    found = [plain.fingerprint]
    for loras, scales in ((files[:1], [1.0]), (files[:1], [-0.7]), (files, [0.3, 1.9])):
        model = dj.open_model(directory, lora=loras, lora_scale=scales)
        assert model.denoiser.fingerprint == old_way([Lora(*one) for one in zip(loras, scales)])
        found.append(model.denoiser.fingerprint)
    assert len(set(found)) == 4
    assert model.denoiser.name == "model + a.safetensors + b.safetensors"
    assert "LoRA: b.safetensors at scale 1.9" in model.facts
    expected = spellings.updated(UNET, ALL[0], 2.2)
    kernel = model.denoiser.params["denoiser"]["params"]["conv_in"]["kernel"]
    np.testing.assert_array_equal(kernel, plain.params["denoiser"]["params"]["conv_in"]["kernel"])
    block = model.denoiser.params["denoiser"]["params"]["down_0_block_0"]["conv_1"]["kernel"]
    tensor = expected[f"{spellings.CONVOLUTIONS[1]}.weight"]
    np.testing.assert_allclose(block, tensor.transpose(2, 3, 1, 0), rtol=1e-4, atol=1e-5)


def test_other_adapters_other_scales_and_the_base_are_one_converted_model(tmp_path):
    files = [save(tmp_path / f"{n}.safetensors", spellings.peft(*ALL)) for n in "ab"]
    for options in ({"lora": files[:1]}, {"lora": files[1:]}, {"lora": files, "lora_scale": [1, 2]}, {}):
        dj.open_model(GOLDEN / "stable_diffusion", cache=tmp_path / "cache", say=lambda text: None, **options)
    assert len(list((tmp_path / "cache").glob("model-*"))) == 1


def test_no_lora_for_a_class_conditional_model(tmp_path):
    file = save(tmp_path / "x.safetensors", spellings.peft(*ATTENTION))
    options = ConversionOptions(autoencoder=GOLDEN / "stable_diffusion" / "vae")
    pipeline = open_checkpoint(GOLDEN / "dit", options)
    with pytest.raises(ValueError, match=r"the model has no (unet|text_encoder)"):
        adapters.merge(pipeline.variables(), pipeline.spec, "", (Lora(file),))


def test_layers_that_a_lora_could_not_tell_apart():
    with pytest.raises(
        ValueError, match=r"unet: the layers a.b_c.weight and a_b.c.weight have the same name in a LoRA"
    ):
        lora.layer_names(["a.b_c.weight", "a_b.c.weight"], "unet")


def test_bad_scale():
    with pytest.raises(ValueError, match="LoRA scale"):
        Lora("x", float("nan"))
    with pytest.raises(ValueError, match="no file or folder x"):
        Lora("x")
