"""Whole models under the mode: gradients and training equal plain torch, attention included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backend.recipes import GptBytesConfig
from backend.recipes.byte_text import batch, loss_of
from backend.recipes.gpt_bytes import Gpt
from tileweave.script.multiply import PlainMultiplier
from tileweave.script.offload import Offloader, OffloadMode, math_attention


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(12, 7),
        lambda: nn.Linear(12, 7, bias=False),
        lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 3)),
        Attention,
        lambda: nn.MultiheadAttention(12, 3, batch_first=True),
        lambda: nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True),
        lambda: nn.GRU(12, 8, batch_first=True),
        lambda: nn.LSTM(12, 8, batch_first=True),
        lambda: nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose1d(8, 4, 3, stride=2)),
    ],
)
def test_gradients_equal_plain_torch(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = build(), torch.randn(5, 6, 12)

    def gradients() -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        model.zero_grad()
        out = model(inputs, inputs, inputs) if isinstance(model, nn.MultiheadAttention) else model(inputs)
        out = out[0] if isinstance(out, tuple) else out
        (out.square().mean()).backward()
        return [inputs.grad, *(p.grad.clone() for p in model.parameters())]

    plain = gradients()
    mode = Offloader(PlainMultiplier(), min_gemm_flop=1)
    with math_attention(), OffloadMode(mode):
        offloaded = gradients()
    assert mode.flop_offloaded > 0
    assert mode.flop_local == 0  # nothing escapes
    for found, expected in zip(offloaded, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_math_attention_puts_the_fused_kernels_back() -> None:
    before = (torch.backends.cuda.flash_sdp_enabled(), torch._C._get_mkldnn_enabled())
    with pytest.raises(KeyError), math_attention():
        assert (torch.backends.cuda.flash_sdp_enabled(), torch._C._get_mkldnn_enabled()) == (False, False)
        raise KeyError
    assert (torch.backends.cuda.flash_sdp_enabled(), torch._C._get_mkldnn_enabled()) == before


def test_three_steps_of_a_gpt_differ_by_rounding_only_and_95_percent_of_the_flop_go_out() -> None:
    config = GptBytesConfig(layers=2, width=64, heads=2, context=64, batch=8)
    data = torch.randint(256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def losses(mode: Offloader | None) -> list[float]:
        torch.manual_seed(config.seed)
        model = Gpt(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
        found = []
        for number in range(3):
            inputs, targets = batch(data, config, number)
            optimizer.zero_grad()
            if mode is None:
                loss = loss_of(model, inputs, targets)
                loss.backward()
            else:
                with math_attention(), OffloadMode(mode):
                    loss = loss_of(model, inputs, targets)
                    loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain = losses(None)
    mode = Offloader(PlainMultiplier())
    np.testing.assert_allclose(losses(mode), plain, rtol=1e-6)
    assert mode.flop_offloaded >= 0.95 * (mode.flop_offloaded + mode.flop_local)
