"""The engines of decoder.py: each loads a model and gives functions that feed it tokens.

llama.cpp:      CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_BUILD_TOOLS=OFF" \\
                    pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36
                It runs without AMX: its code for tile registers ends in a segmentation fault with this model.
transformers:   comes with halfbyte's extras
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from interleave import answer, pin
from without_tiles import refuse_tiles

_BUILD = Path("build/benchmarks")


class Engine(Protocol):
    """Feeds tokens to one sequence."""

    vocabulary: int

    def reset(self) -> None: ...

    def feed(self, tokens: np.ndarray[Any, Any]) -> None:
        """All at once, up to the logits of the last."""
        ...


class Halfbyte:
    """Compiled on the spot, into build/benchmarks."""

    def __init__(self, model: Path, threads: int, context: int, **options: Any) -> None:
        import halfbyte
        from halfbyte.runtime import Conversation

        out = _BUILD / f"{model.stem}-{context}-{'-'.join(options.values()) or 'plain'}"
        halfbyte.compile(model, out, halfbyte.CompileOptions(max_context=context, **options))
        bundle = halfbyte.load(out, threads=threads)
        self.vocabulary = bundle.manifest.model.vocabulary or 0
        self.conversation = Conversation(bundle, chunk=512)

    def reset(self) -> None:
        self.conversation.reset()

    def feed(self, tokens: np.ndarray[Any, Any]) -> None:
        self.conversation.prefill(tokens)


class LlamaCpp:
    """llama.cpp through llama-cpp-python; ``q4_0`` has the file's weights quantized again, into its fastest form."""

    def __init__(self, model: Path, threads: int, context: int, q4_0: bool = False) -> None:
        refuse_tiles()
        import llama_cpp

        context = max(256, -(-context // 256) * 256)
        batch = min(512, context)
        path = str(model)
        self.silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silence, None)
        if q4_0:
            _BUILD.mkdir(parents=True, exist_ok=True)
            path = str(_BUILD / f"{model.stem}-Q4_0.gguf")
            if not Path(path).exists():
                wanted = llama_cpp.llama_model_quantize_default_params()
                wanted.ftype, wanted.allow_requantize = 2, True
                llama_cpp.llama_model_quantize(str(model).encode(), path.encode(), wanted)
        self.model = llama_cpp.Llama(
            path,
            n_ctx=context,
            n_batch=batch,
            n_ubatch=batch,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self.vocabulary = self.model.n_vocab()

    def reset(self) -> None:
        self.model.reset()
        self.model._ctx.kv_cache_clear()

    def feed(self, tokens: np.ndarray[Any, Any]) -> None:
        self.model.eval(tokens.tolist())


class Transformers:
    """transformers with weights in bfloat16 or float32."""

    def __init__(self, model: Path, threads: int, context: int, dtype: str) -> None:
        import torch

        from halfbyte.checkpoints import load_float_model, open_checkpoint

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        self.model = load_float_model(open_checkpoint(model), getattr(torch, dtype))
        self.vocabulary = self.model.config.vocab_size
        self.caches: Any = None

    def reset(self) -> None:
        self.caches = None

    def feed(self, tokens: np.ndarray[Any, Any]) -> None:
        given = self.torch.from_numpy(tokens)[None]
        done = self.model(given, past_key_values=self.caches, use_cache=True, logits_to_keep=1)
        self.caches = done.past_key_values


ENGINES: dict[str, Callable[[Path, int, int], Engine]] = {
    "halfbyte": Halfbyte,
    "halfbyte_int8": lambda *given: Halfbyte(*given, activations="int8"),
    "halfbyte_int8_bf16": lambda *given: Halfbyte(*given, activations="int8", kv_cache="bf16"),
    "llama": LlamaCpp,
    "llama_q4_0": lambda *given: LlamaCpp(*given, q4_0=True),
    "torch_bf16": lambda *given: Transformers(*given, dtype="bfloat16"),
    "torch_f32": lambda *given: Transformers(*given, dtype="float32"),
}


def parse_test(text: str) -> tuple[int, int, int]:
    """``pp512`` or ``tg64@1024`` -> tokens at once, one by one, and before."""
    kind, _, depth = text.partition("@")
    count, before = int(kind[2:]), int(depth or 0)
    return (count, 0, before) if kind.startswith("pp") else (0, count, before)


def run(engine: Engine, test: str, threads: int) -> float:
    """Tokens per second."""
    prompt, generated, depth = parse_test(test)
    tokens = np.random.default_rng(0).integers(10, engine.vocabulary - 10, prompt + generated + depth)
    clock = time.process_time if threads == 1 else time.perf_counter
    engine.reset()
    for start in range(0, depth, 512):
        engine.feed(tokens[start : min(start + 512, depth)])
    begun = clock()
    if prompt:
        engine.feed(tokens[depth:])
    else:
        for at in range(depth, depth + generated):
            engine.feed(tokens[at : at + 1])
    return (prompt + generated) / (clock() - begun)


def serve(name: str) -> None:
    """Answers decoder.py's questions: first which model, then test by test."""
    engine: Engine | None = None
    threads = 1
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if engine is None:
                threads = question["threads"]
                pin(threads)
                engine = ENGINES[name](Path(question["model"]), threads, question["context"])
                answer(ready=True)
            else:
                answer(rate=run(engine, question["test"], threads))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
