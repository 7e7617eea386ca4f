"""A captured graph as steps with dependencies: what may run when, within one micro-batch and between them.

The idea: a step needs the values it reads. Two things besides have an order of their own, so that the numbers are those
of micro-batch after micro-batch: operators that draw random numbers run in the order in which they were captured, and
a step that overwrites a buffer (`copy_`, BatchNorm's running statistics) keeps its place among all that use it, and
comes before any of the next micro-batch that does.

Two things are known of a product before it runs. How many products its second factor is part of (`uses`), views of it
included, so that who multiplies can keep it. And whether it is nothing but a part of a gradient (`sums`), dW = dY^T X:
then the products of all micro-batches are one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from tileweave.script.calls import factors_of, is_product


@dataclass(slots=True)
class Step:
    """One operator. `waits` counts what must come before it in its own micro-batch, `next` are the steps that wait for
    it there, `carried` those of the next micro-batch; `late` counts what it waits for of the one before. `reads` are
    the steps whose values it takes. `uses`: products of one micro-batch that its second factor is part of; `given`:
    that factor is an input of the graph, by its number."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    waits: int = 0
    late: int = 0
    next: list[int] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)
    uses: int = 1
    given: int | None = None


class Program:
    """Steps in the order of capture; `readers[i]` is how many step i's value has, the result included. `sums` are the
    products of which only results of these numbers are made, by views alone; `views` are the steps that do."""

    def __init__(self, graph: fx.GraphModule, summed: Collection[int] = ()) -> None:
        nodes = list(graph.graph.nodes)
        self.steps: list[Step] = []
        self.index: dict[fx.Node, int] = {}
        self.inputs: list[fx.Node] = [node for node in nodes if node.op == "placeholder"]
        self.constants: dict[fx.Node, Any] = {}
        for node in nodes:
            if node.op == "get_attr":
                self.constants[node] = _attribute(graph, node.target)
            elif node.op == "call_function":
                reads = tuple(self.index[n] for n in node.all_input_nodes if n in self.index)
                self.index[node] = len(self.steps)
                self.steps.append(Step(node.target, node.args, dict(node.kwargs), reads))
        (self.results,) = [list(node.args[0]) for node in nodes if node.op == "output"]
        self.readers = [0] * len(self.steps)
        for step in self.steps:
            for read in step.reads:
                self.readers[read] += 1
        for node in self.results:
            if isinstance(node, fx.Node) and node in self.index:
                self.readers[self.index[node]] += 1
        self._order(nodes)
        self._count_uses()
        self.sums: set[int] = set()
        self.views: set[int] = set()
        for number in summed:
            self._find_sum(self.results[number])

    def _count_uses(self) -> None:
        products = [(node, factors_of(node.target, node.args)) for node in self.index if is_product(node.target)]
        bases = [base for _, factors in products for base in {_base(factor) for factor in factors}]
        for node, (_, right) in products:
            base = _base(right)
            step = self.steps[self.index[node]]
            step.uses = bases.count(base)
            step.given = self.inputs.index(base) if base in self.inputs else None

    def _find_sum(self, result: Any) -> None:
        """If this result is a product seen through views, and nothing else reads it: notes both."""
        views: set[int] = set()
        node = result
        while isinstance(node, fx.Node) and node in self.index and self.readers[self.index[node]] == 1:
            number = self.index[node]
            if node.target is torch.ops.aten.mm.default:
                self.sums.add(number)
                self.views |= views
                return
            if not _is_view(node):
                return
            views.add(number)
            node = node.args[0]

    def _order(self, nodes: Sequence[fx.Node]) -> None:
        within: set[tuple[int, int]] = {(read, i) for i, step in enumerate(self.steps) for read in step.reads}
        between: set[tuple[int, int]] = set()
        drawing = [i for i, step in enumerate(self.steps) if _draws(step.func)]
        within |= set(pairwise(drawing))
        if drawing:
            between.add((drawing[-1], drawing[0]))
        for node in nodes:
            for buffer in _overwrites(node):
                writer = self.index[node]
                users = [self.index[user] for user in _users(buffer)]
                within |= {(min(user, writer), max(user, writer)) for user in users if user != writer}
                between |= {(writer, user) for user in users}
        for before, after in sorted(within):
            self.steps[before].next.append(after)
            self.steps[after].waits += 1
        for before, after in sorted(between):
            self.steps[before].carried.append(after)
            self.steps[after].late += 1


class Instance:
    """One micro-batch on its way through a program."""

    def __init__(self, program: Program, inputs: Sequence[Any], first: bool = True) -> None:
        self.program = program
        self.values: list[Any] = [None] * len(program.steps)
        self.waits = [step.waits + (0 if first else step.late) for step in program.steps]
        self._readers = list(program.readers)
        self._given = program.constants | dict(zip(program.inputs, inputs, strict=True))

    def ready(self) -> list[int]:
        """The steps that wait for nothing."""
        return [i for i, waits in enumerate(self.waits) if waits == 0]

    def arguments(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A step's arguments; all that it reads must be there."""
        step = self.program.steps[number]
        return fx.node.map_arg(step.args, self._value), fx.node.map_arg(step.kwargs, self._value)

    def done(self, number: int, value: Any) -> list[int]:
        """The step gave this value; the steps of this micro-batch that may run now. Values nobody needs any more go."""
        step = self.program.steps[number]
        if self._readers[number]:
            self.values[number] = value
        for read in step.reads:
            self._readers[read] -= 1
            if not self._readers[read]:
                self.values[read] = None
        return [i for i in step.next if self._less(i)]

    def released(self, numbers: Sequence[int]) -> list[int]:
        """The micro-batch before has done what these steps waited for; those that may run now."""
        return [i for i in numbers if self._less(i)]

    def result(self, number: int) -> Any:
        """The graph's result of this number."""
        node = self.program.results[number]
        return self._value(node) if isinstance(node, fx.Node) else node

    def _less(self, number: int) -> bool:
        self.waits[number] -= 1
        return self.waits[number] == 0

    def _value(self, node: fx.Node) -> Any:
        index = self.program.index.get(node)
        return self._given[node] if index is None else self.values[index]


def _overwrites(node: fx.Node) -> list[fx.Node]:
    """The inputs that this step changes in place. BatchNorm does not say so in its schema."""
    aten = torch.ops.aten
    changed: list[Any] = []
    if node.target is aten.copy_.default:
        changed = [node.args[0]]
    elif node.target is aten.native_batch_norm.default and node.args[5]:
        changed = list(node.args[3:5])
    return [argument for argument in changed if isinstance(argument, fx.Node)]


def _users(node: fx.Node) -> list[fx.Node]:
    """Who reads the node's memory: its users, and those of its views."""
    found = list(node.users)
    for user in node.users:
        if _is_view(user):
            found += _users(user)
    return found


def _is_view(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and any(returned.alias_info is not None for returned in schema.returns)


def _base(node: Any) -> Any:
    """What the node is a view of, if it is one."""
    while isinstance(node, fx.Node) and node.op == "call_function" and _is_view(node):
        node = node.args[0]
    return node


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _attribute(graph: fx.GraphModule, target: str) -> Any:
    value: Any = graph
    for name in target.split("."):
        value = getattr(value, name)
    return value
