"""Compares a bundle with its checkpoint: layer by layer on the same inputs, and whole by its logits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.check_layers import LayerCheck, check_layers
from halfbyte.divergence import divergence
from halfbyte.errors import UsageError
from halfbyte.progress import Progress
from halfbyte.sample_text import sample_tokens

if TYPE_CHECKING:
    from halfbyte.runtime import Bundle


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
        head_kl: what rounding the head (``--lm-head``) costs by itself: the same divergence, between the float models
            with the rounded head and with the checkpoint's own; None where it was kept.
    """

    layers: tuple[LayerCheck, ...]
    tokens: int
    logits_error: float
    kl: float
    agreement: float
    step_error: float
    failures: tuple[str, ...]
    head_kl: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """What is allowed; None takes the default for how the bundle was compiled.

    Attributes:
        layer: of `LayerCheck.error`. By default `LayerCheck.limit`: a CPU gives the bits of the reference, but
            for layers with e4m3 weights.
        logits: of `Verification.logits_error`; by default 1e-4 where all activations and caches are float32, 3e-2
            where some have 16 bits, and no limit with quantized activations, whose rounding is chaotic through depth.
        kl: of `Verification.kl`; by default 1e-6 for float32, 1e-2 for 16 bits, 0.5 with quantized activations.
    """

    layer: float | None = None
    logits: float | None = None
    kl: float | None = None

    def settled(self, wide: bool, dynamic: bool) -> tuple[float, float]:
        """Of logits and kl.

        Args:
            wide: all activations and caches are float32.
            dynamic: some activations are quantized.
        """
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
    progress: Progress | None = None,
) -> Verification:
    """Compares a bundle with the checkpoint it was compiled from.

    The float model (transformers, float32, weights dequantized) runs once over the tokens, with the weights of one
    decoder layer in memory. Each quantized layer of the bundle gets the very inputs that layer had there, and is
    compared with the operator's reference; the bundle's logits are compared with the float model's. A rounded head
    makes a second run, with the checkpoint's own. The bundle's archives are mapped: a few calls do not pay for a copy.

    Args:
        bundle: a folder written by compile.
        model: its checkpoint.
        tokens: at least two; a sentence, or seeded numbers for a bundle without a tokenizer, if left out.
        limits: what counts as a failure.
        device: where the bundle runs.
        threads: worker threads of a CPU.
        progress: told of the phases ``float model``, ``layers``, ``logits`` and ``head``.

    Raises:
        CheckpointError: the bundle does not hold what the checkpoint says.
    """
    from halfbyte.archived_layers import archived_layers
    from halfbyte.checkpoints import open_checkpoint
    from halfbyte.checkpoints.quantized_head import with_head
    from halfbyte.checkpoints.streamed_model import streamed_model
    from halfbyte.choose_head import chosen_before
    from halfbyte.float_inputs import run_float
    from halfbyte.runtime import load

    folder, progress = Path(bundle), progress or Progress()
    loaded = load(folder, device=device, threads=threads, parameters="mmap")
    report = json.loads((folder / "report.json").read_text())
    own = open_checkpoint(Path(model))
    checkpoint = with_head(own, chosen_before(report))
    numbers = np.asarray(_default_tokens(folder, loaded) if tokens is None else tokens, np.int64)
    if len(numbers) < 2:
        raise UsageError(
            "verify needs at least two tokens",
            found=str(len(numbers)),
            accepted="--tokens 176,5,271, or none",
        )
    progress.phase("float model")
    float_model = streamed_model(checkpoint)
    layers = archived_layers(loaded, checkpoint, float_model, report)
    inputs, expected = run_float(float_model, checkpoint, numbers, layers, progress)
    progress.phase("layers")
    checks = check_layers(folder, loaded, checkpoint, layers, inputs, report["options"], progress)
    progress.phase("logits")
    got = _logits(loaded, numbers)
    head_kl = None
    if checkpoint is not own:
        progress.phase("head")
        before = run_float(streamed_model(own), own, numbers, [], progress)[1]
        head_kl = divergence(before, expected)
    return _judge(loaded, checks, numbers, got, expected, limits or Limits(), head_kl)


def _default_tokens(folder: Path, bundle: Bundle) -> list[int]:
    model = bundle.manifest.model
    return sample_tokens(
        folder, bool(bundle.manifest.tokenizer), model.vocabulary or 2, model.max_context or 64
    )


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
    head_kl: float | None,
) -> Verification:
    dynamic = any(layer.activations not in ("none", "float") for layer in bundle.manifest.layers)
    wide = bundle.manifest.model.dtype == "f32" and all(
        cache.dtype == "f32" for cache in bundle.manifest.caches
    )
    logits_limit, kl_limit = limits.settled(wide, dynamic)
    forward, largest = got["forward"], float(np.abs(expected).max())
    error = float(np.abs(forward - expected).max() / largest)
    kl = divergence(expected, forward)
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
        tuple(checks), len(tokens), error, max(kl, 0.0), agreement, step_error, tuple(failures), head_kl
    )
