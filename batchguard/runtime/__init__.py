"""Floor 3: the loops. They wait, turn what happened into an event, and do what core says."""
