"""A whole decoder with latent attention, over caches of latents and over every head's keys and values.

    python benchmarks/latents.py --rounds 5 --depths 1024,4096

The model has DeepSeek-V2-Lite's widths, a few dense layers, and random weights (W4A16 in compressed-tensors, made in a
temporary folder); activations are int8, caches float32. Both forms are timed in turns. Prints a row for each kind of
work, {work, depth, latents_ms, every_head_ms, ratio}, the best of all rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import halfbyte
from halfbyte.runtime import Bundle, Conversation

ROOT = Path(__file__).parents[1]
CHUNK, FEW, STEPS = 512, 64, 24
VOCABULARY = 512
WIDTHS = {
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
}
Times = dict[tuple[str, int], float]


def bundles(folder: Path, layers: int, context: int, threads: int) -> dict[str, Bundle]:
    """The model compiled with latents (``on``) and without (``off``)."""
    sys.path.insert(0, str(ROOT / "tests" / "checkpoints"))
    from made_experts import made_model, quantize, write_experts

    layered = {"num_hidden_layers": layers, "first_k_dense_replace": layers}
    made = made_model("deepseek_v2 greedy", **WIDTHS, **layered, max_position_embeddings=context)
    quantize(made, lambda name: "_proj" in name)
    model, out = write_experts(folder / "model", made), {}
    for choice in ("on", "off"):
        options = halfbyte.CompileOptions(max_context=context, latent_cache=choice, activations="int8")
        out[choice] = halfbyte.load(halfbyte.compile(model, folder / choice, options).path, threads=threads)
    return out


def times(bundle: Bundle, depths: list[int], tokens: list[int]) -> Times:
    """Milliseconds by work and how many positions are before it."""
    found: Times = {}
    for depth in (0, *depths):
        conversation = Conversation(bundle)
        for first in range(0, depth or CHUNK, CHUNK):
            start = time.perf_counter()
            conversation.prefill(tokens[first : first + CHUNK])
            found[f"{CHUNK} tokens", first] = (time.perf_counter() - start) * 1e3
        if not depth:
            conversation = Conversation(bundle)
            conversation.prefill(tokens[:FEW])
        conversation.step(1)
        each = []
        for token in tokens[:STEPS]:
            start = time.perf_counter()
            conversation.step(token)
            each.append(time.perf_counter() - start)
        found["a token", depth or FEW] = float(np.median(each)) * 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--depths", default="1024,4096", help="multiples of 512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    depths = [int(depth) for depth in options.depths.split(",")]
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, max(depths) + CHUNK).tolist()
    best: dict[str, Times] = {}
    with tempfile.TemporaryDirectory() as scratch:
        both = bundles(Path(scratch), options.layers, 2 * max(depths), options.threads)
        for _ in range(options.rounds):
            for choice, bundle in both.items():
                for work, taken in times(bundle, depths, tokens).items():
                    known = best.setdefault(choice, {})
                    known[work] = min(known.get(work, taken), taken)
    shown = {(f"{CHUNK} tokens", depth - CHUNK) for depth in (CHUNK, *depths)}
    shown |= {("a token", depth) for depth in (FEW, *depths)}
    rows = []
    for work, depth in sorted(shown):
        on, off = (best[choice][work, depth] for choice in ("on", "off"))
        row = dict(work=work, depth=depth, latents_ms=round(on, 1), every_head_ms=round(off, 1))
        rows.append(row | dict(ratio=round(on / off, 2)))
        print(json.dumps(rows[-1]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
