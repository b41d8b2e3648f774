"""Floor 1: decisions. No I/O, no clock and no randomness of its own."""
