"""ZeRO stage 3 with parameters, gradients and optimizer state paged between tiers."""

from zero.averages import ShardedAverage
from zero.checkpoint.convert import (
    convert_checkpoint_to_fp32,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_checkpoint,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zero.comm import RankError, init_distributed
from zero.compatibility import initialize
from zero.config import ZeroConfig, load_config
from zero.durable import DurableError
from zero.engine import ZeroEngine
from zero.errors import (
    CheckpointError,
    ConfigError,
    PlanError,
    ResumeWarning,
    ShardedAccessError,
)
from zero.external import register_external_parameter, unregister_external_parameter
from zero.fragments import (
    ParameterState,
    iterate_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from zero.gather import GatheredParameters
from zero.init_context import Init
from zero.loading import LoadReport, load_weights
from zero.memory import memory_table
from zero.optimizer import ZeroOptimizer
from zero.planning import Plan, plan_memory, plan_table
from zero.resizing import resize_parameter
from zero.weight_files import WeightFileError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DurableError",
    "GatheredParameters",
    "Init",
    "LoadReport",
    "ParameterState",
    "Plan",
    "PlanError",
    "RankError",
    "ResumeWarning",
    "ShardedAccessError",
    "ShardedAverage",
    "WeightFileError",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroOptimizer",
    "convert_checkpoint_to_fp32",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_checkpoint",
    "get_fp32_state_dict_from_zero_checkpoint",
    "init_distributed",
    "initialize",
    "iterate_states",
    "load_config",
    "load_state_dict_from_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "load_weights",
    "memory_table",
    "plan_memory",
    "plan_table",
    "register_external_parameter",
    "resize_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "unregister_external_parameter",
]
