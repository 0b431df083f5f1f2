"""Lets ``python -m halfbyte.cli`` stand for ``halfbyte``."""

from halfbyte.cli import main

main()
