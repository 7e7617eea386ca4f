"""The llama recipe: it learns, and its blocks are what they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from backend.recipes import LlamaConfig, llama
from tileweave.script.run import Run, local_welcome

TINY: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 16, "batch": 8, "sample_tokens": 5,
}  # fmt: skip


@pytest.mark.parametrize("bad", [{"heads": 4, "kv_heads": 3}, {"width": 12, "heads": 4}, {"kv_heads": 0}])
def test_heads_that_do_not_fit_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LlamaConfig(**{**TINY, **bad})


def test_training_learns_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(b"abcdefgh" * 1000)
    run = Run(local_welcome(40, str(tmp_path / "text")))
    losses = list(llama.train(run, LlamaConfig(**TINY, lr=1e-2, warmup=5, micro_batches=2)))
    assert losses[0] == pytest.approx(np.log(256), abs=0.2)
    assert losses[-1] < 1.0
    out = capsys.readouterr().out
    assert "sample after step 40:\n\ndef" in out and "validation after step 40: " in out


def test_only_how_far_apart_two_places_are_is_seen_in_their_product() -> None:
    angle = llama.angles(12, 8)
    query, key = torch.randn(8), torch.randn(8)
    q, k = (llama.turn(x.expand(1, 1, 12, 8), angle.cos(), angle.sin())[0, 0] for x in (query, key))
    products = q @ k.T
    for distance in range(-5, 6):
        same = products.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[0], products[0, :1].expand(12), atol=1e-2)
    torch.testing.assert_close(q.norm(dim=1), query.norm().expand(12))  # turned, not stretched


def test_a_place_sees_what_is_before_it_only() -> None:
    model = llama.Llama(LlamaConfig(**TINY))
    tokens = torch.randint(256, (1, 16))
    other = tokens.clone()
    other[0, 9] = (tokens[0, 9] + 1) % 256
    with torch.no_grad():
        a, b = model(tokens)[0], model(other)[0]
    torch.testing.assert_close(a[:9], b[:9])
    assert all(not torch.allclose(a[place], b[place], atol=1e-7) for place in range(9, 16))


def test_grouped_heads_are_heads_whose_keys_and_values_are_repeated() -> None:
    """A model of as many heads of keys as of queries, with each one's weights twice, says the same."""
    grouped = llama.Llama(LlamaConfig(**TINY))
    full = llama.Llama(LlamaConfig(**{**TINY, "kv_heads": 4}))
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith((".k.weight", ".v.weight")):
            weights[name] = weight.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(weights)
    tokens = torch.randint(256, (2, 16))
    torch.testing.assert_close(full(tokens), grouped(tokens))
