"""ResNet of two-convolution blocks without its head: the eyes of ACT, used in evaluation only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

_WIDTHS = (64, 128, 256, 512)
OUTPUT_WIDTH = _WIDTHS[-1]


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is projected where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride != 1 or width_in != width:
            shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Backbone(nn.Module):
    """Images (B, 3, H, W) to features (B, 512, H / 32, W / 32); named as torchvision's."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        before = _WIDTHS[0]
        for index, (width, count) in enumerate(zip(_WIDTHS, blocks, strict=True)):
            first = Block(before, width, 2 if index else 1)
            rest = (Block(width, width, 1) for _ in range(count - 1))
            self.add_module(f"layer{index + 1}", nn.Sequential(first, *rest))
            before = width

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for index in range(len(_WIDTHS)):
            x = self.get_submodule(f"layer{index + 1}")(x)
        return x
