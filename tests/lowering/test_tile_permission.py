"""AMX kernels in a process that is not granted the tile registers: the other form runs, with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import CASES, activations, expected
from layer_bundles import compile_layers
from numpy_twin import same_bits

from halfbyte.lowering.kernels.isa import AMX
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime.cpu_features import host_features

NAMES = ("int8_symmetric_f32_f32_40x192_g128", "planes2_symmetric_f16_f16_129x320_g64")

# A seccomp filter that answers EPERM to arch_prctl(ARCH_REQ_XCOMP_PERM, ...) and lets everything else pass.
REFUSE = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
program = b"".join([
    op(0x20, 0, 0, 0), op(0x15, 0, 3, 158),        # the number of the call
    op(0x20, 0, 0, 16), op(0x15, 0, 1, 0x1023),    # its first argument
    op(0x06, 0, 0, 0x00050001), op(0x06, 0, 0, 0x7FFF0000),
])
code = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
assert libc.syscall(158, 0x1023, 18, 0, 0, 0) == -1
"""
CALL = """
import sys
import numpy as np
from halfbyte.runtime import load
bundle = load(sys.argv[1])
for name in sys.argv[3:]:
    [y] = bundle.call(f"layer_{name}", np.load(f"{sys.argv[2]}/{name}.npy"))
    np.save(f"{sys.argv[2]}/{name}.out.npy", y)
"""


@pytest.mark.skipif(not host_features() >= AMX.needs, reason="this CPU has no AMX")
@pytest.mark.parametrize("granted", [False, True])
def test_without_tile_registers(granted: bool, tmp_path: Path) -> None:
    compile_layers(tmp_path / "bundle", [CASES[name] for name in NAMES], AMX, CpuTarget.named("host"))
    for name in NAMES:
        x = activations(name)
        np.save(tmp_path / f"{name}.npy", x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x)
    program = CALL if granted else REFUSE + CALL
    command = [sys.executable, "-c", program, str(tmp_path / "bundle"), str(tmp_path), *NAMES]
    subprocess.run(command, check=True, timeout=120)
    for name in NAMES:
        y = np.load(tmp_path / f"{name}.out.npy")
        want = expected(name, CASES[name].digits)
        assert same_bits(y.view(want.dtype), want)
