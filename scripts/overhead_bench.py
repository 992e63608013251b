"""Time an engine with everything on the device at world size 1 against plain torch.

    python scripts/overhead_bench.py --blocks 20 --steps 4

Both train the same model on the same data in one run, a step of one after a step of the other, so
that what else the machine does falls on both. The ratio of the fastest halves is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import zero


def main() -> None:
    """Parse the arguments, run both and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--max-ratio", type=float, help="fail above this ratio")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ratios = measure(options)
    for name, (ours, theirs) in ratios.items():
        print(
            f"{name}: engine {ours * 1e3:.1f} ms, torch {theirs * 1e3:.1f} ms,"
            f" ratio {ours / theirs:.4f}"
        )
    ratio = ratios["forward and backward"][0] / ratios["forward and backward"][1]
    if options.max_ratio is not None and ratio > options.max_ratio:
        raise SystemExit(f"the ratio {ratio:.4f} is above {options.max_ratio}")


def make_model(options: argparse.Namespace) -> nn.Module:
    """Return `blocks` blocks of one linear layer and an activation."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(options.hidden, options.hidden), nn.ReLU())
            for _ in range(options.blocks)
        )
    )


def measure(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return seconds of the engine and of torch, by what is timed."""
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    engine, _, _, _ = zero.initialize(model=make_model(options), config=config)
    plain = make_model(options).to(engine.device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    x = torch.randn(options.batch, options.tokens, options.hidden, device=engine.device)
    phases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "inference": (lambda: infer(engine, x), lambda: infer(plain, x)),
        "forward and backward": (
            lambda: engine.backward(engine(x).square().mean()),
            lambda: plain(x).square().mean().backward(),
        ),
        "step": (engine.step, lambda: (optimizer.step(), optimizer.zero_grad())),
    }
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in phases}
    for step in range(options.steps + 2):
        for name, pair in phases.items():
            for side in (0, 1) if step % 2 else (1, 0):
                begin = clock()
                pair[side]()
                if step >= 2:
                    times[name][side].append(clock() - begin)
    engine.destroy()
    return {name: (fast_half(ours), fast_half(theirs)) for name, (ours, theirs) in times.items()}


def infer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run a forward without gradients."""
    with torch.no_grad():
        found: torch.Tensor = model(x)
        return found


def fast_half(seconds: list[float]) -> float:
    """Return the mean of the faster half: what else the machine does only adds."""
    chosen = sorted(seconds)[: max(len(seconds) // 2, 1)]
    return sum(chosen) / len(chosen)


if __name__ == "__main__":
    main()
