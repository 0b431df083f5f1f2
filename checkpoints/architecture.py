"""What modules and parameters a checked configuration leads to.

A reader takes the names and shapes of layers from here, never from the tensors, so that a tensor of a wrong
shape is found. The model is transformers' own, on the meta device: no weight is allocated, and code that
comes with a checkpoint is never run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from halfbyte.checkpoints.experts import ExpertsShape, router_shape
from halfbyte.errors import CheckpointError

# The two layers that may share a weight, as models call them.
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
# Attention that torch's own does not compute, with sinks or bent scores; or that transformers does not leave to it.
_EAGER = ("gpt_oss", "gemma2", "vaultgemma", "granite_swa")


@dataclass(frozen=True)
class LinearShape:
    """An nn.Linear of the model: logical (N, K) and whether it has a bias."""

    shape: tuple[int, int]
    bias: bool


@dataclass(frozen=True)
class Architecture:
    """What a configuration leads to.

    Attributes:
        linears: every nn.Linear by module path, in model order, lm_head included; routers, and the linears of
            every expert.
        parameters: shape of every parameter by name, a tied ``lm_head.weight`` included.
        tied: lm_head shares the weight of the embedding.
        buffers: names of stored tensors that are no parameters, such as the bias of a router.
        experts: modules of stacked experts, by path.
        head, embedding: `HEAD` and `EMBEDDING`.
    """

    linears: dict[str, LinearShape]
    parameters: dict[str, tuple[int, ...]]
    tied: bool
    buffers: frozenset[str] = frozenset()
    experts: dict[str, ExpertsShape] = field(default_factory=dict)
    head: str = HEAD
    embedding: str = EMBEDDING

    def renamed(self, rename: Callable[[str], str]) -> Architecture:
        """The same with other names for layers, parameters and buffers."""
        return Architecture(
            {rename(name): linear for name, linear in self.linears.items()},
            {rename(name): shape for name, shape in self.parameters.items()},
            self.tied,
            frozenset(map(rename, self.buffers)),
            {rename(path): shape for path, shape in self.experts.items()},
            rename(self.head),
            rename(self.embedding),
        )


def experts_per_token(config: dict[str, Any]) -> int:
    """How many routed experts of a block each token is sent to, in a model that has some."""
    from transformers import AutoConfig

    return int(AutoConfig.for_model(**copy.deepcopy(config)).num_experts_per_tok)


def meta_model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """transformers' causal language model for a `checked_config`, on the meta device, in eval mode.

    Raises:
        CheckpointError: when transformers cannot make a model of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # Whatever transformers does with an impossible value (KeyError, ZeroDivisionError, its own validation
    # errors), the cause is the configuration.
    try:
        # A copy, since transformers writes into what it is given.
        made = AutoConfig.for_model(**copy.deepcopy(config))
        attention = "eager" if config["model_type"] in _EAGER else "sdpa"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                made, attn_implementation=attention, dtype=dtype, trust_remote_code=False
            )
    except Exception as error:
        raise CheckpointError(
            "transformers cannot make a model of this configuration",
            where="config.json",
            found=f"{type(error).__name__}: {error}"[:500],
        ) from error
    return model.eval()


def built_architecture(config: dict[str, Any]) -> Architecture:
    """The layers and parameters of the model that transformers builds for a `checked_config`.

    Raises:
        CheckpointError: see `meta_model`.
    """
    model = meta_model(config)
    linears: dict[str, LinearShape] = {}
    stacks: dict[str, ExpertsShape] = {}
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            linears[path] = LinearShape((module.out_features, module.in_features), module.bias is not None)
        elif (router := router_shape(module)) is not None:
            linears[path] = LinearShape(router, getattr(module, "bias", None) is not None)
        elif (experts := ExpertsShape.of(module)) is not None:
            stacks[path] = experts
            for leaf, _ in module.named_parameters(recurse=False):
                del parameters[f"{path}.{leaf}"]
            for name, shape in experts.linears(path):
                linears[name], parameters[f"{name}.weight"] = LinearShape(shape, experts.bias), shape
                if experts.bias:
                    parameters[f"{name}.bias"] = shape[:1]
    kept = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    return Architecture(linears, parameters, bool(model.config.tie_word_embeddings), frozenset(kept), stacks)
