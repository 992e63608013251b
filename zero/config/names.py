"""Names of optimizers and schedules, and what this version makes of them."""

from __future__ import annotations

OPTIMIZERS = (
    "Adam",
    "AdamW",
    "Adagrad",
    "Lamb",
    "Lion",
    "OneBitAdam",
    "ZeroOneAdam",
    "OneBitLamb",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Muon",
    "SGD",
    "Adafactor",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "Rprop",
    "LBFGS",
    "SparseAdam",
)
"""Every optimizer that the field knows by name."""

FUSED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "SGD")
"""Those that this version has a kernel for."""

GENERIC_OPTIMIZERS = ("RMSprop", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
"""Those of torch.optim that run element by element, without a kernel."""

WHOLE_OPTIMIZERS = ("Adafactor", "Lamb", "Muon")
"""Those that see a parameter as a whole; torch.optim has no Lamb, so that one is ours."""

SUPPORTED_OPTIMIZERS = (*FUSED_OPTIMIZERS, *GENERIC_OPTIMIZERS, *WHOLE_OPTIMIZERS)
"""Those that can train."""

SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
"""The field's own schedules; any torch.optim.lr_scheduler class is accepted as well."""
