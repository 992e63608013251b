"""The engine: what a training loop calls."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload import Ledger, read_ahead_states
from zero.audit import norm_and_audit
from zero.checkpoint.background import BackgroundSave
from zero.checkpoint.engine_calls import CheckpointCalls
from zero.durable import DurableRun
from zero.errors import ConfigError
from zero.gradients import GradientReducer
from zero.hooks import ModuleHook
from zero.integrity import (
    adopt_replaced,
    check_model,
    find_slots,
    managed_parameters,
    refuse_gradients_without_backward,
    refuse_loss,
    refuse_set_gradients,
)
from zero.interrupts import held_back
from zero.loader import ResumableLoader
from zero.loss_scaler import DynamicLossScaler, StaticLossScaler
from zero.lr_schedules import step_schedule
from zero.materialize import outside_inference_mode
from zero.memory import PlanCheck, memory_report
from zero.optimizer import ZeroOptimizer
from zero.planning import Blueprint, Plan
from zero.replan import History, Resize, group_unfrozen, has_changed, rebuild
from zero.run_state import describe_configured
from zero.runtime import Runtime
from zero.settings import Settings
from zero.surface import FieldSurface, no_attribute
from zero.updating import run_update

LossScaler = StaticLossScaler | DynamicLossScaler


class ZeroEngine(CheckpointCalls, FieldSurface, nn.Module):
    """Trains one sharded model.

    A micro-batch is one forward with gradients and the backwards that follow it; `step()` updates
    once `gradient_accumulation_steps` micro-batches are done and does nothing before, so it may be
    called after each of them or once at the end of the window.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: Runtime,
        settings: Settings,
        blueprint: Blueprint,
        optimizer: ZeroOptimizer | None,
        lr_scheduler: Any,
        *,
        loss_scaler: LossScaler,
        owns_group: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.loss_scaler = loss_scaler
        self.configuration: Any = None
        """The configuration as plain data, for checkpoints to tell."""
        self.pending_save: BackgroundSave | None = None
        self.resume_report: tuple[str, ...] = ()
        """What differed between the run that was loaded last and this one."""
        self.training_dataloader: ResumableLoader | None = None
        self.durable: DurableRun | None = None
        """What `tiers.durable` asked for: what was resumed, and `commit()`."""
        self.configured_groups = describe_configured(optimizer)
        """Hyper-parameters of the parameter groups before anything was loaded or scheduled."""
        self.plan: Plan = blueprint.plan
        self.global_rank = runtime.communicator.rank
        self.world_size = runtime.communicator.world_size
        self.global_steps = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._runtime = runtime
        self._retired: Runtime | None = None
        self._settings = settings
        self._history = History()
        self._global_samples = 0
        self._micro_batches = 0
        self._forward_pending = False
        self._window_saw_forward = False
        self._loss_was_scaled = False
        self._step_applied = False
        self._grad_norm: float | None = None
        self._clipped_norm: float | None = None
        self._destroyed = False
        self._check = PlanCheck()
        self._owns_group = owns_group
        self._connect(runtime, blueprint)
        self.ledger.begin_step()
        self._forward_hook = module.register_forward_pre_hook(
            ModuleHook(self._note_forward), prepend=True
        )

    def _connect(self, runtime: Runtime, blueprint: Blueprint) -> None:
        """Take a runtime as one's own; no part of it holds the engine, so users can drop it."""
        self._runtime = runtime
        self.plan = blueprint.plan
        self._groups = blueprint.groups
        self._managed = {id(each): name for name, each in managed_parameters(runtime).items()}
        self._slots = find_slots(self.module, runtime)
        runtime.scheduler.on_backward_begin = ModuleHook(self._read_ahead)
        runtime.scheduler.on_backward_end = ModuleHook(self._count_micro_batch)
        runtime.scheduler.on_backward_failure = ModuleHook(self._restart_window)
        runtime.scheduler.on_resize = ModuleHook(self._plan_anew)
        if self.optimizer is not None:
            self.optimizer.attach(
                ModuleHook(self.step), ModuleHook(self._restart_window), ModuleHook(self._holds)
            )
        self._finalizer = weakref.finalize(self, runtime.give_back)

    def adopt(self, durable: DurableRun) -> None:
        """Belong to a durable run: take up its state, and commit to it from now on."""
        self.durable = durable
        weakref.finalize(self, durable.close)
        try:
            durable.restore_engine(self)
        except BaseException:
            self.destroy()
            raise

    @property
    def ledger(self) -> Ledger:
        """Bytes and waits of this engine."""
        return self._runtime.store.ledger

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        self._require_alive()
        self._adopt_changes()
        try:
            if not self._settings.autocasts:
                return self.module(*args, **kwargs)
            # Without the cache, which would keep a cast copy of every unit until backward.
            with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
                return self.module(*args, **kwargs)
        except BaseException:
            if torch._C._current_graph_task_id() == -1:
                # torch runs no hooks for KeyboardInterrupt
                self._runtime.scheduler.recover(announce=False)
            raise

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Run backward on `loss`, scaled by the accumulation steps; a plain `loss.backward()`
        works too and is not scaled.

        If it fails, the gradients of the whole accumulation window are dropped.

        Raises:
            ConfigError: if the engine has no optimizer.
            TypeError, RuntimeError: if no backward can begin there; the window stays as it is.
        """
        self._require_alive()
        if self.optimizer is None:
            raise ConfigError(
                "this engine has no optimizer, so there is nothing to do with gradients; pass one"
                " to zero.initialize or add an optimizer section to the configuration"
            )
        refuse_loss(loss, has_gradient=kwargs.get("gradient") is not None)
        refuse_set_gradients(self._runtime)
        scaled = self.scale(loss / self.gradient_accumulation_steps())
        reducer = self._runtime.reducer
        try:
            if reducer is not None:
                reducer.shown.withdraw()  # or autograd adds the first gradient to what is shown
            self._runtime.scheduler.expect_backward(scaled)
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._runtime.scheduler.recover(announce=False, has_failed=True)
            if reducer is not None:
                reducer.shown.show()
            raise
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the loss scale, for a `backward()` of one's own under fp16."""
        self._loss_was_scaled = True
        scale = self.loss_scaler.cur_scale
        return loss.float() * scale if scale != 1.0 else loss

    def step(self) -> None:
        """Update the parameters if the accumulation window is complete.

        A parameter without a gradient is updated as if its gradient were zero. A gradient norm
        that is not finite skips the update and counts in `skipped_steps`. A Ctrl-C meanwhile takes
        effect at the end.

        Raises:
            PageError: if a transfer failed; the engine then refuses to go on.
        """
        self._require_alive()
        if self.optimizer is None:
            raise ConfigError("this engine has no optimizer; it cannot step")
        self._step_applied = False
        self._runtime.scheduler.recover()
        refuse_set_gradients(self._runtime)
        adopt_replaced(self._slots)
        self._adopt_shapes()
        check_model(self.module, self._managed, self._runtime)
        if not self._micro_batches:
            refuse_gradients_without_backward(self._runtime)
        if self._micro_batches < self.gradient_accumulation_steps():
            return
        reducer = self._runtime.reducer
        if reducer is None:
            raise RuntimeError("an engine with an optimizer has no gradient reducer")
        reducer.shown.adopt()
        with held_back():
            self._take_step(self.optimizer, reducer)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's own
        """Drop the gradients accumulated so far."""
        self._restart_window()
        super().zero_grad(set_to_none=set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next `step()` will update, counting a micro-batch that is under way."""
        pending = 1 if self._forward_pending else 0
        return self._micro_batches + pending >= self.gradient_accumulation_steps()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are reduced into shards at once, so nothing grows meanwhile."""
        yield

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step before clipping, or None before the first."""
        return self._grad_norm

    def get_clipped_grad_norm(self) -> float | None:
        """Return the norm after clipping, of the gradients that the last step was made with.

        None before the first step, and where the norm was not finite and the step was skipped.
        """
        return self._clipped_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []

    def train_batch_size(self) -> int:
        """Return the samples of one step over all ranks."""
        return self._settings.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one micro-batch of one rank."""
        return self._settings.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of one step."""
        return self._settings.batch.accumulation_steps

    def memory_report(self) -> dict[str, Any]:
        """Return the plan, and what was planned and is there by category and tier, as plain data.

        After the first step `first_step` holds the comparison that was made at its end.
        """
        store = self._runtime.store
        return {
            **self.plan.to_dict(),
            **memory_report(self.plan.memory, store, baseline_bytes=self.plan.rss_at_start_bytes),
            "first_step": self._check.first_step,
        }

    def destroy(self) -> None:
        """Wait for what is in flight and give everything back; safe to call twice."""
        if self._destroyed:
            return
        self._destroyed = True
        try:
            self.wait_for_checkpoint()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._runtime.scheduler.remove()
        self._forward_hook.remove()
        self._retired = None
        self._runtime.drop_gradients()
        self._finalizer()
        self._runtime.store.heap.trim()
        if self.durable is not None:
            self.durable.close()
        self._runtime.communicator.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        if self.durable is not None:
            self.durable.deliver_pending()

    def __getattr__(self, name: str) -> Any:
        """Look up what the engine lacks on the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(no_attribute(name, module)) from error

    def _take_step(self, optimizer: ZeroOptimizer, reducer: GradientReducer) -> None:
        """Update, or skip the update, and begin a new window."""
        norm = norm_and_audit(self._runtime, reducer) / self.loss_scaler.cur_scale
        self._grad_norm, self._clipped_norm = norm, None
        if math.isfinite(norm):
            with outside_inference_mode():  # state begins here
                self._run_update(optimizer, norm)
            self._step_applied = True
        else:
            self._skip_update(norm, reducer.norm.not_finite)
        self._restart_window()
        self.global_steps += 1
        self._global_samples += self.train_batch_size()
        self._close_step()
        self.loss_scaler.update_scale(not math.isfinite(norm), reducer.norm.not_finite)
        if self.lr_scheduler is not None and math.isfinite(norm):
            step_schedule(self.lr_scheduler)
        if self.durable is not None:
            self.durable.after_step(self)

    def _run_update(self, optimizer: ZeroOptimizer, norm: float) -> None:
        """Run one update over all sub-groups."""
        clip = self._settings.gradient_clipping
        coefficient = min(clip / (norm + 1e-6), 1.0) if clip > 0 else 1.0
        self._clipped_norm = norm * coefficient
        run_update(
            self._runtime,
            optimizer,
            self._groups,
            self._history.updates + 1,
            coefficient / self.loss_scaler.cur_scale,
            self._settings.tiers.rounding_seed,
        )
        self._history.updates += 1

    def _close_step(self) -> None:
        """Close the step in the ledger, and compare the plan with reality; peaks may come late."""
        self._retired = None
        self._runtime.store.ledger.end_step()
        if self.pending_save is not None:
            self.pending_save.warn_if_failed()
        self._check.close_step(self.plan.memory, self._runtime.store, self.global_steps)

    def _skip_update(self, norm: float, names: Sequence[str]) -> None:
        """Count a step whose gradients are not finite; a dynamic loss scale expects some."""
        self.skipped_steps += 1
        if self.loss_scaler.dynamic:
            return
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        warnings.warn(
            f"step {self.global_steps + 1}: the gradient norm is {norm}, because of {shown}; the"
            " update is skipped",
            RuntimeWarning,
            stacklevel=4,
        )

    def _read_ahead(self) -> None:
        """Start reading what the update will need first, during the last backward before it."""
        if self.optimizer is not None and self.is_gradient_accumulation_boundary():
            read_ahead_states(self._runtime.store)

    def _count_micro_batch(self) -> None:
        """Count a backward that ended; a second one of the same forward is the same micro-batch.

        A window in which the model as a whole never ran (only parts of it) counts every backward.
        """
        if not self._loss_was_scaled and self.loss_scaler.cur_scale != 1.0:
            raise RuntimeError(
                "a plain loss.backward() under fp16 gives gradients without the loss scale; call"
                " engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._loss_was_scaled = False
        if self._forward_pending or not self._window_saw_forward or not self._micro_batches:
            self._micro_batches += 1
            self.micro_steps += 1
        self._forward_pending = False

    def _note_forward(self, _module: nn.Module, _args: Any) -> None:
        """Remember that a micro-batch is under way."""
        self._runtime.store.require_intact()
        self._runtime.scheduler.begin_forward(of_model=True)
        self._adopt_changes()
        if torch.is_grad_enabled():
            if self._is_idle:
                refuse_set_gradients(self._runtime)
            self._forward_pending = self._window_saw_forward = True

    def _adopt_changes(self) -> None:
        """Take over what the user changed of the model, at the begin of an accumulation window.

        A parameter that is put in place while a trained model is evaluated may be there for that.
        """
        if torch.is_grad_enabled() or self.optimizer is None:
            adopt_replaced(self._slots)
        self._adopt_shapes()
        optimizer, is_boundary = self.optimizer, not self._micro_batches and self._is_idle
        if (
            optimizer is not None
            and torch.is_grad_enabled()
            and is_boundary
            and has_changed(self._runtime, optimizer)
        ):
            group_unfrozen(self._runtime, optimizer)
            self._plan_anew(None)

    def _adopt_shapes(self) -> None:
        """Resize parameters that rest in place and were given data of another shape."""
        for resize in self._take_reshaped():
            self._plan_anew(resize)

    def _take_reshaped(self) -> list[Resize]:
        found = []
        for segment in self._runtime.segments:
            while (reshaped := segment.take_reshaped()) is not None:
                parameter, values = reshaped
                found.append(Resize(parameter, values.shape, None, values))
        return found

    @property
    def _is_idle(self) -> bool:
        reducer = self._runtime.reducer
        return torch._C._current_graph_task_id() == -1 and not (reducer and reducer.has_pending())

    def _plan_anew(self, resize: Resize | None) -> None:
        """Build the runtime anew for a model that has changed, see [Note: replan]."""
        if self.durable is not None:
            raise RuntimeError(
                "parameters of a durable run cannot be resized, frozen, unfrozen or grouped while"
                " it lives: its commits belong to one plan. Do it before zero.initialize, or save a"
                " checkpoint and load it into a run of another tiers.durable.name"
            )
        if self.optimizer is None or self._micro_batches or not self._is_idle:
            raise RuntimeError(
                "parameters can be resized, frozen and unfrozen between steps of an engine with an"
                " optimizer, not while gradients are accumulated; call engine.step() before"
            )
        self.wait_for_checkpoint()
        self._runtime.scheduler.recover()
        if any(unit.is_held or unit.is_in_window for unit in self._runtime.units):
            raise RuntimeError(
                "parameters can be resized, frozen and unfrozen outside of"
                " zero.GatheredParameters blocks; leave the block before the next forward"
            )
        adopt_replaced(self._slots)
        for earlier in self._take_reshaped():
            self._plan_anew(earlier)
        settings, groups = self._settings, self._groups
        new = rebuild(
            self.module, self._runtime, settings, self.optimizer, self._history, groups, resize
        )
        self._retired = self._runtime  # an empty shell; its hooks may be on the stack
        self._finalizer.detach()
        self.optimizer.has_new_groups = False
        self._connect(new.runtime, new.blueprint)
        new.runtime.store.heap.trim()

    def _holds(self, parameter: nn.Parameter) -> bool:
        return any(parameter is each for each in self.module.parameters())

    def _restart_window(self) -> None:
        """Begin a new accumulation window with no gradients."""
        self._runtime.store.drop_gradients()
        if self._runtime.reducer is not None:
            self._runtime.reducer.drop()
        for segment in self._runtime.segments:
            segment.dropped_gradients.clear()
            segment.audited = None
        self._micro_batches = 0
        self._forward_pending = self._window_saw_forward = False

    def _require_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("this engine was destroyed; make a new one with zero.initialize")
        self._runtime.store.require_intact()
