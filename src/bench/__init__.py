"""What the scripts that measure share: clock, ceilings, parking, groups of kernels, the lines they write."""
