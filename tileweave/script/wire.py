"""What a job's two processes say to each other: the script (torch, the user's code) and its coordinator.

A unix stream socket carries frames of a 4-byte little-endian length and one msgpack object (a tagged struct below).
Tensors never travel here: the script writes operands into its arena (memory-mapped files in the job's run directory)
and names regions of them; the coordinator assembles the product into the region `c` and answers `Product`.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from tileweave.protocol.elements import Wire

FRAME_BYTES_MAX = 1 << 20

# How the supervisor tells a script where its coordinator listens, and both of them the one-off secret of that socket.
SOCKET_VARIABLE = "TILEWEAVE_JOB_SOCKET"
TOKEN_VARIABLE = "TILEWEAVE_JOB_TOKEN"  # noqa: S105 - the name of the variable


class Region(Struct, frozen=True, array_like=True):
    """`size` bytes at `offset` of the file at `path`; the file is at least that long and never shrinks while mapped."""

    path: str
    offset: int
    size: int


class ScriptMessage(Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True):
    """Base of what the script sends and gets; `tag` names the message on the wire."""


# ---- script -> coordinator -------------------------------------------------------------------------------------------


class ScriptHello(ScriptMessage, frozen=True, tag="hello"):
    """First frame. `token` is the one-off secret the supervisor gave both processes."""

    token: str
    pid: int


class Part(Struct, frozen=True, array_like=True):
    """One part of an operand, stored in the job's panel elements (protocol/elements.py, a panel of all its rows) in
    `region`. `content` names the bytes: a hash. They are there for as long as the 8 bytes at `stamp_offset` of the same
    file hold `stamp`."""

    region: Region
    content: str
    stamp_offset: int
    stamp: int


class GemmRequest(ScriptMessage, frozen=True, tag="gemm"):
    """C_i[m,n] = A_i[m,k] B_i[k,n] for i < batch; with several parts, the sum of the products of the parts of `a` and
    `b` (then batch is 1). Each part is stored by lines: batch x m rows of k (of b, batch x n rows of k: B^T); or by k,
    batch x k rows of m (of n). c: batch x m x n float32, written by the coordinator before it answers. The script
    leaves all of them untouched until then. `b_uses`: products that b is expected to be part of."""

    id: int
    step: int
    batch: int
    m: int
    n: int
    k: int
    a: list[Part]
    b: list[Part]
    c: Region
    a_by_k: bool = False
    b_by_k: bool = False
    b_uses: int = 1


class StepReport(ScriptMessage, frozen=True, tag="step"):
    """One optimizer step is done. `samples` counts tokens or rows of the batch; FLOP are of GEMMs, 2mnk each."""

    step: int
    loss: float | None
    samples: int
    seconds: float
    flop_offloaded: int
    flop_local: int
    unit: str = "tokens"


class CheckpointWritten(ScriptMessage, frozen=True, tag="checkpoint"):
    """A checkpoint file is complete and synced under its final name; answered by `Recorded` once the store has it."""

    step: int
    path: str
    sha256: str
    size: int


class SampleText(ScriptMessage, frozen=True, tag="sample"):
    """Text the model generated, for the job page."""

    step: int
    text: str


class Validated(ScriptMessage, frozen=True, tag="validated"):
    """After `step` steps the script's figure on data held out (a loss: smaller is better)."""

    step: int
    value: float


class ScriptDone(ScriptMessage, frozen=True, tag="done"):
    """The script finished; `result` is a file for GET /jobs/{id}/result, if it made one."""

    result: str | None = None


class ScriptFailed(ScriptMessage, frozen=True, tag="failed"):
    """The script cannot go on; `reason` is shown to the admin."""

    reason: str


# ---- coordinator -> script -------------------------------------------------------------------------------------------


class ScriptWelcome(ScriptMessage, frozen=True, tag="welcome"):
    """Answer to hello: the job as submitted, this run's epoch, where to write, and the checkpoint to go on from."""

    job: str
    epoch: int
    steps: int
    config: dict[str, Any]
    data: str | None
    arena_dir: str
    checkpoint_dir: str
    checkpoint_every_s: float
    min_gemm_flop: int
    wire: Wire = "f32"
    resume: str | None = None
    resume_sha256: str | None = None


class Product(ScriptMessage, frozen=True, tag="product"):
    """The product of GEMM `id` stands in its region c, every tile verified."""

    id: int


class GemmFailed(ScriptMessage, frozen=True, tag="gemm_failed"):
    """GEMM `id` cannot be computed (operands not finite, say)."""

    id: int
    reason: str


class Recorded(ScriptMessage, frozen=True, tag="recorded"):
    """The checkpoint of `step` is in the store: older ones may be deleted."""

    step: int


class Control(ScriptMessage, frozen=True, tag="control"):
    """`cancel` ends the script at its next GEMM or step, before a further checkpoint."""

    what: Literal["cancel"]


FromScript = (
    ScriptHello | GemmRequest | StepReport | CheckpointWritten | SampleText | Validated | ScriptDone | ScriptFailed
)
ToScript = ScriptWelcome | Product | GemmFailed | Recorded | Control
