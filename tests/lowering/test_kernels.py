"""Every kernel of the CPU against the numpy twin, bit for bit, in every body that this machine can run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from foreign_cpu import AnyBundle, ForeignBundle, obstacle
from kernel_cases import CASES, activations, expected, rows_of, settings
from layer_bundles import call_layer, compile_layers
from numpy_twin import same_bits, same_by_row

from halfbyte.lowering.kernels.isa import (
    AMX,
    AVX2,
    AVX512BW,
    AVX512VNNI,
    AVXVNNI,
    DOTPROD,
    I8MM,
    PLAIN,
    InstructionSet,
)
from halfbyte.lowering.targets.cpu import CpuTarget
from halfbyte.runtime.cpu_features import host_features


@dataclass(frozen=True)
class Variant:
    """A body of the kernels, compiled for a CPU."""

    isa: InstructionSet
    cpu: str

    @property
    def label(self) -> str:
        return f"{self.isa.name}-{self.cpu}"

    @property
    def obstacle(self) -> str:
        """Why this machine cannot run it."""
        if self.cpu == "host":
            lacking = self.isa.needs - host_features()
            return f"this CPU lacks {', '.join(sorted(lacking))}" if lacking else ""
        return obstacle(CpuTarget.named(self.cpu))


VARIANTS = (
    Variant(AMX, "host"),
    Variant(AVX512VNNI, "host"),
    Variant(AVX512BW, "x86-64-v4"),
    Variant(AVXVNNI, "host"),
    Variant(AVX2, "x86-64-v3"),
    Variant(I8MM, "aarch64-i8mm"),
    Variant(DOTPROD, "aarch64-dotprod"),
    Variant(PLAIN, "host"),
    Variant(PLAIN, "x86-64"),
    Variant(PLAIN, "aarch64"),
)
FEW_ROWS = (0, 1, 3, 9, 130)  # an emulator starts anew for every call


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.label)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnyBundle:
    variant = request.param
    if variant.obstacle:
        pytest.skip(variant.obstacle)
    return compile_layers(
        tmp_path_factory.mktemp("kernels") / variant.label,
        CASES.values(),
        variant.isa,
        CpuTarget.named(variant.cpu),
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_the_twin(kernels: AnyBundle, name: str) -> None:
    case, x = CASES[name], activations(name)
    emulated = isinstance(kernels, ForeignBundle)
    for rows in rows_of(case):
        if emulated and rows not in FEW_ROWS:
            continue
        got = call_layer(kernels, name, x[:rows])
        digits = case.few if rows < case.min_tokens else case.digits
        want = expected(name, digits)[:rows]
        assert same_bits(got, want), f"{rows} rows, wrong {same_by_row(got, want)}"


def test_a_batch_with_bad_rows_leaves_nothing_behind(kernels: AnyBundle) -> None:
    """Case 125: the same call before and after a call with NaN gives the same bits."""
    for name in list(CASES)[::7]:
        x = activations(name)
        good = x[:3]
        before = call_layer(kernels, name, good)
        call_layer(kernels, name, x)
        assert same_bits(call_layer(kernels, name, good), before)


def test_every_pair_of_settings_is_compared() -> None:
    chosen = settings()
    values = [sorted({row[factor] for row in chosen}, key=str) for factor in range(5)]
    for one in range(5):
        for other in range(one):
            pairs = {(row[one], row[other]) for row in chosen}
            assert len(pairs) == len(values[one]) * len(values[other])
    assert [len(value) for value in values] == [3, 3, 3, 3, 2]


def test_the_best_body_is_chosen_by_features() -> None:
    chosen = {
        "x86-64": PLAIN,
        "x86-64-v2": PLAIN,
        "x86-64-v3": AVX2,
        "avxvnni": AVXVNNI,
        "x86-64-v4": AVX512BW,
        "avx512vnni": AVX512VNNI,
        "amx": AMX,
        "aarch64": PLAIN,
        "aarch64-dotprod": DOTPROD,
        "aarch64-i8mm": I8MM,
    }
    for name, isa in chosen.items():
        assert CpuTarget.named(name).isa is isa
    listed = CpuTarget.listed("x86-64-v3,x86-64-v4,avx512vnni,x86-64-v3")
    assert [target.cpu for target in listed] == ["avx512vnni", "x86-64-v4", "x86-64-v3"]
