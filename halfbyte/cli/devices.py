"""halfbyte devices: what programs can run on here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def devices_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Lists the devices of this machine and the drivers that find none."""
    from halfbyte.runtime import cpu_features
    from halfbyte.runtime.device import devices, unavailable_drivers
    from halfbyte.runtime.vulkan_features import device_features

    found, refused = devices(), unavailable_drivers()
    if as_json:
        features = sorted(cpu_features.host_features())
        cpu = {"architecture": cpu_features.architecture(), "features": features}
        listed = [
            asdict(device)
            | ({"features": sorted(device_features(device.path))} if device.driver == "vulkan" else {})
            for device in found
        ]
        content = {"devices": listed, "unavailable": refused, "cpu": cpu}
        typer.echo(json.dumps(content, indent=2))
        return
    width = max((len(device.spec) for device in found), default=0)
    for device in found:
        name = f"{cpu_features.architecture()} CPU" if device.target == "cpu" else device.name
        typer.echo(f"{device.spec:{width}}  {name}: runs programs for {device.target}")
        if device.driver == "vulkan":
            typer.echo(f"{'':{width}}  {', '.join(sorted(device_features(device.path)))}")
    for driver, reason in refused.items():
        typer.echo(f"{driver:{width}}  unavailable: {reason}")
