"""The command line, `python -m stages`."""

import sys

from stages.toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
