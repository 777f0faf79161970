"""Advice about layers whose sizes are not multiples of 16 bytes."""

import pytest
import torch
from torch import nn

from ddp_kit.model.tensor_cores import advise_on_sizes, unaligned_layers


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 50257, width: int = 64, blocks: int = 0, hidden: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, hidden) for _ in range(blocks))
        self.small = nn.Linear(width, 9)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight


PADDED = "tensor cores are fastest if sizes are multiples of"


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-true"])
def test_vocabulary_that_is_no_multiple_of_eight_is_padded(precision: str) -> None:
    line = f"in {precision}, {PADDED} 8: pad the 50,257 outputs of head to 50,264"
    assert unaligned_layers(LanguageModel(), precision) == line


def test_multiple_of_eight_is_padded_only_in_float8() -> None:
    model = LanguageModel(vocabulary=50264)
    assert unaligned_layers(model, "bf16") == ""
    assert unaligned_layers(model, "fp8") == f"in fp8, {PADDED} 16: pad the 50,264 outputs of head to 50,272"


def test_products_in_32_bits_get_no_advice() -> None:
    assert unaligned_layers(LanguageModel(), "fp32") == ""
    assert unaligned_layers(LanguageModel(), "tf32") == ""


def test_layers_with_the_same_size_are_named_together() -> None:
    with torch.device("meta"):
        model = LanguageModel(50304, width=511, blocks=7, hidden=4000)
    assert unaligned_layers(model, "bf16") == (
        f"in bf16, {PADDED} 8: pad the 511 inputs of blocks.0, blocks.1, blocks.2, blocks.3, blocks.4 and 3 more to 512"
    )


def test_layer_with_few_weights_gets_no_advice() -> None:
    assert unaligned_layers(nn.Linear(999, 1001), "bf16") == ""
    assert unaligned_layers(nn.Linear(1001, 1001), "bf16").endswith(
        "pad the 1,001 inputs of Linear to 1,008; pad the 1,001 outputs of Linear to 1,008"
    )


def test_convolution_is_judged_by_its_channels() -> None:
    line = unaligned_layers(nn.Conv2d(500, 504, 3), "bf16")
    assert line.endswith(": pad the 500 input channels of Conv2d to 504")
    assert unaligned_layers(nn.Conv2d(3, 8192, 7), "bf16") == "", "there are kernels for three channels"
    assert unaligned_layers(nn.Conv2d(1004, 1004, 7, groups=1004), "bf16") == "", "depthwise"


def test_advice_is_logged_once_on_a_gpu_only(lines: list[str]) -> None:
    advise_on_sizes(LanguageModel(), "bf16", torch.device("cpu"))
    advise_on_sizes(LanguageModel(vocabulary=50304), "bf16", torch.device("cuda", 0))
    assert lines == []
    advise_on_sizes(LanguageModel(), "bf16", torch.device("cuda", 0))
    assert lines == [f"INFO advice: in bf16, {PADDED} 8: pad the 50,257 outputs of head to 50,264"]
