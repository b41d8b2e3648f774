"""Floor 4: argv in, exit code out. One file for each command or group of commands."""
