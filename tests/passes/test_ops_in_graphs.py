"""The operators as torch sees them: schemas, fake kernels, export with a varying number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from int8_twin import FIXED, fixed_parameters
from int8_twin import linear as rounded_linear
from numpy_twin import E4M3, linear, same_bits
from random_layers import KINDS, random_activations, random_weight
from torch.export import Dim
from torch_bridge import array, linear_arguments, quant_tensor, tensor

from halfbyte.passes.quant_linear import QuantLinear
from halfbyte.passes.scheme import Activations

DIGITS = {Activations.INT8: 1, Activations.FP8: E4M3, Activations.NONE: 3}
CHECKS = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activations", ["int8", "none"])
def test_linear_is_a_proper_operator(kind: str, activations: str) -> None:
    weight = random_weight(1, 6, 40, 8, kind, bias=kind == "integer")
    for x in (
        random_activations(1, 3, 40),
        random_activations(1, 1, 40)[0],
        random_activations(1, 4, 40, "f16"),
    ):
        arguments = linear_arguments(x, weight, activations)
        torch.library.opcheck(torch.ops.halfbyte.linear.default, arguments, test_utils=CHECKS)
        given = (*linear_arguments(x, weight, FIXED), tensor(fixed_parameters(0.1, 3)))
        torch.library.opcheck(torch.ops.halfbyte.linear.default, given, test_utils=CHECKS)


def test_the_others_are_proper_operators() -> None:
    x = torch.from_numpy(random_activations(2, 3, 40)).reshape(1, 3, 40)
    torch.library.opcheck(torch.ops.halfbyte.quantize_per_token.default, (x,), test_utils=CHECKS)
    arguments = (torch.zeros(2, 9, 4), torch.ones(2, 3, 4), torch.tensor([5]))
    torch.library.opcheck(torch.ops.halfbyte.cache_append.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize(("activations", "digits"), [("int4", 3), ("", 3), ("int8", 1), ("none", 4)])
def test_unknown_settings_are_refused_before_anything_runs(activations: str, digits: int) -> None:
    weight = random_weight(1, 6, 40, 8)
    arguments = linear_arguments(random_activations(1, 3, 40), weight, activations, digits)
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match="must be"),
    ):
        torch.ops.halfbyte.linear(*arguments)


@pytest.mark.parametrize("activations", [*DIGITS, Activations.INT8_AFFINE])
def test_export_keeps_the_operator_and_the_varying_number_of_rows(activations: Activations) -> None:
    """Case 92: exported once, run with any number of rows."""
    weight = random_weight(2, 12, 48, 16, "integer", bias=True)
    source = quant_tensor("layer", weight)
    module = QuantLinear("layer", source.scheme, source.shape, bias=True, activations=activations, digits=3)
    module.fill(source, tensor(weight.bias))
    example = torch.from_numpy(random_activations(1, 5, 48))
    program = torch.export.export(
        module, (example,), dynamic_shapes=({0: Dim("T", min=1, max=4096)},), strict=False
    )
    lowered = program.run_decompositions(torch.export.default_decompositions())
    for graph in (program.graph, lowered.graph):
        assert sum(node.target is torch.ops.halfbyte.linear.default for node in graph.nodes) == 1
    run = lowered.module()
    for rows in (1, 2, 7, 512, 513):
        x = random_activations(rows, rows, 48)
        if activations in DIGITS:
            want = linear(x, weight, DIGITS[activations])
        else:
            want = rounded_linear(x, weight, activations.value)
        assert same_bits(array(run(torch.from_numpy(x))), want)


def test_a_module_with_an_activation_order_reads_permuted_inputs() -> None:
    weight = random_weight(2, 12, 48, 16, "symmetric")
    order = torch.from_numpy(np.random.default_rng(0).permutation(48))
    source = quant_tensor("layer", weight)
    module = QuantLinear(
        "layer",
        source.scheme,
        source.shape,
        bias=False,
        activations=Activations.NONE,
        digits=3,
        permutation=order,
    )
    module.fill(source)
    x = random_activations(1, 3, 48)
    got = array(module(torch.from_numpy(x)))
    assert same_bits(got, linear(x[:, order.numpy()], weight, 3))


def test_an_unfilled_module_holds_no_weight() -> None:
    source = quant_tensor("layer", random_weight(2, 12, 48, 16, "minimum", "f16"))
    module = QuantLinear(
        "layer", source.scheme, source.shape, bias=True, activations=Activations.NONE, digits=3
    )
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in module.named_buffers()}
    assert all(value.is_meta for value in module.buffers())
    assert shapes == {
        "codes": ((12, 24), torch.uint8),
        "scale": ((12, 3), torch.float16),
        "minimum": ((12, 3), torch.float16),
        "bias": ((12,), torch.float32),
    }
    assert "int4 minimum, group 16, f16 scales" in repr(module)
