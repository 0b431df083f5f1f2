"""Hand-written dispatches: template files, one generator, a body per instruction set."""
