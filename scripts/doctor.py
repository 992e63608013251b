"""Say what this machine offers to training, and what it lacks: `python scripts/doctor.py DIR`."""

import sys

from aio_ops.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
