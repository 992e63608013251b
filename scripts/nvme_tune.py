"""Find the fastest way to move bytes to and from a disk: `python scripts/nvme_tune.py DIR`."""

import sys

from aio_ops.tune.command import main

if __name__ == "__main__":
    sys.exit(main())
