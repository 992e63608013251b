"""`python -m zero plan` and `python -m zero fit`."""

import sys

from zero.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
