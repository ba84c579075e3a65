"""`python -m nearpeak` is the command `nearpeak`."""

import sys

from nearpeak.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
