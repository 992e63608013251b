"""Every update kernel compiles for a GPU of compute capability 9.0, wherever Triton is."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from estimators import UpdateRule
from offload.rules import (
    AdagradScalars,
    AdamScalars,
    AdamWScalars,
    LionScalars,
    SgdScalars,
    UpdateScalars,
)

TYPES = {
    0: ("*fp32", "*fp32", "*fp32"),
    1: ("*bf16", "*i16", "*fp32"),
    2: ("*bf16", "*fp32", "*fp32"),
    3: ("*fp16", "*fp32", "*fp32"),
    4: ("*bf16", "*i16", "*bf16"),
    5: ("*bf16", "*i8", "*u8"),
}
"""Of parameter, weight and moments, by the kernel's number of how a master is kept."""
KEPT = {"own": 0, "exact": 1, "master bf16": 2, "master fp16": 3, "bf16": 4, "compact": 5}
RULES: list[type[UpdateScalars]] = [
    *(AdamWScalars, AdamScalars, LionScalars, AdagradScalars, SgdScalars)
]


def pointers(kept: int, rule: UpdateRule, grad: str) -> tuple[str, ...]:
    """Return the types of arrays; what the rule does not keep is the weight, as in a launch."""
    param, weight, moment = TYPES[kept]
    names = {each.value for each in rule.moments}
    moments = [moment if each in names else weight for each in ("exp_avg", "exp_avg_sq")]
    bases = [
        "*i16" if each in names and kept == KEPT["compact"] else weight
        for each in ("exp_avg", "exp_avg_sq")
    ]
    return (param, weight, grad, *moments, *bases)


def compiled(kept: int, scalars: type[UpdateScalars], grad: str, how: tuple[bool, bool]) -> Any:
    """Return the machine code of a kernel; `how` tells whether of a rest, and of many parts."""
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.backends.compiler")
    kernel = importlib.import_module("offload.triton_update").update
    is_rest, has_table = how
    arrays = pointers(kept, scalars.rule, grad)
    signature = {
        "arrays": arrays,
        "scalars": ("fp32",) * 16,
        "word": "i32",
        "high": "i32",
        "numel": "i32",
        "table": "*i64" if has_table else "constexpr",
        "HOW": "constexpr",
        "TILE": "constexpr",
    }
    constants: dict[tuple[int, ...], Any] = {
        (6,): (kept, scalars().rule_number, is_rest),
        (7,): 1024,
    }
    if not has_table:
        constants[5,] = None
    aligned = {(0, at): [["tt.divisibility", 16]] for at in range(len(arrays))}
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    return triton.compile(source, compiler.GPUTarget("cuda", 90, 32), options).asm["cubin"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("scalars", RULES, ids=lambda each: each.rule.value)
@pytest.mark.parametrize("kept", KEPT)
def test_update_kernels_compile(kept: str, scalars: type[UpdateScalars]) -> None:
    grads = {"own": ["*fp32"], "master fp16": ["*fp16", "*fp32"]}.get(kept, ["*bf16", "*fp32"])
    for grad, is_rest, has_table in itertools.product(grads, (False, True), (False, True)):
        assert compiled(KEPT[kept], scalars, grad, (is_rest, has_table))
