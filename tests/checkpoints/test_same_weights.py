"""The same logical weights saved in every format: equal weights, and outputs equal to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_checkpoints import dequantized
from same_weights import GROUP, random_weights, writers

from halfbyte.checkpoints import Checkpoint, build_model, open_checkpoint
from halfbyte.passes.scheme import Activations
from halfbyte.passes.weight import QuantTensor

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])


def logits(checkpoint: Checkpoint, activations: Activations) -> torch.Tensor:
    """Of the model with quantized modules, which compute with the operators' reference semantics."""
    model: Any = build_model(checkpoint, activations=lambda _: activations)
    for name, value in model.named_parameters():
        value.copy_(checkpoint.float_tensor(name))
    for name, info in checkpoint.layers.items():
        if info.scheme is not None:
            model.get_submodule(name).fill(checkpoint.quantized(name))
    with torch.no_grad():
        return torch.as_tensor(model(TOKENS).logits)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_every_format(tmp_path: Path, bits: int, symmetric: bool) -> None:
    """Case 66, and the reverse of cases 10 and 65: formats differ in nothing but their bytes."""
    weights = random_weights(bits, symmetric)
    opened = {
        name: open_checkpoint(write(tmp_path / str(at), weights))
        for at, (name, write) in enumerate(writers(bits, symmetric).items())
    }
    for name, checkpoint in opened.items():
        assert checkpoint.warnings == [], name
        for layer, parts in weights.layers.items():
            found = checkpoint.quantized(layer)
            assert isinstance(found, QuantTensor)
            assert checkpoint.layers[layer].scheme == found.scheme
            assert (found.bits, found.group_size, found.zero is None) == (bits, GROUP, symmetric), name
            wanted = dequantized(*parts, np.arange(parts[0].shape[1]) // GROUP)
            np.testing.assert_array_equal(found.dequantize().numpy(), wanted, err_msg=name)
            assert found.same_values(opened["gptq"].quantized(layer)), name  # type: ignore[arg-type]
    for activations in (Activations.NONE, Activations.INT8):
        first = logits(opened["gptq"], activations)
        assert torch.isfinite(first).all()
        for name, checkpoint in opened.items():
            assert torch.equal(logits(checkpoint, activations), first), name
    assert not torch.equal(first, logits(opened["gptq"], Activations.NONE))
