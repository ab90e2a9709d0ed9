"""Our U-Nets in PyTorch, the other side of the benchmarks: the DDPM one as compact as its layers allow, the Guided
Diffusion one as diffusers has it.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dime_jax import models


class ResBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice, with the time embedding between."""

    def __init__(self, spec: models.DdpmUnetSpec, inputs: int, outputs: int):
        super().__init__()
        self.norm1, self.conv1 = _norm(spec, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = _norm(spec, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(spec.time_channels, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(embedding))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Single-head self-attention over positions."""

    def __init__(self, spec: models.DdpmUnetSpec, channels: int):
        super().__init__()
        self.norm = _norm(spec, channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        rows = self.norm(x).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(self.query(rows), self.key(rows), self.value(rows))
        return x + self.out(h).transpose(1, 2).reshape(x.shape)


class Unet(nn.Module):
    """The network of Ho et al. 2020, with one attention head."""

    def __init__(self, spec: models.DdpmUnetSpec) -> None:
        super().__init__()
        self.spec = spec
        levels, time, width = spec.level_channels, spec.time_channels, spec.stem_channels
        self.time = nn.Sequential(nn.Linear(spec.time_features, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(spec.image_channels, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        widths = [width]
        for level, channels in enumerate(levels):
            for _ in range(spec.num_res_blocks):
                self.down.append(ResBlock(spec, width, channels))
                if level in spec.attention_levels:
                    self.down.append(Attention(spec, channels))
                width = channels
                widths.append(width)
            if level < len(levels) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2))
                widths.append(width)
        middle = [ResBlock(spec, width, width), Attention(spec, width), ResBlock(spec, width, width)]
        self.middle = nn.ModuleList(middle)
        for level, channels in reversed(list(enumerate(levels))):
            for _ in range(spec.num_res_blocks + 1):
                self.up.append(ResBlock(spec, width + widths.pop(), channels))
                if level in spec.attention_levels:
                    self.up.append(Attention(spec, channels))
                width = channels
            if level:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm_out, self.conv_out = _norm(spec, width), nn.Conv2d(width, spec.image_channels, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Predicted noise."""
        half = self.spec.time_features // 2
        angle = t[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
        embedding = self.time(torch.cat([angle.sin(), angle.cos()], dim=1))
        h = self.conv_in(x)
        skips = [h]
        for layer, following in zip(self.down, [*self.down[1:], None]):
            if isinstance(layer, ResBlock):
                h = layer(h, embedding)
            else:
                h = layer(h) if isinstance(layer, Attention) else layer(F.pad(h, (0, 1, 0, 1)))
            if not isinstance(following, Attention):
                skips.append(h)
        for layer in self.middle:
            h = layer(h) if isinstance(layer, Attention) else layer(h, embedding)
        for layer in self.up:
            if isinstance(layer, ResBlock):
                h = layer(torch.cat([h, skips.pop()], dim=1), embedding)
            else:
                h = layer(h) if isinstance(layer, Attention) else layer(F.interpolate(h, scale_factor=2.0))
        return self.conv_out(F.silu(self.norm_out(h)))


def build(spec: models.DdpmUnetSpec | models.GuidedUnetSpec) -> nn.Module:
    """The network of the spec, with random weights; called with x, t and, if it has classes, labels."""
    return Unet(spec) if isinstance(spec, models.DdpmUnetSpec) else _guided_unet(spec)


def _guided_unet(spec: models.GuidedUnetSpec) -> nn.Module:
    """diffusers' network of the same layers."""
    import diffusers

    def blocks(direction: str, attention: tuple[int, ...]) -> tuple[str, ...]:
        kinds = [
            f"Attn{direction}Block2D" if level in attention else f"Resnet{direction}sampleBlock2D"
            for level in range(len(spec.level_channels))
        ]
        return tuple(kinds if direction == "Down" else reversed(kinds))

    return diffusers.UNet2DModel(
        in_channels=spec.image_channels,
        out_channels=spec.out_channels,
        block_out_channels=spec.level_channels,
        down_block_types=blocks("Down", spec.attention_levels),
        up_block_types=blocks("Up", spec.up_attention),
        downsample_type="resnet",
        upsample_type="resnet",
        attention_head_dim=spec.head_channels,
        resnet_time_scale_shift="scale_shift",
        norm_eps=spec.norm_eps,
        num_class_embeds=spec.num_classes,
    )


def parameters(network: nn.Module) -> int:
    """How many there are."""
    return sum(parameter.numel() for parameter in network.parameters())


def _norm(spec: models.DdpmUnetSpec, channels: int) -> Any:
    return nn.GroupNorm(spec.norm_groups, channels, spec.norm_eps)
