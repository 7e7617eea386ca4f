"""Narrower elements: rounding is to nearest, scales are exact, and both languages round alike."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tileweave.conversions import floats, panel_floats, panel_of, rounded
from tileweave.protocol.elements import ResultDtype, panel_bytes, scales_offset, scales_per_row

MODULE = Path(__file__).parents[2] / "web/static/js/engines/elements.js"
NARROW: list[ResultDtype] = ["bf16", "f16"]
TORCH = {"bf16": torch.bfloat16, "f16": torch.float16}


def awkward() -> np.ndarray:
    """Random bits, the neighbourhood of every border, and all halves with the middles between them."""
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    halves = np.arange(31744, dtype=np.uint16).view(np.float16).astype(np.float32)
    borders = [0.0, -0.0, np.inf, -np.inf, 65504, 65519.99, 65520, 2**-24, 2**-25, 2**-25 * 1.001, 2**-14]
    middles = (halves[1:] + halves[:-1]) / 2
    return np.concatenate([bits, halves, middles, np.array(borders, np.float32)]).astype(np.float32)


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_torchs(dtype: ResultDtype) -> None:
    values = awkward()
    found = floats(rounded(values, dtype), values.size, dtype)
    expected = torch.from_numpy(values).to(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_browser_rounds_alike(tmp_path: Path, dtype: ResultDtype) -> None:
    values = awkward()
    values.tofile(tmp_path / "values")
    program = f"""
      import {{ rounded }} from {str(MODULE.as_uri())!r};
      import {{ readFileSync, writeFileSync }} from "node:fs";
      const values = new Float32Array(readFileSync("values").buffer.slice(0));
      writeFileSync("rounded", rounded(values, "{dtype}"));
    """
    (tmp_path / "run.mjs").write_text(program)
    subprocess.run(["node", "run.mjs"], cwd=tmp_path, check=True, timeout=60)
    found = floats((tmp_path / "rounded").read_bytes(), values.size, dtype)
    np.testing.assert_array_equal(found, floats(rounded(values, dtype), values.size, dtype))


@given(st.integers(1, 6), st.integers(1, 300), st.integers(-120, 120), st.integers(0, 99))
def test_an_i8_panel_errs_by_half_a_unit_at_most_and_its_numbers_are_float32(
    rows: int, columns: int, exponent: int, seed: int
) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 2.0**exponent
    values = values.astype(np.float32)
    data = panel_of(values, "i8")
    assert len(data) == panel_bytes(rows, columns, "i8")
    scales = np.frombuffer(data, np.float32, rows * scales_per_row(columns), scales_offset(rows, columns))
    q = np.frombuffer(data, np.int8, rows * columns).reshape(rows, columns)
    wide = np.repeat(scales.reshape(rows, -1), 128, axis=1)[:, :columns]
    found = panel_floats(data, rows, columns, "i8")
    assert (found == wide.astype(np.float64) * q).all(), "a scale leaves room for its int8"
    assert (np.abs(found.astype(np.float64) - values) <= 0.5001 * wide).all()
    largest = np.abs(values).max()
    assert (wide <= largest / 127 * 1.0001 + 2**-126).all()
