"""What every packed layer of a bundle was given in the float model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.archived_layers import block_of
from halfbyte.progress import Progress

if TYPE_CHECKING:
    import torch

    from halfbyte.check_layers import LayerInputs
    from halfbyte.checkpoints import Checkpoint
    from halfbyte.lowering.layer_program import ArchivedLayer

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+).*")


def run_float(
    model: Any,
    checkpoint: Checkpoint,
    tokens: np.ndarray[Any, Any],
    layers: Sequence[ArchivedLayer],
    progress: Progress,
) -> tuple[dict[str, LayerInputs], np.ndarray[Any, Any]]:
    """What every layer was given and gave, by its name, and the logits [T, vocabulary].

    A linear of a single expert has no module in the float model: it is given what its block's module was, all
    tokens, or what its expert makes of them.
    """
    import torch

    from halfbyte.checkpoints.experts import ExpertsShape

    paths = {checkpoint.name_of(path): path for path, _ in model.named_modules()}
    seen: dict[str, LayerInputs] = {}
    hooks = []

    def keep(layer: ArchivedLayer, change: Callable[[LayerInputs], LayerInputs] | None) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            *given, gave = [value.detach().reshape(-1, value.shape[-1]) for value in (*inputs, output)]
            found = (tuple(given), gave)
            shape = ExpertsShape.of(module)
            if shape is not None and shape.weighed:
                found = _unsorted(found, shape.experts, model.config.num_experts_per_tok)
            seen[layer.name] = found if change is None else change(found)
            progress.advance(len(seen), len(layers))

        return hook

    for layer in layers:
        path, change = paths.get(layer.members[0]), None
        if path is None:
            path = block_of(layer.name)
            if (single := _EXPERT.fullmatch(path)) is not None:
                path, change = single[1], _inside(model, checkpoint, single)
            elif path != layer.name:
                change = _some(model.get_submodule(path), layer)
        hooks.append(model.get_submodule(path).register_forward_hook(keep(layer, change)))
    try:
        with torch.no_grad():
            logits = model(torch.from_numpy(np.array(tokens))[None]).logits[0].float().numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return seen, logits


def _unsorted(seen: LayerInputs, experts: int, chosen: int) -> LayerInputs:
    """From what Llama 4's experts are given, [E * T, H], to the rows of the experts chosen, their numbers, and ones.

    Rows of the others are zeros.
    """
    import torch

    (given,), gave = seen[0], seen[1]
    rows, results = given.unflatten(0, (experts, -1)), gave.unflatten(0, (experts, -1))
    ids = rows.abs().amax(-1).T.topk(chosen, -1).indices
    places = torch.arange(ids.shape[0])[:, None]
    each = ids.reshape(-1, 1)
    own = (rows[ids, places].flatten(0, 1), each, torch.ones(each.shape))
    return own, results[ids, places].flatten(0, 1)


def _some(module: Any, layer: ArchivedLayer) -> Callable[[LayerInputs], LayerInputs]:
    """From what a module of experts was given and gave to the same of some of its experts, under their own numbers."""
    import torch

    found = [_EXPERT.fullmatch(member) for member in layer.members[::3]]
    numbers = torch.tensor([int(match[2]) for match in found if match is not None])

    def change(seen: LayerInputs) -> LayerInputs:
        (x, ids, weights), _ = seen
        same = ids[..., None] == numbers
        theirs = same.any(-1)
        own = torch.where(theirs, same.int().argmax(-1), -1)
        return (x, own, weights), module.forward(x, ids, weights * theirs)  # forward: no hook sees this call

    return change


def _inside(
    model: Any, checkpoint: Checkpoint, single: re.Match[str]
) -> Callable[[LayerInputs], LayerInputs]:
    """From the inputs of a module of experts to those of one of its linears, whose result nobody compares with it."""
    import torch

    from halfbyte.checkpoints.expert_layers import product_of
    from halfbyte.checkpoints.model import float_weight
    from halfbyte.passes.mixed_experts import product

    block, expert, leaf = single.groups()
    if leaf != "down_proj":
        return lambda seen: (seen[0][:1], seen[1])
    glu = product_of(block, model.get_submodule(block))

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        own = checkpoint.name_of(f"{block}.{expert}.{name}")
        bias = float_weight(checkpoint, f"{own}.bias").float() if checkpoint.layers[own].bias else None
        return torch.nn.functional.linear(x, float_weight(checkpoint, f"{own}.weight").float(), bias)

    def change(seen: LayerInputs) -> LayerInputs:
        x = seen[0][0]
        return (product(linear(x, "gate_proj"), linear(x, "up_proj"), *glu),), seen[1]

    return change
