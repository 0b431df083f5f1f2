"""The torch library that the operators are registered in."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("halfbyte", "DEF")
