"""The kernel bench in real Chromium, with tiny sizes: the form of its figures, and that only right products are timed.

Nothing here says how fast anything is.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from backend.bench import kernels as bench
from backend.bench.kernels import ladder
from backend.bench.kernels.figures import ratio
from backend.bench.kernels.operands import SCALE_BLOCK, encode, error, operands
from backend.bench.kernels.page import ROOT, KernelsPage
from backend.bench.kernels.targets import holds
from backend.cli import app

N = 64
FAST_N = 256  # the fast kernel leaves less to the plain one
TINY = bench.Plan(wasm=(N,), fast=(FAST_N,), gpu=(N,), rounds=3, roundMs=1)
ONNX_MODEL = "/bench/kernels/onnx.js"
CPU_PEERS = {"tfjs-wasm", "onnxruntime-web-wasm", "onnxruntime-web-wasm-one-run"}
GPU_PEERS = {"tfjs-webgpu", "onnxruntime-web-webgpu", "jax-js-webgpu"}


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return bench.kernels(TINY)


def test_every_kernel_and_peer_has_a_row(figures: dict[str, Any]) -> None:
    assert figures["failed"] == {}
    found = {(row["engine"], row["kernel"]): row for row in figures["rows"] if row["n"] == N}
    wasm = {"relaxed", "strict", "scalar", "relaxed-bf16", "relaxed-f16", "relaxed-int8", "strict-int8"}
    assert {kernel for engine, kernel in found if engine == "wasm"} == wasm
    assert {engine for engine, _ in found} == {"wasm", "webgpu", "pyodide", "native"}
    assert [row["n"] for row in figures["rows"] if row["kernel"] == "fast"] == [FAST_N]
    for (engine, _), row in found.items():
        assert row["gflops"] > 0
        peers = {"wasm": CPU_PEERS, "webgpu": GPU_PEERS, "pyodide": {"tfjs-wasm"}, "native": set()}[engine]
        assert set(row["ratios"]) == peers
        assert all(value > 0 for value in row["ratios"].values())
        assert (row["peak_fraction"] is None) == (engine == "webgpu")
    assert {row["peer"] for row in figures["peers"]} == CPU_PEERS | GPU_PEERS


def test_the_named_figures_are_there(figures: dict[str, Any]) -> None:
    named = ["two_workers_over_one", "bf16_over_f32", "int8_over_f32", "pyodide_over_strict", "pyodide_join_s"]
    assert all(figures[name] > 0 for name in named)
    assert set(figures["peaks"]) == {"wasm_fma_128", "wasm_mul_add_128", "native_fma_128"}
    assert all(gflops > 0 for gflops in figures["peaks"].values())
    [growth] = figures["error_growth"]
    assert growth["n"] == FAST_N
    assert 0 < growth["plain"] < growth["fast"] < 2e-5
    assert 0 < figures["webgpu_error"][str(N)] < 2e-6
    assert figures["webgpu_with_transfers_gflops"][str(N)] > 0
    assert figures["adapter"]["vendor"]
    assert "Chrom" in figures["browser"]
    assert figures["cpu"]
    assert all(set(one) == {"wanted", "measured", "holds"} for one in figures["holds"].values())


def test_a_peer_with_a_wrong_product_is_refused_and_not_timed() -> None:
    source = (ROOT / "web" / ONNX_MODEL.lstrip("/")).read_text()
    assert source.count('"MatMul"') == 1
    overrides = {ONNX_MODEL: source.replace('"MatMul"', '"Add"').encode()}
    found = bench.kernels(bench.Plan(sections=("wasm",), wasm=(N,), fast=(), rounds=3, roundMs=1), overrides)
    refused = {one["name"]: one["reason"] for one in found["refused"]}
    assert set(refused) == {"peer/onnxruntime-web-wasm", "peer/onnxruntime-web-wasm-one-run"}
    assert all(reason.startswith("wrong product: error ") for reason in refused.values())
    assert {row["peer"] for row in found["peers"]} == {"tfjs-wasm"}
    assert all(set(row["ratios"]) == {"tfjs-wasm"} for row in found["rows"] if row["engine"] == "wasm")


def test_a_page_that_fails_says_why() -> None:
    script = b'await fetch("/figures", { method: "POST", body: JSON.stringify({ error: "no such luck" }) });'
    with KernelsPage({"/bench/kernels/page.js": script}) as page, pytest.raises(RuntimeError, match="no such luck"):
        page.measure({}, 60)


def test_figures_of_another_sites_page_are_refused() -> None:
    with KernelsPage() as page:
        request = urllib.request.Request(page.address + "/figures", b"{}", {"Origin": "http://evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request, timeout=30)
        assert page.figures.empty()


def test_operands_mean_what_their_bytes_say() -> None:
    lines = np.random.default_rng(1).standard_normal((5, 300), np.float32)
    lines[0].view(np.uint32)[:] = (0x3F80 + np.arange(300) << 16) + 0x8000  # halfway between two of bf16
    bf16 = encode(lines, "bf16")
    expected = torch.from_numpy(lines).to(torch.bfloat16)
    assert bf16.data == expected.view(torch.int16).numpy().tobytes()
    assert np.array_equal(bf16.value, expected.float().numpy())
    f16 = encode(lines, "f16")
    assert np.array_equal(np.frombuffer(f16.data, np.float16).astype(np.float32).reshape(lines.shape), f16.value)
    i8 = encode(lines, "i8")
    whole = np.frombuffer(i8.data, np.int8).reshape(lines.shape).astype(np.float32)
    scales = np.frombuffer(i8.scales, np.float32).reshape(5, 3).repeat(SCALE_BLOCK, axis=1)[:, :300]
    assert np.array_equal(whole * scales, i8.value)
    assert np.abs(i8.value - lines).max() <= scales.max() * 0.5001


def test_one_wrong_element_shows() -> None:
    a, b = (one.value.astype(np.float64) for one in operands(N, "f32"))
    right = (a @ b.T).astype(np.float32)
    assert error(N, "f32", 1, right.tobytes()) < 1e-7
    chain = (a @ b.T @ b.T).astype(np.float32)
    assert error(N, "f32", 2, chain.tobytes()) < 1e-7
    wrong = right.copy()
    wrong[3, 5] += np.abs(right).max() / 100
    assert error(N, "f32", 1, wrong.tobytes()) == pytest.approx(0.01, rel=1e-3)
    wrong[3, 5] = np.nan
    assert math.isinf(error(N, "f32", 1, wrong.tobytes()))
    assert math.isinf(error(N, "f32", 1, right.tobytes()[:-4]))


def test_ratios_are_taken_within_rounds() -> None:
    measured = {"gflops": {"ours": [10.0, 40.0, 20.0], "theirs": [5.0, 20.0, 40.0], "never": []}}
    assert ratio(measured, "ours", "theirs") == 2.0
    assert ratio(measured, "ours", "never") is None
    assert ratio(measured, "ours", "absent") is None


def test_a_target_holds_by_its_figure_only(figures: dict[str, Any]) -> None:
    def relaxed(times: float) -> dict[str, Any]:
        row = {"engine": "wasm", "kernel": "relaxed", "n": 512, "ratios": {"tfjs-wasm": times}, "peak_fraction": None}
        return holds({**figures, "rows": [row], "pyodide_join_s": times})

    assert relaxed(1.6)["relaxed_over_tfjs_wasm_512"] == {"wanted": ">= 1.6", "measured": 1.6, "holds": True}
    assert relaxed(1.59)["relaxed_over_tfjs_wasm_512"]["holds"] is False
    assert relaxed(1.6)["relaxed_peak_fraction_512"]["holds"] is False
    assert relaxed(4.0)["pyodide_join_s"]["holds"] is True
    assert relaxed(4.1)["pyodide_join_s"]["holds"] is False


def test_the_command_prints_one_object_or_tables(monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any]) -> None:
    monkeypatch.setattr(bench, "kernels", lambda: figures)
    printed = CliRunner().invoke(app, ["bench", "kernels", "--json"])
    assert printed.exit_code == 0
    assert json.loads(printed.stdout) == figures
    tables = CliRunner().invoke(app, ["bench", "kernels"], env={"COLUMNS": "300"})
    assert tables.exit_code == 0
    assert all(name in tables.stdout for name in [*figures["holds"], "jax-js-webgpu", "relaxed-bf16", figures["cpu"]])


def test_the_command_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no figures after 240 s")

    monkeypatch.setattr(bench, "kernels", fail)
    result = CliRunner().invoke(app, ["bench", "kernels", "--json"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "tileweave: no figures after 240 s\n"


def test_the_ladders_table_goes_between_its_markers() -> None:
    measured = [{"n": 512, "gflops": {"ladder/1_naive": [1.0, 3.0, 2.0], "peer/tfjs-wasm": [10.0, 10.0, 10.0]}}]
    made = ladder.table(measured, {"1_naive": "Three loops", "2_more": "Better"})
    assert made.splitlines()[2:] == ["| 1_naive | Three loops | 2.0 | 0.20 |", "| 2_more | Better |  |  |"]
    text = f"before\n{ladder.BEGIN}\nold\n{ladder.END}\nafter\n"
    assert ladder.rewrite(text, made) == f"before\n{ladder.BEGIN}\n{made}\n{ladder.END}\nafter\n"
    with pytest.raises(ValueError, match="expected <!-- ladder"):
        ladder.rewrite("no markers", made)
