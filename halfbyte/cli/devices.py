"""halfbyte devices: what programs can run on here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halfbyte.runtime.device import DeviceInfo


def devices_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lists the devices of this machine and the drivers that find none."""
    from halfbyte.runtime import cpu_features
    from halfbyte.runtime.device import devices, unavailable_drivers

    found, refused = devices(), unavailable_drivers()
    if as_json:
        features = sorted(cpu_features.host_features())
        cpu = {"architecture": cpu_features.architecture(), "features": features}
        listed = [asdict(device) | _abilities(device) for device in found]
        content = {"devices": listed, "unavailable": refused, "cpu": cpu}
        typer.echo(json.dumps(content, indent=2))
        return
    width = max((len(device.spec) for device in found), default=0)
    for device in found:
        name = f"{cpu_features.architecture()} CPU" if device.target == "cpu" else device.name
        typer.echo(f"{device.spec:{width}}  {name}: runs programs for {device.target}")
        for values in _abilities(device).values():
            typer.echo(f"{'':{width}}  {', '.join(values)}")
    for driver, reason in refused.items():
        typer.echo(f"{driver:{width}}  unavailable: {reason}")


def _abilities(device: DeviceInfo) -> dict[str, list[str]]:
    """What a GPU's driver says that it can do."""
    from halfbyte.runtime import cuda_features, vulkan_features

    if device.driver == "vulkan":
        return {"features": sorted(vulkan_features.device_features(device.path))}
    if device.driver == "cuda":
        return {"features": str(cuda_features.device_features(device.path)).split(", ")}
    return {}
