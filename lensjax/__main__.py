"""`python -m lensjax`: the same as `lensjax`."""

import sys

from lensjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
