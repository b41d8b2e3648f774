"""Floor 2: one file for each thing in the world; they do not know one another."""
