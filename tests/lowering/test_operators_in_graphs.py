"""Graphs that call halfbyte's operators themselves, among them e4m3 linears, compiled for several CPUs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from foreign_cpu import AnyBundle, obstacle, opened
from fp8_twin import Fp8Weight, fp8_block_linear, random_fp8_weight
from numpy_twin import Array, linear, quantized_per_token, same_bits, same_by_row
from random_layers import random_activations, random_weight, telling_rows
from torch_bridge import linear_arguments
from vulkan_device import far_rows, no_device, same_values

import halfbyte
from halfbyte.errors import CompilerError
from halfbyte.lowering.targets.cpu import CpuTarget

# N, K, block, activations, dtype of x: tiles that are not full, ragged blocks, one scale per output, one for all.
LAYERS = (
    *((200, 320, (128, 128), "fp8", "f32"), (72, 130, (1, 0), "fp8", "f32"), (40, 96, (0, 0), "none", "f32")),
    *(
        (64, 1000, (128, 128), "none", "f32"),
        (3, 5, (128, 128), "fp8", "f32"),
        (65, 640, (64, 320), "fp8", "f32"),
    ),
    *(
        (96, 264, (128, 128), "none", "bf16"),
        (70, 130, (1, 0), "none", "f16"),
        (66, 384, (128, 128), "fp8", "bf16"),
    ),
)
TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
WEIGHTS = [
    random_fp8_weight(seed, outputs, inputs, block, bias=seed % 2 == 0)
    for seed, (outputs, inputs, block, _, _) in enumerate(LAYERS)
]
INT4 = random_weight(1, 40, 96, 32, "integer", "f16", bias=True)
ROWS = (0, 1, 2, 3, 7, 9, 50, 101)


class _Operators(torch.nn.Module):
    """Operators called by name, on weights that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        for index, weight in enumerate(WEIGHTS):
            self._hold(f"layer{index}", weight.arguments(LAYERS[index][3])[:3])
        self._hold("int4", linear_arguments(np.zeros((1, 96), np.float32), INT4, "int8")[1:6])

    def _hold(self, name: str, tensors: tuple[object, ...]) -> None:
        for index, value in enumerate(tensors):
            if isinstance(value, torch.Tensor):
                self.register_buffer(f"{name}_{index}", value)

    def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = []
        for index, ((_, _, _, activations, _), x) in enumerate(zip(LAYERS, xs, strict=False)):
            parts = [getattr(self, f"layer{index}_{part}", None) for part in range(3)]
            block = WEIGHTS[index].block
            out.append(torch.ops.halfbyte.fp8_block_linear(x, *parts, *block, activations))
        parts = [getattr(self, f"int4_{part}", None) for part in range(5)]
        out.append(torch.ops.halfbyte.linear(xs[-1], *parts, 4, 32, "int8", 3, 0))
        return (*out, *torch.ops.halfbyte.quantize_per_token(xs[-1]))


CPUS = ("host", "amx", "avx512bf16", "x86-64-v4", "x86-64-v3", "x86-64", "aarch64")
GPUS = ("vulkan", "cuda")


@pytest.fixture(scope="module", params=[*CPUS, *GPUS])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    folder = tmp_path_factory.mktemp("operators") / "bundle"
    if request.param in GPUS:
        if no_device(request.param):
            pytest.skip(no_device(request.param))
        path = _compiled(folder, halfbyte.CompileOptions(target=request.param))
        return halfbyte.load(path, device=request.param)
    target = CpuTarget.named(request.param)
    if why := obstacle(target):
        pytest.skip(why)
    return opened(_compiled(folder, halfbyte.CompileOptions(cpu=request.param)), target)


def _compiled(folder: Path, options: halfbyte.CompileOptions) -> Path:
    rows = torch.export.Dim("T", min=0, max=4096)
    xs = (*(torch.zeros(5, inputs, dtype=TORCH[io]) for _, inputs, _, _, io in LAYERS), torch.zeros(5, 96))
    program = torch.export.export(_Operators(), xs, dynamic_shapes=(tuple({0: rows} for _ in xs),))
    return halfbyte.compile(program, folder, options).path


def _on_gpu(bundle: AnyBundle) -> bool:
    return bundle.manifest.programs[0].target in GPUS


def _inputs() -> list[Array]:
    kinds = [*((inputs, io) for _, inputs, _, _, io in LAYERS), (96, "f32")]
    out = [random_activations(width, max(ROWS), width, io) for width, io in kinds]
    for x, (_, io) in zip(out, kinds, strict=True):
        telling = telling_rows(x.shape[1], io)[[0, 2, 4, 5, 8]]  # zeros, one value, NaN, Inf, tiny
        x[1:6] = telling
    return out


def _near(got: Array, want: Array, weight: Fp8Weight) -> bool:
    """float32 sums within a block may be ordered otherwise than the exact ones; a cast may fall to either side."""
    if want.dtype == ml_dtypes.bfloat16:
        got = got.view(want.dtype)
    assert got.dtype == want.dtype
    ulp = 2 * float(ml_dtypes.finfo(want.dtype).eps) if want.dtype != np.float32 else 0.0
    got, want = got.astype(np.float64), want.astype(np.float64)
    bad = ~np.isfinite(want)
    if not np.array_equal(bad, ~np.isfinite(got)):
        return False
    largest = np.abs(np.where(bad, 0, want)).max(-1, keepdims=True, initial=1e-30)
    off = np.abs(np.where(bad, 0, got - np.where(bad, 0, want)))
    return bool((off <= 2e-6 * largest + ulp * np.abs(np.where(bad, 0, want))).all())


def _call(bundle: AnyBundle, xs: list[Array]) -> tuple[Array, ...]:
    carriers = (x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for x in xs)
    return tuple(bundle.call("forward", *carriers))


def test_equals_the_references(bundle: AnyBundle) -> None:
    xs = _inputs()
    with np.errstate(invalid="ignore"):
        wanted = [
            fp8_block_linear(x, weight, layer[3] == "fp8")
            for x, weight, layer in zip(xs, WEIGHTS, LAYERS, strict=False)
        ]
        int4, (codes, scales) = linear(xs[-1], INT4, 1), quantized_per_token(xs[-1])
        for rows in ROWS:
            *got, y, got_codes, got_scales = _call(bundle, [x[:rows] for x in xs])
            for layer, value, want, weight in zip(LAYERS, got, wanted, WEIGHTS, strict=True):
                assert _near(value, want[:rows], weight), (layer, rows)
            if _on_gpu(bundle):
                assert not far_rows(y, int4[:rows])
            else:
                assert same_bits(y, int4[:rows]), same_by_row(y, int4[:rows])
            np.testing.assert_array_equal(got_codes, codes[:rows])
            assert same_bits(got_scales, scales[:rows])


def test_a_row_of_a_batch_equals_the_row_alone(bundle: AnyBundle) -> None:
    xs, same = _inputs(), same_values if _on_gpu(bundle) else same_bits
    together = _call(bundle, xs)
    for row in (0, 1, 7, 50, 100):
        alone = _call(bundle, [x[row : row + 1] for x in xs])
        for one, batch in zip(alone, together, strict=True):
            assert same(one, batch[row : row + 1])


def test_the_report_names_them(bundle: AnyBundle) -> None:
    layers = {layer.name: layer for layer in bundle.manifest.layers}
    assert len(layers) == len(LAYERS) + 1
    for index, (outputs, inputs, _, activations, _) in enumerate(LAYERS):
        layer = layers[f"layer{index}_0"]
        assert layer.shape == (outputs, inputs) and layer.activations == activations
        assert layer.scheme.startswith("e4m3, blocks of ") and "fp8" in layer.kernel
    assert (
        layers["int4_0"].scheme.startswith("int4 integer, group 32") and "w4_int8" in layers["int4_0"].kernel
    )


def test_weights_that_make_no_sense_are_refused() -> None:
    module = _Operators()
    module.get_buffer("layer1_0")[3, 4] = 0x7F
    xs = (*(torch.zeros(5, inputs, dtype=TORCH[io]) for _, inputs, _, _, io in LAYERS), torch.zeros(5, 96))
    program = torch.export.export(module, xs)
    with pytest.raises(CompilerError, match="layer1_0") as error:
        halfbyte.compile(program, "unused")
    assert "NaN" in str(error.value)
