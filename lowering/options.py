"""What a caller can choose about a compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class CompileOptions:
    """Options of a compilation; the command line's have the same names.

    Attributes:
        target: ``cpu``, ``vulkan``, ``cuda``, or several separated by commas: a program for each, over one archive.
        activations: ``auto`` as the checkpoint asks for; ``int8`` (W4A8, W8A8), ``fp8`` (W4AFP8) or ``none``
            (W4A16, W8A16) for every quantized layer.
        layers: ``PATTERN=KIND``, other activations for layers by name: ``*.mlp.*=int8``. The last that fits counts.
        min_tokens: with int8 activations, calls with fewer tokens take the W4A16 path. A row's bits then
            depend on how many rows come with it. 0: never.
        max_context: positions of the key and value caches; None: the model's own limit, at most 2048.
        cpu: ``host``, or names of `halfbyte.lowering.targets.cpu.names` separated by commas: a program for each,
            of which the runtime takes the best that the machine can run.
        vulkan_target: ``portable`` (any device of Vulkan 1.3 with integer dot products), ``portable-nodot``, a name of
            iree-compile's ``--iree-vulkan-target``, or a file that holds IREE's description of a device; several
            separated by commas.
        cuda_arch: names of `halfbyte.lowering.targets.cuda`, separated by commas: a program for each.
        fat: one .vmfb for all targets, of one kind each, instead of one per target.
        lm_head: ``auto`` rounds a large head in float to 8 bits if that is measured to cost little
            (`halfbyte.choose_head`); ``keep`` leaves the head as the checkpoint has it; ``int8`` (groups of 64) and
            ``int4`` (of 32) round one that is in float. `verify` tells what that costs.
        on_unsupported: ``error`` refuses a model with layers that cannot be computed as quantized; ``float``
            computes those with their dequantized weights.
        dtype: of activations: ``f32``, ``f16`` or ``bf16``.
        kv_cache: of the key and value caches: ``f32``, which adds no error, or ``f16`` or ``bf16``, half of its bytes.
        latent_cache: caches of latents, for models with latent attention, instead of keys and values of every head:
            ``auto`` wherever the model has it, ``on``, or ``off``.
        fuse: what is computed together with the linears beside it: ``all``, ``none``, or some of ``norm`` (before),
            ``glu`` and ``residual`` (after), ``rotate`` (rotations read the merged linear's rows), separated by
            commas.
        sample: where the next token is drawn: ``host``, from the logits, or ``program``: prefill and decode then give a
            token too.
        dump_dir: folder for every stage of the compilation.
        iree_flags: more flags for iree-compile.
        cache: use the cache of imports and compiled programs.
    """

    target: str = "cpu"
    activations: Literal["auto", "int8", "fp8", "none"] = "auto"
    layers: tuple[str, ...] = ()
    min_tokens: int = 0
    max_context: int | None = None
    cpu: str = "host"
    vulkan_target: str = "portable"
    cuda_arch: str = "sm_80"
    fat: bool = False
    lm_head: Literal["auto", "keep", "int8", "int4"] = "auto"
    on_unsupported: Literal["error", "float"] = "error"
    dtype: Literal["f32", "f16", "bf16"] = "f32"
    kv_cache: Literal["f32", "f16", "bf16"] = "f32"
    latent_cache: Literal["auto", "on", "off"] = "auto"
    fuse: str = "all"
    sample: Literal["host", "program"] = "host"
    dump_dir: Path | None = None
    iree_flags: tuple[str, ...] = field(default=())
    cache: bool = True
