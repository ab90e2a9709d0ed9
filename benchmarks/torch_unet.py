"""The CIFAR-10 DDPM U-Net in PyTorch, as compact as its layers allow: the other side of the benchmark."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS = (128, 256, 256, 256)
RES_BLOCKS = 2
ATTENTION_LEVEL = 1
TIME = 512


class ResBlock(nn.Module):
    """GroupNorm, SiLU, convolution, twice, with the time embedding between."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs, 1e-6), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs, 1e-6), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(TIME, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(embedding))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Single-head self-attention over positions."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels, 1e-6)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        rows = self.norm(x).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(self.query(rows), self.key(rows), self.value(rows))
        return x + self.out(h).transpose(1, 2).reshape(x.shape)


class Unet(nn.Module):
    """The network of Ho et al. 2020 for CIFAR-10."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(128, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.conv_in = nn.Conv2d(3, 128, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        widths, width = [128], 128
        for level, channels in enumerate(CHANNELS):
            for _ in range(RES_BLOCKS):
                self.down.append(ResBlock(width, channels))
                if level == ATTENTION_LEVEL:
                    self.down.append(Attention(channels))
                width = channels
                widths.append(width)
            if level < len(CHANNELS) - 1:
                self.down.append(nn.Conv2d(width, width, 3, stride=2))
                widths.append(width)
        self.middle = nn.ModuleList([ResBlock(width, width), Attention(width), ResBlock(width, width)])
        for level, channels in reversed(list(enumerate(CHANNELS))):
            for _ in range(RES_BLOCKS + 1):
                self.up.append(ResBlock(width + widths.pop(), channels))
                if level == ATTENTION_LEVEL:
                    self.up.append(Attention(channels))
                width = channels
            if level:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm_out, self.conv_out = nn.GroupNorm(32, width, 1e-6), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Predicted noise."""
        angle = t[:, None] * torch.exp(-math.log(10000) * torch.arange(64) / 63)
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
