"""Measured steps of DeepSpeed's CPU Adam: started by kernel_bench.py.

It runs in the interpreter of an environment that has DeepSpeed, and needs nothing of ours. A line
of its input asks for one step, a line of its output that is JSON answers with seconds; the first
says what runs. So the operator is compiled once, and rounds alternate with ours.
"""

import argparse
import importlib
import json
import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main() -> None:
    """Make an optimizer of fp32 parameters, and step as often as the input asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numel", type=int)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    torch = importlib.import_module("torch")
    torch.set_num_threads(options.threads)
    version = importlib.import_module("deepspeed").__version__
    adam = importlib.import_module("deepspeed.ops.adam")
    parameter = torch.nn.Parameter(torch.randn(options.numel).mul_(0.02))
    optimizer = adam.DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01)
    parameter.grad = torch.randn(options.numel).mul_(1e-3)
    optimizer.step()  # makes the state, and touches every page
    print(json.dumps({"deepspeed": version, "torch": torch.__version__}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        optimizer.step()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
