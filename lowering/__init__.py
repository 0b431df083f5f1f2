"""From a rewritten graph to a bundle: importer, kernels, targets, compiler."""
