"""The checkpoint methods of an engine, in the field's call shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.checkpoint.export import save_16bit_model
from zero.checkpoint.save import SaveRequest
from zero.checkpoint.surface import (
    LoadRequest,
    load_checkpoint,
    save_checkpoint,
    wait_for_checkpoint,
)
from zero.settings import Settings


class CheckpointCalls:
    """Saves and loads an engine."""

    global_steps: int
    _settings: Settings

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        blocking: bool = True,
        keep_last: int | None = None,
        as_stored: bool | None = None,
    ) -> bool:
        """Save everything that the run needs to go on; a collective, legal at any micro-step.

        Args:
            save_dir: folder of checkpoints.
            tag: name of this one; by default `global_step` and the number of steps. One of the
                same name is there until the new one is whole.
            client_state: anything of yours made of numbers, text, containers and tensors.
            save_latest: let `latest` name this one.
            exclude_frozen_parameters: leave out weights that are not trained.
            blocking: return when it is in its place. If false, a thread goes on with the state of
                this moment; `wait_for_checkpoint`, the next save and `destroy` wait for it, and
                raise what went wrong.
            keep_last: remove all but so many of the newest checkpoints in the folder; by default
                what `tiers.keep_last_checkpoints` says.
            as_stored: save the optimizer's moments in the types in which they rest, bf16 or 8-bit
                codes, instead of fp32: smaller files, the same values. By default what
                `tiers.checkpoints_as_stored` says.

        Raises:
            CheckpointError: if it cannot be saved; what was there before is as it was.
            RankError: naming ranks that did not join.
        """
        tiers = self._settings.tiers
        save_checkpoint(
            self,  # type: ignore[arg-type]
            SaveRequest(
                Path(save_dir),
                f"global_step{self.global_steps}" if tag is None else str(tag),
                dict(client_state or {}),
                save_latest,
                exclude_frozen_parameters,
                keep_last or tiers.keep_last_checkpoints,
                tiers.checkpoints_as_stored if as_stored is None else as_stored,
            ),
            blocking=blocking,
        )
        return True

    def wait_for_checkpoint(self) -> str | None:
        """Wait for a save with `blocking=False`; return its folder, or None if there is none.

        Raises:
            CheckpointError: if it failed.
        """
        found = wait_for_checkpoint(self)  # type: ignore[arg-type]
        return None if found is None else str(found)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        verify: bool | None = None,
    ) -> tuple[str | None, Any]:
        """Load a checkpoint, saved by any number of ranks on any tiers; a collective.

        Returns:
            Its folder and the client state, or (None, None) with a warning if there is no `latest`.

        Raises:
            CheckpointError: if it is damaged or does not fit; see docs/checkpoints.md on what is
                checked before anything changes.
        """
        found = load_checkpoint(
            self,  # type: ignore[arg-type]
            LoadRequest(
                Path(load_dir),
                None if tag is None else str(tag),
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                verify,
            ),
        )
        return (None, None) if found is None else (str(found[0]), found[1])

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights, as they train, into one file; a collective.

        A name that ends in `.safetensors` gives such a file, any other what `torch.load` reads.

        Raises:
            OSError: if the file cannot be written.
        """
        save_16bit_model(
            self,  # type: ignore[arg-type]
            Path(save_dir) / save_filename,
            exclude_frozen=exclude_frozen_parameters,
        )
        return True
