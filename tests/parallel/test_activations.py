"""Less memory for activations: the same loss, gradients and buffers, but for `activation_bits`."""

import copy
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.profiler import ProfilerActivity, profile

from ddp_kit import ConfigError, MemoryConfig
from ddp_kit.model import activations
from ddp_kit.model.activations import Activations, SavedTensors, compressed, decompressed

EXACT: list[dict[str, Any]] = [
    {"activation_checkpointing": "blocks"},
    {"activation_checkpointing": 0.5},
    {"activation_checkpointing": "ops"},
    {"offload_activations": True},
    {"activation_checkpointing": "ops", "offload_activations": True},
    {"activation_checkpointing": "blocks", "offload_activations": True},
]
WIDTH, VOCABULARY = 32, 64


@pytest.fixture(autouse=True)
def small_activations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "OFFLOADED_BYTES", 1024)
    monkeypatch.setattr(activations, "COMPRESSED_BYTES", 1024)


class GPTBlock(nn.Module):
    """Of a GPT, called with keywords as well, with separate projections, dropout of torch, and Python's chance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        batch, time, width = x.shape
        normed = self.norm(x)
        q, k, v = (layer(normed).view(batch, time, 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        kept = 1.0 if random.random() < 0.5 else 0.5
        x = x + kept * scale * F.dropout(self.out(attended.transpose(1, 2).reshape(batch, time, width)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        blocks = [GPTBlock() for _ in range(4)]
        self.blocks = nn.ModuleList([*blocks, blocks[0]])  # one has a second turn, as in ALBERT
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.head(x)  # type: ignore[no-any-return]


class ConvBlock(nn.Module):
    """Whose buffers each forward pass changes; with spectral_norm, its output depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.spectral = spectral_norm(nn.Conv2d(8, 8, 1))
        self.register_buffer("table", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.spectral(torch.relu(self.norm(self.conv(x))))  # type: ignore[no-any-return]


def gpt_pass(config: dict[str, Any], autocast: bool = False, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    random.seed(0)
    model = Gpt().to(device)
    tokens = torch.randint(VOCABULARY, (4, 32)).to(device)
    memory = Activations(model, MemoryConfig(**config))
    for _ in range(2):
        context = torch.autocast(device, torch.bfloat16) if autocast else nullcontext()
        with context, memory.forward_context():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
    return loss.detach(), [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", EXACT, ids=str)
def test_activation_memory_settings_leave_loss_and_gradients_bitwise_identical(
    config: dict[str, Any], autocast: bool
) -> None:
    loss, gradients = gpt_pass(config, autocast)
    plain_loss, plain = gpt_pass({}, autocast)
    assert torch.equal(loss, plain_loss)
    assert all(map(torch.equal, gradients, plain))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", EXACT, ids=str)
def test_activation_memory_settings_on_a_gpu_leave_loss_and_gradients_equal(
    config: dict[str, Any], autocast: bool
) -> None:
    """But for the order of atomic additions in attention's backward pass; a dropout mask of its own would show."""
    loss, gradients = gpt_pass(config, autocast, "cuda")
    plain_loss, plain = gpt_pass({}, autocast, "cuda")
    assert torch.equal(loss, plain_loss)
    torch.testing.assert_close(gradients, plain, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "config", [{"activation_checkpointing": "blocks"}, {"activation_checkpointing": "ops"}], ids=str
)
def test_checkpointing_updates_buffers_once(config: dict[str, Any]) -> None:
    def trained(config: dict[str, Any]) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 1), *(ConvBlock() for _ in range(3)))
        memory, buffers = Activations(model, MemoryConfig(**config)), [*model.buffers()]
        for number in range(3):
            model[1].norm.train(number != 1)  # type: ignore[union-attr]  # frozen for a while
            with memory.forward_context():
                loss = model(torch.randn(4, 3, 8, 8)).square().mean()
            loss.backward()
        assert all(each is buffer for each, buffer in zip(model.buffers(), buffers, strict=True))
        return model

    one, other = trained(config), trained({})
    for (name, mine), theirs in zip(one.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in zip(one.parameters(), other.parameters()))  # type: ignore[arg-type]  # noqa: B905


def held_bytes(config: dict[str, Any]) -> int:
    """What a forward pass allocates and keeps."""
    torch.manual_seed(0)
    model, tokens = Gpt(), torch.randint(VOCABULARY, (4, 32))
    memory = Activations(model, MemoryConfig(**config))
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler,
        memory.forward_context(),
    ):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    held = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    loss.backward()
    return held


def test_activation_memory_settings_reduce_saved_bytes() -> None:
    plain = held_bytes({})
    assert held_bytes({"activation_checkpointing": "blocks"}) < 0.25 * plain
    assert held_bytes({"activation_checkpointing": "ops"}) < 0.7 * plain
    assert held_bytes({"activation_checkpointing": 0.5}) < 0.7 * plain
    assert held_bytes({"activation_bits": 8}) < 0.5 * plain


def test_activation_bits_8_keeps_the_loss_and_changes_gradients_little() -> None:
    loss, gradients = gpt_pass({"activation_bits": 8})
    plain_loss, plain = gpt_pass({})
    assert torch.equal(loss, plain_loss)
    error = nn.utils.get_total_norm([mine - theirs for mine, theirs in zip(gradients, plain, strict=True)])
    assert 0 < error < 0.02 * nn.utils.get_total_norm(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_compressed_values_are_off_by_one_step_at_most_and_zeros_are_exact(dtype: torch.dtype) -> None:
    values = torch.randn(7, 301).relu().to(dtype)
    values[0, 5] = 1000.0
    whole, steps = compressed(values.t())
    found = decompressed(whole, steps, values.t().shape, dtype).t()
    assert whole.dtype == torch.int8
    assert torch.equal(found == 0, values == 0)
    off = (found - values).abs().t().reshape(-1)
    limit = steps.repeat_interleave(256)[: off.numel()] + torch.finfo(dtype).eps * (values + found).t().reshape(-1)
    assert (off <= limit).all()


def test_compressed_values_that_are_not_finite_stay_not_finite() -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        values = torch.zeros(512)
        values[300] = value
        found = decompressed(*compressed(values), values.shape, values.dtype)
        assert not found[300].isfinite()
        assert (found[:256] == 0).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_offloaded_activations_exclude_weights_and_store_an_input_once(autocast: bool) -> None:
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    saved = SavedTensors(model, MemoryConfig(offload_activations=True))
    kept: list[object] = []

    def pack(tensor: Tensor) -> object:
        kept.append(saved.pack(tensor))
        return kept[-1]

    x = torch.randn(128, 64, requires_grad=True)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(pack, saved.unpack):  # type: ignore[arg-type]
        sum(layer(x).sum() for layer in model).backward()  # type: ignore[union-attr]
    assert len(kept) == 6
    assert len({id(each) for each in kept if type(each).__name__ == "_Stored"}) == 1
    assert sum(type(each).__name__ == "_Unchanged" for each in kept) == 3


def test_offloaded_activations_detect_a_write_to_a_saved_tensor() -> None:
    model = nn.Linear(4, 4)
    with Activations(model, MemoryConfig(offload_activations=True)).forward_context():
        hidden = model(torch.randn(2, 4)).exp()
        loss = hidden.sum()
    hidden.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_model_is_restored_after_the_forward_pass() -> None:
    model = Gpt()
    names = list(model.state_dict())
    before = [dict(vars(module)) for module in model.modules()]
    memory = Activations(model, MemoryConfig(activation_checkpointing="blocks"))
    with memory.forward_context():
        assert list(model.state_dict()) == names
    assert copy.deepcopy(model.blocks[0]).forward.__func__ is GPTBlock.forward  # type: ignore[operator,union-attr]
    assert all(vars(module).keys() == was.keys() for module, was in zip(model.modules(), before, strict=True))


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, []), (0.01, [4]), (0.4, [2, 4]), (0.5, [2, 4]), (1.0, [*range(5)])]
)
def test_checkpointing_of_a_fraction_spreads_blocks_evenly(fraction: float, expected: list[int]) -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.linear = number, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.number)
            return self.linear(x).tanh()  # type: ignore[no-any-return]

    model = nn.Sequential(*(Counted(number) for number in range(5)))
    with Activations(model, MemoryConfig(activation_checkpointing=fraction)).forward_context():
        loss = model(torch.randn(2, 4)).sum()
    del calls[:]
    loss.backward()
    assert sorted(calls) == expected


def test_checkpointing_of_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="memory.activation_checkpointing = 'blocks' needs repeated blocks, but Linear has"
    ):
        Activations(nn.Linear(4, 4), MemoryConfig(activation_checkpointing="blocks"))


@pytest.mark.parametrize("value", [True, 1.5, -0.1, "block"])
def test_checkpointing_with_an_invalid_value_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be"):
        MemoryConfig(activation_checkpointing=value)
