"""Passes in order, hooks between them, rows in the report; the parts of a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dequantizing_models import GptqLinear
from random_layers import random_activations, random_weight
from rewritten_graphs import Named, export

import halfbyte
from halfbyte.passes.grouping import find_groups
from halfbyte.passes.pipeline import Pass, run_passes
from halfbyte.passes.program import Program, drop_dead_state, state_names
from halfbyte.passes.state_eval import StateEval


def program() -> Program:
    modules = {name: GptqLinear(random_weight(1, 8, 64, 16)) for name in ("a", "b")}
    return Program({"forward": export(Named(**modules), random_activations(1, 5, 64))})


@dataclass(frozen=True)
class _Counting:
    name: str
    changes: int

    def run(self, program: Program) -> int:
        return self.changes


def test_hooks_are_called_after_every_pass_in_order() -> None:
    called: list[str] = []
    passes = [_Counting("first", 2), _Counting("second", 0)]
    whole = program()

    def hook(step: Pass, given: Program) -> None:
        assert given is whole
        called.append(f"{step.name} after {len(given.report.passes)}")

    run_passes(whole, passes, [hook, hook])
    assert called == ["first after 1"] * 2 + ["second after 2"] * 2
    assert [(row["name"], row["changed"]) for row in whole.report.passes] == [("first", 2), ("second", 0)]
    assert all(row["seconds"] >= 0 for row in whole.report.passes)


@dataclass(frozen=True)
class _Breaking:
    name: str = "breaking"

    def run(self, program: Program) -> int:
        graph = program.entries["forward"].graph
        node = next(node for node in graph.nodes if node.op == "call_function")
        with graph.inserting_after(list(graph.nodes)[-2]):
            late = graph.call_function(torch.ops.aten.neg.default, (node,))
        next(user for user in node.users if user is not late).args = (late,)
        return 1


def test_a_pass_that_breaks_a_graph_is_noticed() -> None:
    with pytest.raises(RuntimeError):
        run_passes(program(), [_Breaking()])


def test_rewrite_runs_the_passes_and_their_hooks() -> None:
    called: list[str] = []
    whole = halfbyte.rewrite(program().entries["forward"], hooks=[lambda step, _: called.append(step.name)])
    assert called == [
        "unwrap-subclasses",
        "find-dequantized-linears",
        "merge-linears",
        "find-attention",
        "find-norms",
    ]
    assert [(row["name"], row["changed"]) for row in whole.report.passes] == [
        ("unwrap-subclasses", 0),
        ("find-dequantized-linears", 2),
        ("merge-linears", 1),
        ("find-attention", 0),
        ("find-norms", 0),
    ]
    assert set(whole.report.to_json()) >= {"layers", "refusals", "warnings", "passes"}


class _Partly(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(6.0))
        self.scale = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = (self.table * self.scale + torch.ones(6)).reshape(2, 3)
        return known + x


def test_state_is_evaluated_and_inputs_are_not() -> None:
    entry = torch.export.export(_Partly(), (torch.zeros(2, 3),), strict=False)
    evaluate = StateEval(entry)
    nodes = {node.name: node for node in entry.graph.nodes}
    known = next(node for name, node in nodes.items() if name.startswith(("reshape", "view")))
    np.testing.assert_array_equal(evaluate(known).numpy(), np.arange(6.0).reshape(2, 3) * 3 + 1)
    assert evaluate(known) is evaluate(known)
    last = [node for node in entry.graph.nodes if node.op == "call_function"][-1]
    assert evaluate(nodes["x"]) is None
    assert evaluate(last) is None
    assert not evaluate.known(last)
    assert evaluate.known(known) and evaluate.known(7)


class _Unused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("used", torch.ones(3))
        self.register_buffer("dead", torch.ones(4))
        self.never = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dead.double().sum()
        return x + self.used


def test_state_that_nobody_reads_is_dropped() -> None:
    entry = torch.export.export(_Unused(), (torch.zeros(3),), strict=False)
    assert set(state_names(entry).values()) == {"used", "dead", "never"}
    drop_dead_state(entry)
    entry.graph.lint()
    assert set(state_names(entry).values()) == {"used"}
    assert set(entry.state_dict) == {"used"}
    np.testing.assert_array_equal(entry.module()(torch.zeros(3)).numpy(), np.ones(3))


# ---------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("labels", "size"),
    [
        ([0] * 8 + [1] * 8 + [2] * 8, 8),
        ([0] * 16 + [1] * 8, 16),
        ([0] * 24, 24),
        ([0] * 16 + [1] * 16 + [1] * 16 + [2] * 16, 16),
        ([0] * 12 + [1] * 12, 12),
        ([0] * 32 + [1] * 32 + [2] * 8, 32),
    ],
)
def test_groups_from_where_values_change(labels: list[int], size: int) -> None:
    columns = torch.tensor([labels, [7 - value for value in labels]], dtype=torch.float64)
    found = find_groups(columns)
    assert found.group_size == size
    assert found.permutation is None
    assert found.first.tolist() == list(range(0, len(labels), size))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("inputs", "size"), [(64, 16), (72, 32), (40, 16)])
def test_groups_out_of_order(seed: int, inputs: int, size: int) -> None:
    random = np.random.default_rng(seed)
    order = random.permutation(inputs)
    values = random.normal(size=(3, -(-inputs // size)))
    columns = np.empty((3, inputs))
    columns[:, order] = values[:, np.arange(inputs) // size]
    found = find_groups(torch.from_numpy(columns))
    assert found.group_size == size
    assert found.permutation is not None
    assert sorted(found.permutation.tolist()) == list(range(inputs))
    sorted_columns = columns[:, found.permutation.numpy()]
    for start in range(0, inputs, size):
        part = sorted_columns[:, start : start + size]
        assert (part == part[:, :1]).all()
    assert inputs % size == 0 or len(set(sorted_columns[0, -(inputs % size) :])) == 1
