"""Attention over key and value caches: halfbyte's kernels beside torch's scaled_dot_product_attention, in one run.

    python benchmarks/attention.py --shapes smol,llama --decode 128,1024,4096 --prefill 128,512,2048 --json rows.json
    python benchmarks/attention.py --shapes lite,lite_expanded,v3,v3_expanded --decode 1024,4096 --prefill 128,512

A decode cell is one token that sees so many positions, a prefill cell so many tokens from position 0; one thread.
Prints a table and writes rows {peer, shape, kind, length, capacity, us, us_min, gmacs, relative_error, of_limit}.
``capacity`` is the positions that the caches have room for: with --capacity a cell is measured in larger caches too.
Products of queries with keys and of weights with values are counted for what a token sees. of_limit is the share of
what the CPU's float32 unit (limits.py) or reading the caches allows. lite and v3 are latent attention over caches of
latents (values are the first columns of keys), *_expanded the same over keys and values of every head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import iree.runtime as rt
import numpy as np
import torch
from interleave import Worker, answer, pin, time_calls
from linear import limits_of_this_machine

from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.kernels.attention import Attention, AttentionShape, best_unit
from halfbyte.lowering.kernels.generator import render
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.passes.ops.attention_caches import blocks, key_cache, value_cache
from halfbyte.runtime.device import open_device


class Shape(NamedTuple):
    """Widths of keys and values, query heads, key heads; latent: there are no values but the first columns of keys."""

    width: int
    value_width: int
    heads: int
    key_heads: int
    latent: bool = False


# SmolLM2-135M, Llama-3-8B, DeepSeek-V2-Lite and DeepSeek-V3.
SHAPES = {
    "smol": Shape(64, 64, 9, 3),
    "llama": Shape(128, 128, 32, 8),
    "lite": Shape(576, 512, 16, 1, latent=True),
    "lite_expanded": Shape(192, 128, 16, 16),
    "v3": Shape(576, 512, 128, 1, latent=True),
    "v3_expanded": Shape(192, 128, 128, 128),
}
PEERS = ("halfbyte_f32", "halfbyte_bf16", "torch_f32", "torch_bf16")
_KINDS = {"f32": torch.float32, "bf16": torch.bfloat16}
_CACHE_BYTES = {"f32": 4, "bf16": 2}
Cell = dict[str, Any]


def problem(cell: Cell) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k and v [Hkv, positions, D]; the last tokens are the queries."""
    width, value_width, heads, key_heads, latent = SHAPES[cell["shape"]]
    tokens = 1 if cell["kind"] == "decode" else cell["length"]
    random = torch.Generator().manual_seed(1)
    q = torch.randn(tokens, heads, width, generator=random)
    k = torch.randn(key_heads, cell["length"], width, generator=random)
    if latent:
        return q, k, k[..., :value_width]
    return q, k, torch.randn(key_heads, cell["length"], value_width, generator=random)


def halfbyte(cell: Cell, kind: str) -> Callable[[], np.ndarray[Any, Any]]:
    """A call that runs the kernel; its result is read by calling what it returns."""
    q, k, v = problem(cell)
    tokens, heads, width = q.shape
    room = 64 * blocks(cell["capacity"]) - k.shape[1]
    # Behind the last position there may be anything.
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, room), value=float("nan")).to(_KINDS[kind]) for x in (k, v))
    latent, value_width = SHAPES[cell["shape"]].latent, v.shape[2]
    caches = [value_cache(k)] if latent else [key_cache(k), value_cache(v)]
    target = CpuTarget.named("host")
    shape = AttentionShape(heads // k.shape[0], width, value_width, width**-0.5, latent=latent)
    unit = best_unit(target.features, shape, kind, tokens == 1)
    kernel = Attention(unit, shape, "f32", "f32", kind, tokens == 1)
    types = [f"tensor<{'x'.join([*map(str, cache.shape), kind])}>" for cache in caches]
    text = render(
        "attention_tokens.mlir.j2",
        name="attend",
        kernel=kernel.symbol,
        q=(q_type := f"tensor<{tokens}x{heads}x{width}xf32>"),
        keys=types[0],
        values="" if latent else types[1],
        sinks="",
        out=(out := f"tensor<{tokens}x{heads * value_width}xf32>"),
        Hkv=k.shape[0],
        T=tokens,
        B=caches[0].shape[1],
    )
    all_types = [q_type, *types, "tensor<1xi64>"]
    names = ["%q", *[f"%c{i}" for i in range(len(types))], "%p"]
    given = ", ".join(f"{name}: {kind}" for name, kind in zip(names, all_types, strict=True))
    taken = f"({', '.join(all_types)}) -> {out}"
    body = f"%o = util.call @attend({', '.join(names)}) : {taken}\nreturn %o : {out}"
    main = f"func.func @main({given}) -> {out} {{\n{body}\n}}"
    program, _ = compile_module(f"module {{\n{kernel.text()}\n{text}\n{main}\n}}", target.flags)
    instance, device = rt.VmInstance(), open_device("cpu", 1)
    module = rt.VmModule.copy_buffer(instance, program)
    context = rt.VmContext(instance, [rt.create_hal_module(instance, device.hal), module])
    function, arguments = module.lookup_function("main"), rt.VmVariantList(len(names))
    position = np.array([cell["length"] - tokens])
    for value, element in (
        (q.numpy(), rt.HalElementType.FLOAT_32),
        *((carried(cache), element_type(kind)) for cache in caches),
        (position, rt.HalElementType.SINT_64),
    ):
        arguments.push_ref(
            device.hal.allocator.allocate_buffer_copy(
                memory_type=rt.MemoryType.DEVICE_LOCAL,
                allowed_usage=rt.BufferUsage.DEFAULT | rt.BufferUsage.MAPPING,
                device=device.hal,
                buffer=np.ascontiguousarray(value),
                element_type=element,
            )
        )
    keep = [device, instance]

    def call() -> rt.VmVariantList:
        results = rt.VmVariantList(1)
        device.call(lambda: context.invoke(function, arguments, results))
        return results

    call.read = lambda: rt.DeviceArray(keep[0].hal, call().get_as_object(0, rt.HalBufferView)).to_host()  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def carried(cache: torch.Tensor) -> np.ndarray[Any, Any]:
    return (cache.view(torch.int16) if cache.dtype is torch.bfloat16 else cache).numpy()


def element_type(kind: str) -> Any:
    return rt.HalElementType.BFLOAT_16 if kind == "bf16" else rt.HalElementType.FLOAT_32


def torch_attention(cell: Cell, kind: str) -> Callable[[], Any]:
    """The fastest of grouped heads, of keys repeated beforehand, which is not counted, and of plain products.

    The latter for a token over latents, whose heads are the rows of one product.
    """
    q, k, v = problem(cell)
    causal, group = q.shape[0] > 1, q.shape[1] // k.shape[0]
    one = q.transpose(0, 1)[None].to(_KINDS[kind]).contiguous()
    few = [x[None].to(_KINDS[kind]) for x in (k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    ways: list[Callable[[], torch.Tensor]] = [lambda: attend(one, *few, is_causal=causal, enable_gqa=True)]
    if SHAPES[cell["shape"]].latent and not causal:
        rows, (keys, values), scale = one[0, :, 0], (x[0, 0] for x in few), q.shape[2] ** -0.5
        ways = [lambda: (torch.softmax(rows @ keys.T * scale, -1) @ values)[None, :, None]]
    else:
        all_heads = [x.repeat_interleave(group, 1) for x in few]
        ways.append(lambda: attend(one, *all_heads, is_causal=causal))
    fastest = min(ways, key=lambda way: statistics.median(time_calls([way], 0.1, True)))
    fastest.read = lambda: fastest()[0].transpose(0, 1).flatten(1).float().numpy()  # type: ignore[attr-defined]
    return fastest


def work(name: str) -> None:
    """The worker's loop: build a cell, check it, time it."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    pin(1)
    make, kind = (
        {"halfbyte": halfbyte, "torch": torch_attention}[name.partition("_")[0]],
        name.rpartition("_")[2],
    )
    call: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "build":
                call = make(question["cell"], kind)
                want, got = expected(question["cell"]), call.read()
                answer(relative_error=float(np.linalg.norm(got[-1] - want) / np.linalg.norm(want)))
            else:
                answer(us=time_calls([call], question["seconds"], True))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}"[:300])


def expected(cell: Cell) -> np.ndarray[Any, Any]:
    """The last token's result, in float64."""
    q, k, v = (x.double() for x in problem(cell))
    group = q.shape[1] // k.shape[0]
    keys, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    weights = torch.softmax(torch.einsum("hd,hsd->hs", q[-1], keys) * q.shape[2] ** -0.5, -1)
    return np.asarray(torch.einsum("hs,hsd->hd", weights, values).flatten().numpy())


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    limits = limits_of_this_machine() if options.limits else None
    rows = []
    workers = {name: Worker("attention.py", name, 1) for name in options.peers.split(",")}
    for cell in cells(options):
        built = {
            name: worker.ask(do="build", cell=cell)
            for name, worker in workers.items()
            if name.startswith("halfbyte") or cell["capacity"] == cell["length"]
        }
        samples: dict[str, list[float]] = {name: [] for name in built}
        for _ in range(options.rounds):
            for name in built:
                said = workers[name].ask(do="time", seconds=options.seconds)
                samples[name] += said.get("us", [])
                if "error" in said:
                    print(f"{name} {cell}: {said['error']}", file=sys.stderr)
        for name, taken in samples.items():
            if taken:
                us = statistics.median(taken)
                row = dict(peer=name, **cell, us=round(us, 2), us_min=round(min(taken), 2))
                row |= dict(
                    gmacs=round(macs(cell) / us / 1e3, 1), relative_error=built[name].get("relative_error")
                )
                row["of_limit"] = of_limit(row, limits)
                rows.append(row)
                print(table_row(row), flush=True)
    for worker in workers.values():
        worker.close()
    return rows


def cells(options: argparse.Namespace) -> list[Cell]:
    out = []
    for shape in options.shapes.split(","):
        for kind, lengths in (("decode", options.decode), ("prefill", options.prefill)):
            for length in (int(n) for n in lengths.split(",") if n):
                larger = [int(n) for n in options.capacity.split(",") if n and int(n) > length]
                out += [
                    dict(shape=shape, kind=kind, length=length, capacity=room) for room in (length, *larger)
                ]
    return out


def macs(cell: Cell) -> float:
    shape = SHAPES[cell["shape"]]
    seen = cell["length"] if cell["kind"] == "decode" else cell["length"] * (cell["length"] + 1) / 2
    return float((shape.width + shape.value_width) * shape.heads * seen)


def of_limit(row: dict[str, Any], limits: dict[str, Any] | None) -> float | None:
    if limits is None or not row["peer"].startswith("halfbyte"):
        return None
    shape = SHAPES[row["shape"]]
    columns = shape.width + (0 if shape.latent else shape.value_width)
    size = shape.key_heads * row["length"] * columns * _CACHE_BYTES[row["peer"].rpartition("_")[2]]
    reads = {int(mib): rate for mib, rate in limits["read_gbs"].items()}
    nearest = min(reads, key=lambda mib: abs(mib * 2**20 - size))
    least = max(macs(row) / limits["fma_gmacs"], size / reads[nearest]) / 1e3
    return round(least / row["us"], 3)


def table_row(row: dict[str, Any]) -> str:
    share = "" if row["of_limit"] is None else f"  {100 * row['of_limit']:.0f} % of the limit"
    return (
        f"{row['shape']:14s}{row['kind']:8s}{row['length']:<6d}in {row['capacity']:<6d}{row['peer']:14s}"
        f"{row['us']:11.1f} us  {row['gmacs']:6.1f} GMAC/s  error {row['relative_error']:.1e}{share}"
    )


def ratios(rows: list[dict[str, Any]]) -> list[str]:
    """How many times faster than torch's float32."""
    cell = lambda row: (row["shape"], row["kind"], row["length"])  # noqa: E731
    torch_f32 = {cell(row): row["us"] for row in rows if row["peer"] == "torch_f32"}
    return [
        f"{row['shape']} {row['kind']} {row['length']} in {row['capacity']}: {row['peer']} "
        f"{torch_f32[cell(row)] / row['us']:.2f} times torch_f32"
        for row in rows
        if row["peer"] != "torch_f32" and cell(row) in torch_f32
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="smol,llama", help="of " + ", ".join(SHAPES))
    parser.add_argument("--decode", default="128,1024,4096", help="positions, comma-separated")
    parser.add_argument("--prefill", default="128,512,2048", help="tokens, comma-separated")
    parser.add_argument("--capacity", default="", help="positions of larger caches, comma-separated")
    parser.add_argument("--peers", default=",".join(PEERS[:3]), help="of " + ", ".join(PEERS))
    parser.add_argument(
        "--limits", action=argparse.BooleanOptionalAction, default=True, help="measure the machine too"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="per peer, cell and round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    rows = measure(options)
    print("\n".join(ratios(rows)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
