"""What a manifest says of a model beyond its program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from halfbyte.checkpoints import Checkpoint
    from halfbyte.lowering.importer import Imported
    from halfbyte.lowering.kept_imports import KeptImport
    from halfbyte.lowering.options import CompileOptions
    from halfbyte.runtime.manifest import Model, Tensor


@dataclass
class Facts:
    """What the manifest says of the model beyond its program, and the program's import if it is known already."""

    model: Model
    caches: tuple[Tensor, ...] = ()
    checkpoint: Checkpoint | None = None
    kept: KeptImport | None = None
    imported: Imported | None = None


def chosen_context(config: Any, options: CompileOptions) -> int:
    """Positions of the caches: as asked, or the model's own limit, at most 2048.

    Raises:
        UsageError: more than the model has, or too few for a prompt and a token.
    """
    from halfbyte.errors import UsageError

    most = int(getattr(config, "max_position_embeddings", 2048))
    chosen = options.max_context or min(most, 2048)
    if not 2 <= chosen <= most:
        raise UsageError(
            "the context does not fit the model",
            where="--max-context",
            found=str(chosen),
            accepted=f"2 to {most}",
        )
    return chosen


def torch_dtype(options: CompileOptions) -> torch.dtype:
    """Of activations."""
    import torch

    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[options.dtype]


def model_facts(raw: dict[str, Any], config: Any, context: int, options: CompileOptions) -> Model:
    """The manifest's entry of a model.

    Args:
        raw: the checkpoint's configuration, which may name several tokens that end a text.
        config: transformers' own of it.
        context: positions of the caches.
    """
    from halfbyte.runtime.manifest import Model

    def ids(name: str) -> tuple[int, ...]:
        value = raw.get(name)
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    kind, size = str(config.model_type), int(config.vocab_size)
    return Model(kind, options.dtype, size, context, ids("bos_token_id"), ids("eos_token_id"))
