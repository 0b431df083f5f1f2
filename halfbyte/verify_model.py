"""Compares a bundle with its checkpoint: layer by layer on the same inputs, and whole by its logits."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch

    from halfbyte.checkpoints import Checkpoint, LayerInfo
    from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.lowering.layer_program import ArchivedLayer
    from halfbyte.lowering.targets.cpu import CpuTarget
    from halfbyte.runtime import Bundle

# Kernels of e4m3 weights add inside a piece of a block in float32, the reference adds it exactly.
FP8_LIMIT = 1e-5
_TEXT = (
    "A weight that has been cut down to four bits still knows roughly where it was. The scale says how far apart "
    "sixteen marks stand, and the code says at which of them the weight came to rest."
)


@dataclass(frozen=True)
class LayerCheck:
    """One packed linear against its operator's reference, given the same input.

    Attributes:
        name: as the archive calls it; merged layers are checked as one.
        rows: tokens compared.
        equal: whether every output has the bits of the reference.
        error: largest difference to the reference, over the largest output of its row.
        limit: of ``error`` by the kernel's own promise: 0, or `FP8_LIMIT` for e4m3 weights.
        float_error: the same against the float layer: what quantizing the activations costs.
    """

    name: str
    rows: int
    equal: bool
    error: float
    float_error: float
    limit: float = 0.0


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        layers: every quantized layer.
        tokens: how many tokens the model was given.
        logits_error: largest difference to the float model's logits, over the largest of them.
        kl: mean Kullback-Leibler divergence of the next token from the float model, in nats.
        agreement: share of positions whose most likely token is the float model's.
        step_error: largest difference between forward's last logits and those of prefill and decode.
        failures: what is over its limit; empty when all is well.
    """

    layers: tuple[LayerCheck, ...]
    tokens: int
    logits_error: float
    kl: float
    agreement: float
    step_error: float
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """What is allowed; None takes the default for how the bundle was compiled.

    Attributes:
        layer: of `LayerCheck.error`. By default `LayerCheck.limit`: a CPU gives the bits of the reference, but
            for layers with e4m3 weights.
        logits: of `Verification.logits_error`; by default 1e-4 where all activations are float32 and float,
            3e-2 for 16-bit models, and no limit with quantized activations, whose rounding is chaotic through depth.
        kl: of `Verification.kl`; by default 1e-6 for float32, 1e-2 for 16 bits, 0.5 with quantized activations.
    """

    layer: float | None = None
    logits: float | None = None
    kl: float | None = None

    def settled(self, dtype: str, dynamic: bool) -> tuple[float, float]:
        """Of logits and kl."""
        wide = dtype == "f32"
        logits = float("inf") if dynamic else 1e-4 if wide else 3e-2
        kl = 0.5 if dynamic else 1e-6 if wide else 1e-2
        return (
            logits if self.logits is None else self.logits,
            kl if self.kl is None else self.kl,
        )


def verify(
    bundle: str | Path,
    model: str | Path,
    *,
    tokens: Sequence[int] | None = None,
    limits: Limits | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> Verification:
    """Compares a bundle with the checkpoint it was compiled from.

    The float model (transformers, float32, weights dequantized) runs once over the tokens. Each quantized layer
    of the bundle gets the very inputs that layer had there, and is compared with the operator's reference; the
    bundle's logits are compared with the float model's.

    Args:
        bundle: a folder written by compile.
        model: its checkpoint.
        tokens: at least two; a sentence, or seeded numbers for a bundle without a tokenizer, if left out.
        limits: what counts as a failure.
        device: where the bundle runs.
        threads: worker threads of a CPU.

    Raises:
        CheckpointError: the bundle does not hold what the checkpoint says.
    """
    from halfbyte.checkpoints import load_float_model, open_checkpoint
    from halfbyte.runtime import load

    folder = Path(bundle)
    loaded = load(folder, device=device, threads=threads)
    checkpoint = open_checkpoint(Path(model))
    report = json.loads((folder / "report.json").read_text())
    options, merged = report["options"], report["merged"]
    numbers = np.asarray(tokens if tokens is not None else _default_tokens(folder, loaded), np.int64)
    if len(numbers) < 2:
        raise UsageError("verify needs at least two tokens", found=str(len(numbers)))
    float_model = load_float_model(checkpoint)
    layers = archived_layers(loaded, checkpoint, options, merged)
    inputs, expected = _run_float(float_model, numbers, layers)
    checks = _check_layers(folder, loaded, checkpoint, layers, inputs, options)
    got = _logits(loaded, numbers)
    return _judge(loaded, checks, numbers, got, expected, limits or Limits())


def _default_tokens(folder: Path, bundle: Bundle) -> list[int]:
    from halfbyte.runtime.tokenizer import Tokenizer

    vocabulary, context = bundle.manifest.model.vocabulary or 2, bundle.manifest.model.max_context or 64
    if bundle.manifest.tokenizer:
        found = list(Tokenizer(folder).encode(_TEXT))[: min(64, context - 1)]
        if len(found) >= 2:
            return found
    return [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, min(32, context - 1))]


def archived_layers(
    bundle: Bundle, checkpoint: Checkpoint, options: Mapping[str, Any], merged: Mapping[str, list[str]]
) -> list[ArchivedLayer]:
    """The packed linears of a bundle's archive, from its keys and what the checkpoint says of their members."""
    from halfbyte.lowering.layer_program import ArchivedLayer
    from halfbyte.lowering.targets.cpu import CpuTarget
    from halfbyte.runtime.program import choose_program

    out = []
    target = CpuTarget.named(choose_program(bundle.device, bundle.manifest).cpu or "host")
    dtype = bundle.manifest.model.dtype
    keys = [key for archive in bundle.manifest.parameters for key in archive.tensors]
    for key in keys:
        if not key.endswith(".codes"):
            continue
        name = key.removesuffix(".codes")
        members = [checkpoint.layers.get(member) for member in merged.get(name, [name])]
        known = [member for member in members if member is not None and member.scheme is not None]
        if len(known) < len(members):
            raise CheckpointError(
                "the bundle holds a layer that the checkpoint does not",
                where=name,
                advice="verify against the checkpoint that the bundle was compiled from",
            )
        linear = _kernels(target, known, dtype, options)
        out.append(ArchivedLayer(name, linear, tuple(merged.get(name, [name]))))
    return out


def _kernels(
    target: CpuTarget, members: Sequence[LayerInfo], dtype: str, options: Mapping[str, Any]
) -> Linear | Fp8Linear:
    """The kernels that compute a layer merged from these members."""
    from halfbyte.layer_activations import LayerActivations
    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.lowering.layout import Packing
    from halfbyte.passes.scheme import Activations, Fp8Scheme

    first = members[0]
    inputs, scheme, activations = (
        first.shape[1],
        first.scheme,
        LayerActivations.of(options).choose(first),
    )
    outputs = sum(member.shape[0] for member in members)
    assert scheme is not None
    if isinstance(scheme, Fp8Scheme):
        quantized = activations is Activations.FP8
        return target.fp8_linear(outputs, inputs, scheme.block_inputs, dtype, first.bias, quantized)
    return Linear(
        target.isa,
        Packing(outputs, inputs, scheme.group_size, scheme.bits),
        dtype,
        scheme.scale_dtype,
        scheme.zero,
        first.bias,
        activations,
        3 if dtype == "f32" else 2,
        int(options["min_tokens"]),
        target.soft_f16,
    )


def _run_float(
    model: Any, tokens: np.ndarray[Any, Any], layers: Sequence[ArchivedLayer]
) -> tuple[dict[str, torch.Tensor], np.ndarray[Any, Any]]:
    """The inputs of every layer, [T, K] by its first member, and the logits [T, vocabulary]."""
    import torch

    seen: dict[str, torch.Tensor] = {}
    hooks = []

    def keep(name: str) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            seen[name] = inputs[0].detach().reshape(-1, inputs[0].shape[-1])

        return hook

    for layer in layers:
        module = model.get_submodule(layer.members[0])
        hooks.append(module.register_forward_pre_hook(keep(layer.name)))
    try:
        with torch.no_grad():
            logits = model(torch.from_numpy(np.array(tokens))[None]).logits[0].float().numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return seen, logits


def _check_layers(
    folder: Path,
    bundle: Bundle,
    checkpoint: Checkpoint,
    layers: Sequence[ArchivedLayer],
    inputs: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
) -> list[LayerCheck]:
    if not layers:
        return []
    with tempfile.TemporaryDirectory(prefix="halfbyte-verify-") as scratch:
        runner = _layer_bundle(Path(scratch), folder, bundle, layers, options)
        return [_check_layer(runner, checkpoint, layer, inputs[layer.name]) for layer in layers]


def _layer_bundle(
    scratch: Path, folder: Path, bundle: Bundle, layers: Sequence[ArchivedLayer], options: Mapping[str, Any]
) -> Bundle:
    """A bundle of single layers: the same kernels and target, the same archive."""
    from dataclasses import replace

    from halfbyte.lowering.bundle import sha256, write_json
    from halfbyte.lowering.compiler import compile_module
    from halfbyte.lowering.layer_program import layer_program
    from halfbyte.lowering.targets.cpu import CpuTarget
    from halfbyte.runtime import load
    from halfbyte.runtime.manifest import FILE_NAME, EntryPoint, Manifest, Model, Tensor
    from halfbyte.runtime.program import choose_program

    program = choose_program(bundle.device, bundle.manifest)
    target = CpuTarget.named(program.cpu or "host")
    host = ",".join(sorted(target.features)) if target.cpu == "host" else ""
    vmfb, _ = compile_module(layer_program(layers), [*target.flags, *options["iree_flags"]], host=host)
    (scratch / program.file).write_bytes(vmfb)
    for archive in bundle.manifest.parameters:
        (scratch / archive.file).symlink_to((folder / archive.file).resolve())
    entries = {
        layer.function: EntryPoint(
            (Tensor("x", ("T", layer.inputs), layer.linear.io),),
            (Tensor("y", ("T", layer.outputs), layer.linear.io),),
        )
        for layer in layers
    }
    programs = (replace(program, sha256=sha256(scratch / program.file)),)
    manifest = Manifest(
        Model("graph", bundle.manifest.model.dtype), programs, bundle.manifest.parameters, entries
    )
    write_json(scratch / FILE_NAME, manifest.to_json())
    return load(scratch, device=bundle.device.spec, threads=bundle.device.threads)


def _check_layer(runner: Bundle, checkpoint: Checkpoint, layer: ArchivedLayer, x: torch.Tensor) -> LayerCheck:
    import torch

    from halfbyte.lowering.kernels.fp8_linear import Fp8Linear
    from halfbyte.lowering.kernels.linear import Linear
    from halfbyte.passes.merge_linears import join_weights
    from halfbyte.passes.weight import Fp8Tensor

    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    linear, members = layer.linear, layer.members
    assert isinstance(linear, Linear | Fp8Linear)
    weight = join_weights(layer.name, map(checkpoint.quantized, members), layer.outputs)
    biases = [checkpoint.float_tensor(f"{member}.bias").float() for member in members] if linear.bias else []
    bias = torch.cat(biases) if biases else None
    ordered, limit = x.to(kinds[linear.io]), 0.0
    if isinstance(weight, Fp8Tensor):
        assert isinstance(linear, Fp8Linear)
        mode, limit = "fp8" if linear.quantized else "none", FP8_LIMIT
        blocks = (weight.block_outputs, weight.block_inputs)
        want = torch.ops.halfbyte.fp8_block_linear(ordered, weight.bits, weight.scale, bias, *blocks, mode)
    else:
        assert isinstance(linear, Linear)
        ordered = ordered if weight.permutation is None else ordered[:, weight.permutation]
        want = torch.ops.halfbyte.linear(
            ordered,
            weight.packed(),
            weight.scale,
            weight.zero,
            weight.minimum,
            bias,
            weight.bits,
            weight.group_size,
            linear.activations.value,
            linear.digits,
            linear.min_tokens,
        )
    want = want.float()
    carrier = ordered.view(torch.uint16) if linear.io == "bf16" else ordered
    [raw] = runner.call(layer.function, carrier.contiguous().numpy())
    got = torch.from_numpy(np.array(raw))
    got = (got.view(torch.bfloat16) if linear.io == "bf16" else got).float()
    exact = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    return LayerCheck(
        layer.name,
        int(x.shape[0]),
        bool(torch.equal(got, want)),
        _row_error(got.double(), want.double()),
        _row_error(got.double(), exact),
        limit,
    )


def _row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    largest = want.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    error = ((got - want).abs() / largest).amax()
    return float(error) if bool(error == error) else float("inf")


def _logits(bundle: Bundle, tokens: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """By entry point: forward's [T, vocabulary], and the last logits through prefill and decode."""
    from halfbyte.runtime import Conversation
    from halfbyte.runtime.logits import all_logits

    numbers = [int(token) for token in tokens]
    conversation = Conversation(bundle)
    conversation.prefill(numbers[:-1])
    return {"forward": all_logits(bundle, numbers), "step": conversation.step(numbers[-1])}


def _judge(
    bundle: Bundle,
    checks: list[LayerCheck],
    tokens: np.ndarray[Any, Any],
    got: Mapping[str, np.ndarray[Any, Any]],
    expected: np.ndarray[Any, Any],
    limits: Limits,
) -> Verification:
    model = bundle.manifest.model
    dynamic = any(layer.activations in ("int8", "fp8") for layer in bundle.manifest.layers)
    logits_limit, kl_limit = limits.settled(model.dtype, dynamic)
    forward, largest = got["forward"], float(np.abs(expected).max())
    error = float(np.abs(forward - expected).max() / largest)
    p, q = _log_softmax(expected), _log_softmax(forward)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    agreement = float((forward.argmax(-1) == expected.argmax(-1)).mean())
    step_error = float(np.abs(got["step"] - forward[-1]).max() / largest)
    failures = []
    for check in checks:
        limit = check.limit if limits.layer is None else limits.layer
        if not check.error <= limit:
            failures.append(f"{check.name}: error {check.error:.2e} over {limit:.0e}")
    if not error <= logits_limit:
        failures.append(f"logits: error {error:.2e} over {logits_limit:.0e}")
    if not kl <= kl_limit:
        failures.append(f"logits: KL {kl:.2e} over {kl_limit:.0e}")
    if not dynamic and not step_error <= logits_limit:
        failures.append(
            f"prefill and decode: differ from forward by {step_error:.2e}, over {logits_limit:.0e}"
        )
    return Verification(
        tuple(checks), len(tokens), error, max(kl, 0.0), agreement, step_error, tuple(failures)
    )


def _log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))
