"""`python -m aio_ops.tune DIR`."""

import sys

from aio_ops.tune.command import main

if __name__ == "__main__":
    sys.exit(main())
