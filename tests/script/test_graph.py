"""The graph executor: the numbers of ordinary PyTorch, whatever order products come in, and few round trips."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tileweave.script import graph
from tileweave.script.capture import CaptureError
from tileweave.script.executor import Eager
from tileweave.script.graph import GraphExecutor
from tileweave.script.multiply import Pending, PlainMultiplier, Read
from tileweave.script.offload import Offloader, OffloadMode, math_attention
from tileweave.script.task import Task, micro_batches

ROWS = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Tied(nn.Module):
    """One weight used twice, one that is never used, and one that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.idle = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(3, 3)
        self.down.weight = nn.Parameter(self.down.weight.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.down(self.up(x))))


class ViewOfABuffer(nn.Module):
    """Reads a buffer through a view, beside a product, and then changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.register_buffer("state", torch.ones(2, 12))

    def forward(self, x: Tensor) -> Tensor:
        state = self.get_buffer("state")
        y = self.layer(x) + state[0]
        state.mul_(0.5)
        return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


class Replacing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.get_buffer("state") * 0.5
        return x + self.state


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cell = kind(12, 16, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cell(x)[0])
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": Checkpointed,
    "mlp": lambda: nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 3)),
    "attention": lambda: nn.Sequential(Attention(), Attention()),
    "tied": Tied,
    "in_place": lambda: nn.Sequential(nn.Linear(12, 20), nn.ReLU(inplace=True), nn.Linear(20, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(12, 20), nn.Dropout(0.3), nn.Linear(20, 12), nn.Dropout(0.5)),
    "batch_norm": lambda: nn.Sequential(
        nn.Conv1d(5, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Conv1d(8, 4, 1), nn.BatchNorm1d(4)
    ),
    "used_twice": lambda: (lambda b: nn.Sequential(b, nn.GELU(), b, nn.Linear(12, 3)))(nn.Linear(12, 12)),
    "view_of_a_buffer": ViewOfABuffer,
    "transposed": lambda: nn.Sequential(nn.ConvTranspose1d(5, 6, 3, stride=2), nn.SiLU()),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
}


def task_of(model: nn.Module, count: int = 1) -> Task:
    g = torch.Generator().manual_seed(3)
    x, target = torch.randn(ROWS, 5, 12, generator=g), torch.randn(ROWS, generator=g)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return ((model(x).flatten(1).mean(dim=1) - target) ** 2).mean()

    return Task(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, lambda i: (x + i, target), ROWS, "rows",
        micro_batches=count,
    )  # fmt: skip


class Arrived:
    """A product whose memory is somebody else's once it was read."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def read(self, read: Read) -> None:
        def lent(product: Tensor) -> None:
            read(product)
            product.fill_(float("nan"))

        self._pending.read(lent)


class Slow(PlainMultiplier):
    """Products are finished only when somebody waits: all of them, or one drawn by a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.started = self.waits = self.most = 0

    def start(self, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Pending:
        self.started += 1
        return Arrived(super().start([part.clone() for part in a], [part.clone() for part in bt], uses))

    def finished(self, pending: Collection[Pending], block: bool) -> list[Pending]:
        self.most = max(self.most, len(pending))
        if not block:
            return []
        self.waits += 1
        return list(pending) if self.random is None else [self.random.choice(list(pending))]


def outcome(model: nn.Module, executor: graph.GraphExecutor | Eager, task: Task) -> list[Tensor]:
    """Loss, gradients and buffers after two batches."""
    torch.manual_seed(5)
    found = []
    for number in range(2):
        model.zero_grad()
        loss = executor.gradients(micro_batches(task.batch(number), task.micro_batches))
        found += [torch.tensor(loss), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [b.clone() for b in model.buffers()]
    return [*found, torch.rand(1)]  # the random state too


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equals_eager_whatever_order_products_come_in(name: str, count: int) -> None:
    def run(make: Callable[[Task], graph.GraphExecutor | Eager]) -> list[Tensor]:
        torch.manual_seed(1)
        model = MODELS[name]()
        task = task_of(model, count)
        return outcome(model, make(task), task)

    def eager(task: Task) -> Eager:
        return Eager(task, lambda: OffloadMode(Offloader(PlainMultiplier(), 1)))

    with math_attention():
        expected = run(eager)
    for seed in (None, 1, 2, 3):
        slow = Slow(seed)
        found = run(lambda task, slow=slow: GraphExecutor(task, Offloader(slow, 1)))
        assert slow.started > 0
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_micro_batches_share_round_trips_and_independent_products_too() -> None:
    waits = {}
    for count in (1, 4):
        torch.manual_seed(1)
        model = MODELS["attention"]()
        task, slow = task_of(model, count), Slow()
        GraphExecutor(task, Offloader(slow, 1)).gradients(micro_batches(task.batch(0), count))
        waits[count] = slow.waits
        assert slow.waits < slow.started / count  # dX and dW of a layer, and dQ, dK, dV, are under way together
    assert waits[4] == waits[1]


class Noted(PlainMultiplier):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # parts, uses of B

    def start(self, a: Sequence[Tensor], bt: Sequence[Tensor], uses: int = 1) -> Pending:
        self.asked.append((len(a), uses))
        return super().start(a, bt, uses)


def test_gradients_of_weights_are_one_sum_and_weights_are_known_to_be_used_again() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    noted = Noted()
    task = task_of(model, 4)
    GraphExecutor(task, Offloader(noted, 1)).gradients(micro_batches(task.batch(0), 4))
    forward_and_back = [uses for parts, uses in noted.asked if parts == 1]
    assert [parts for parts, _ in noted.asked if parts > 1] == [4, 4], "dW of two layers"
    # Of each micro-batch: Y of both layers, dX of the second. The first layer's W is in Y only, the second's in dX too.
    assert sorted(forward_and_back) == [4] * 4 + [8] * 8


def test_a_gradient_that_something_else_reads_is_not_a_sum() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w) @ self.w

    torch.manual_seed(1)
    model = Twice()
    task = Task(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batch=lambda i: (torch.randn(8, 8),),
        loss=lambda m, x: m(x).square().mean(), samples=8, unit="rows", micro_batches=4,
    )  # fmt: skip
    noted = Noted()
    GraphExecutor(task, Offloader(noted, 1)).gradients(micro_batches((torch.randn(8, 8),), 4))
    assert {parts for parts, _ in noted.asked} == {1}, "two products are added to one gradient"


def test_products_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "IN_FLIGHT_MAX", 3)
    torch.manual_seed(1)
    model, slow = MODELS["attention"](), Slow()
    task = task_of(model, 8)
    GraphExecutor(task, Offloader(slow, 1)).gradients(micro_batches(task.batch(0), 8))
    assert slow.most in (3, 4)  # an operator of two products is started whole


def test_small_products_stay_here_and_are_counted() -> None:
    model = MODELS["mlp"]()
    task, slow = task_of(model), Slow()
    offloader = Offloader(slow, 10**9)
    GraphExecutor(task, offloader).gradients([task.batch(0)])
    assert (slow.started, offloader.flop_offloaded) == (0, 0)
    assert offloader.flop_local > 0


def test_a_new_shape_or_variant_is_captured_anew_and_an_old_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    capture = graph.capture
    monkeypatch.setattr(graph, "capture", lambda *given: captures.append(1) or capture(*given))
    model = MODELS["mlp"]()
    task, state = task_of(model), {"layers": 1}
    task.variant = lambda: state["layers"]
    executor = GraphExecutor(task, Offloader(PlainMultiplier(), 1))
    for count in (1, 1, 2, 1):
        executor.gradients(micro_batches(task.batch(0), count))
    assert len(captures) == 2
    state["layers"] = 2
    executor.gradients([task.batch(0)])
    assert len(captures) == 3
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight.requires_grad = False
    first.weight.grad = None
    executor.gradients([task.batch(0)])
    assert first.weight.grad is None
    first.weight = nn.Parameter(torch.zeros(20, 12))
    loss = executor.gradients([task.batch(0)])
    assert first.weight.grad is not None
    assert loss == pytest.approx(task.loss(model, *task.batch(0)).item())
    assert len(captures) == 5
    monkeypatch.setattr(graph, "PROGRAMS_MAX", 2)
    executor._programs.clear()
    for count in (1, 2, 4, 2, 4, 1):
        executor.gradients(micro_batches(task.batch(0), count))
    assert len(captures) == 5 + 4  # 1 had to go for 4, and comes again


def test_memory_of_a_pass_is_freed_as_it_goes() -> None:
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(20)))
    task = task_of(model)
    executor = GraphExecutor(task, Offloader(PlainMultiplier(), 1))
    executor.gradients([task.batch(0)])
    ((captured, program),) = executor._programs.values()
    instance = graph.Instance(program, [*captured.trained, *captured.others, *task.batch(0)])
    with torch.no_grad():
        graph.run([instance], Offloader(PlainMultiplier(), 1))
    assert sum(value is not None for value in instance.values) == len(program.results)


def branching(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    y = model(x).mean()
    return y if y > 0 else -y


def rows_of_losses(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return model(x).flatten(1).mean(dim=1)


def test_a_module_in_another_mode_is_captured_anew() -> None:
    torch.manual_seed(1)
    model = MODELS["dropout"]()
    task = task_of(model)
    executor = GraphExecutor(task, Offloader(PlainMultiplier(), 1))
    executor.gradients([task.batch(0)])
    for module in model.children():
        module.eval()
    assert executor.gradients([task.batch(0)]) == pytest.approx(task.loss(model, *task.batch(0)).item())


def test_capture_leaves_the_model_as_it_was() -> None:
    model = MODELS["used_twice"]()
    before = dict(model.named_parameters())
    task = task_of(model)
    GraphExecutor(task, Offloader(PlainMultiplier(), 1)).gradients([task.batch(0)])
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)


@pytest.mark.parametrize("what", ["hook", "replaced buffer", "shared memory"])
def test_what_a_graph_would_do_otherwise_is_refused(what: str) -> None:
    model: nn.Module = Replacing() if what == "replaced buffer" else nn.Linear(12, 3)
    if what == "replaced buffer":
        model.register_module("more", nn.Linear(1, 1))
    elif what == "hook":
        next(model.parameters()).register_hook(lambda gradient: gradient * 0)
    else:
        model.register_buffer("one", torch.ones(3))
        model.register_buffer("other", model.get_buffer("one")[:2])
    task = task_of(model)
    with pytest.raises(CaptureError, match="eager executor"):
        GraphExecutor(task, Offloader(PlainMultiplier(), 1)).gradients([task.batch(0)])


@pytest.mark.parametrize(
    ("loss", "says"),
    [(branching, "branch on values.*eager executor"), (rows_of_losses, r"shape \(8,\), expected was one number")],
)
def test_what_cannot_be_captured_says_so(loss: Callable[..., Tensor], says: str) -> None:
    model = MODELS["mlp"]()
    task = task_of(model)
    task.loss = loss
    with pytest.raises(CaptureError, match=says):
        GraphExecutor(task, Offloader(PlainMultiplier(), 1)).gradients([task.batch(0)])


def test_an_error_of_the_multiplier_comes_through() -> None:
    class Failing(Slow):
        def finished(self, pending: Collection[Pending], block: bool) -> list[Pending]:
            raise SystemExit(3)

    task = task_of(MODELS["mlp"]())
    with pytest.raises(SystemExit):
        GraphExecutor(task, Offloader(Failing(), 1)).gradients([task.batch(0)])
