"""ZeRO stage 3 with parameters, gradients and optimizer state paged between tiers."""

from zero.comm import init_distributed
from zero.compatibility import initialize
from zero.config import ZeroConfig, load_config
from zero.engine import ZeroEngine
from zero.errors import ConfigError, PlanError
from zero.gather import GatheredParameters
from zero.memory import memory_table
from zero.optimizer import ZeroOptimizer
from zero.parameter import ShardedAccessError
from zero.planning import Plan, plan_memory, plan_table

__all__ = [
    "ConfigError",
    "GatheredParameters",
    "Plan",
    "PlanError",
    "ShardedAccessError",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroOptimizer",
    "init_distributed",
    "initialize",
    "load_config",
    "memory_table",
    "plan_memory",
    "plan_table",
]
