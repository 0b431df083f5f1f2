"""What one core of this machine can do at best: dot products, f32 multiply-adds, and reading memory.

    python benchmarks/limits.py [--json limits.json]

Prints and writes {"isa", "dot_gmacs", "tile_gmacs", "bf16_gmacs", "bf16_tile_gmacs", "fma_gmacs",
"read_gbs": {"2": ..., "8": ..., "256": ...}} (sizes in MiB); null where the CPU has no such unit. Tiles are AMX.
Kernels are judged against these: W4A8 against dot_gmacs and tile_gmacs, P digit planes against a P-th of them, e4m3
weights against the bf16 units, one token against read_gbs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
from pathlib import Path
from typing import Any

import iree.runtime as rt
import jinja2
import numpy as np
from interleave import pin, time_calls

from halfbyte.lowering.compiler import compile_module
from halfbyte.lowering.kernels.fp8_kernels import FloatUnit
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime.huge_pages import HugePages

_SIZES = (2, 8, 32, 256)
# Instruction set -> int32 lanes, the dot instruction that sets its limit.
_DOT = {
    "amx": (16, "vnni"),
    "avx512vnni": (16, "vnni"),
    "avxvnni": (8, "vnni"),
    "i8mm": (4, "usmmla"),
    "dotprod": (4, "sdot"),
}
# Multiply-adds of one lane.
_DEPTH = {"vnni": 4, "sdot": 4, "usmmla": 8, "none": 0}


def measure(seconds: float = 0.3) -> dict[str, Any]:
    """The limits of the core this runs on."""
    target = CpuTarget.named("host")
    unit = FloatUnit.of(target.features)
    lanes, dot = _DOT.get(target.isa.name, (target.isa.lanes, "none"))
    units = {"tile": target.isa.tiles, "bf16_tile": unit is FloatUnit.TILES}
    tiles = [name for name, has in units.items() if has]
    accumulators = 16 if lanes == 16 else 12
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, block_start_string="{!", block_end_string="!}")
    text = environment.get_template("limits.mlir.j2").render(
        lanes=lanes,
        dot=dot,
        accumulators=accumulators,
        sizes=_SIZES,
        bf16=unit.pairs,
        tiles=tiles,
        loops=[f"{kind}_multiply" for kind in tiles],
    )
    program, _ = compile_module(text, target.flags)
    config = rt.Config("local-sync")
    module = rt.VmModule.copy_buffer(config.vm_instance, program)
    hal = rt.create_hal_module(config.vm_instance, config.device)
    index = rt.ParameterIndex()
    memory = {size: mmap.mmap(-1, size << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for size in _SIZES}
    for size, block in memory.items():
        HugePages(block).array[:] = 1
        index.add_buffer(str(size), block)
    io = rt.create_io_parameters_module(config.vm_instance, index.create_provider(scope="limits"))
    context = rt.VmContext(config.vm_instance, [hal, io, module])

    def best(name: str, *inputs: Any) -> float:
        function, arguments = module.lookup_function(name), rt.VmVariantList(len(inputs))
        views = [rt.asdevicearray(config.device, value)._buffer_view for value in inputs]
        for view in views:
            arguments.push_ref(view)

        def call() -> None:
            context.invoke(function, arguments, rt.VmVariantList(1))

        return statistics.median(time_calls([call], seconds, True)) * 1e-6

    seed, rounds = np.arange(1024, dtype=np.int8), 200_000
    count = np.array([rounds], np.int32)
    # name in the result -> loop, multiply-adds of one of its instructions
    loops = {
        "dot_gmacs": ("multiply", lanes * _DEPTH[dot] * accumulators),
        "tile_gmacs": ("tile_multiply", 16 * 16 * 64 * 4 if target.isa.tiles else 0),
        "bf16_gmacs": ("bf16_multiply", 32 * accumulators if unit.pairs else 0),
        "bf16_tile_gmacs": ("bf16_tile_multiply", 16 * 16 * 32 * 4 if unit is FloatUnit.TILES else 0),
    }
    found: dict[str, Any] = {"isa": target.isa.name}
    for name, (loop, macs) in loops.items():
        found[name] = round(rounds * macs / best(f"{loop}_rounds", seed, count) / 1e9, 1) if macs else None
    found["fma_gmacs"] = round(rounds * accumulators * lanes / best("fuse_rounds", seed, count) / 1e9, 1)
    found["read_gbs"] = {
        str(size): round((size << 20) / best(f"read_{size}", np.array([size << 20], np.int32)) / 1e9, 1)
        for size in _SIZES
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pin(1)
    found = measure()
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
