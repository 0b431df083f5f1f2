"""Everything that a GPU has to show, as one report: its features, the tests, how many results are exact, its speed.

`make check-gpu` runs it. It ends well on machines without a GPU too: the report then says what was skipped and why.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from halfbyte.runtime.device import DeviceInfo, devices

GPUS = ("vulkan", "cuda")
SELECTED = "vulkan or cuda or gpu or several_devices or joined_targets"
# Mesa's software device, which shows that programs run and says nothing of speed.
SOFTWARE = "llvmpipe"


class Report:
    """Prints lines, and keeps them in a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def line(self, text: str = "") -> None:
        print(text, flush=True)
        print(text, file=self._file, flush=True)

    def run(self, title: str, command: list[str]) -> bool:
        """Whether a command ended well; its output goes into the report as it comes."""
        self.line(f"\n== {title}")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self.line(line.rstrip())
        if process.returncode:
            self.line(f"FAILED with exit code {process.returncode}: {' '.join(command)}")
        return process.returncode == 0


def tests(report: Report, jobs: int, selected: str, results: Path) -> bool:
    """Fixtures compile a module's programs once, so that a module's tests stay in one process."""
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-k", selected, f"--junitxml={results}"]
    well = report.run("tests", [*command, "-n", str(jobs), "--dist", "loadfile"])
    if results.is_file():
        cases = ElementTree.parse(results).iter("testcase")
        found = [(case.get("name"), p.get("value")) for case in cases for p in case.iter("property")]
        if found:
            other = [str(name) for name, value in found if value != "True"]
            report.line(
                f"{len(found) - len(other)} of {len(found)} kernels on CUDA equal the reference bit for bit"
            )
            report.line(f"the others are near: {', '.join(other)}" if other else "")
    return well


def same_text(report: Report, found: list[DeviceInfo], bundle: Path) -> bool:
    """Whether every device goes on from a prompt as the CPU does, by the most likely tokens of a model in floats."""
    well = True
    for device in found:
        count = 6 if SOFTWARE in device.name else 40
        command = [
            sys.executable,
            "-m",
            "halfbyte.cli",
            "generate",
            str(bundle),
            "-p",
            "The capital of France is",
        ]
        command += ["--temperature", "0", "--max-tokens", str(count), "--no-stream", "--device"]
        texts = [
            subprocess.run([*command, spec], capture_output=True, text=True, check=False).stdout
            for spec in ("cpu", device.spec)
        ]
        equal = bool(texts[0].strip()) and texts[0] == texts[1]
        report.line(
            f"\n== {count} tokens on {device.name}: {'the same as' if equal else 'NOT those'} on the CPU"
        )
        report.line(texts[1].strip())
        if not equal:
            report.line(f"on the CPU: {texts[0].strip()}")
        well &= equal
    return well


def speed(report: Report, found: list[DeviceInfo], model: Path, bundle: Path) -> bool:
    """The demo's model with float and with int8 activations, over prompts and single tokens."""
    if not model.is_file():
        report.line(f"\nnothing measured: {model} is not there (`python demo/fetch_model.py` gets it)")
        return True
    well, tool = True, [sys.executable, "-m", "halfbyte.cli"]
    targets = ",".join(["cpu", *dict.fromkeys(device.target for device in found)])
    real = [device for device in found if SOFTWARE not in device.name]
    for activations in ("none", "int8") if real else ("none",):
        compiled = report.run(
            f"compile for {targets}, activations {activations}",
            [
                *(*tool, "compile", str(model), "-o", str(bundle), "--target", targets),
                *("--activations", activations, "--max-context", "1024"),
            ],
        )
        well &= compiled
        if compiled and activations == "none":
            well &= same_text(report, found, bundle)
        for device in found if compiled else []:
            sizes = (
                ["-p", "8", "-n", "2", "-r", "1"] if device not in real else ["-p", "16,128,512", "-n", "64"]
            )
            title = f"speed on {device.name}, activations {activations}"
            well &= report.run(title, [*tool, "bench", str(bundle), "--device", device.spec, *sizes])
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="test processes")
    parser.add_argument("--select", default=SELECTED, help="which tests, as pytest's -k takes it")
    parser.add_argument("--model", type=Path, default=Path("build/demo/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--output", type=Path, default=Path("build/gpu-report.txt"))
    options = parser.parse_args()
    report, folder = Report(options.output), options.output.parent
    well = report.run("devices", [sys.executable, "-m", "halfbyte.cli", "devices"])
    if shutil.which("nvidia-smi"):
        report.run("NVIDIA's driver", ["nvidia-smi"])
    well &= tests(report, options.jobs, options.select, folder / "gpu-tests.xml")
    found = [device for device in devices() if device.target in GPUS]
    if found:
        well &= speed(report, found, options.model, folder / "gpu-bundle")
    else:
        report.line("\nnothing measured: this machine has no GPU that the runtime can open")
    report.line(f"\n{'all is well' if well else 'SOMETHING FAILED'}: {options.output}")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
