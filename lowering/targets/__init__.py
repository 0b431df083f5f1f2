"""One file per target: its flags, policy, packer and kernels."""
