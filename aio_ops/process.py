"""What belongs to one process and refuses to work in its forked children."""

import os


class ProcessBound:
    """Has threads, which a forked child does not have."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    def _in_other_process(self) -> bool:
        return os.getpid() != self._process_id

    def _require_same_process(self) -> None:
        if self._in_other_process():
            raise RuntimeError(
                f"this engine belongs to process {self._process_id} and its threads do not exist "
                f"in the forked process {os.getpid()}; open an engine there"
            )
