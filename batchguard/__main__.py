"""`python -m batchguard`: the same as the `batchguard` command."""

import sys

from batchguard.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
