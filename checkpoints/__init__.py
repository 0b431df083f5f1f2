"""From checkpoint files to a model in halfbyte's graph language: one file per format."""
