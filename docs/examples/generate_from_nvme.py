"""Generate text with a model that is larger than the memory it may use: its weights rest on NVMe.

    python docs/examples/generate_from_nvme.py --random weights.pt    weights to try it with
    python docs/examples/generate_from_nvme.py /nvme0 weights.pt

weights.pt is a state_dict of the model below. It is built without ever being in memory as a whole,
weights are loaded by the piece, and without optimizer nothing is reserved for gradients and state.
Every token reads each block once, ahead of its use. Run it under torchrun for several ranks.
"""

import sys

import torch
from torch import nn

import zero

WIDTH, LAYERS, VOCABULARY, TOKENS = 256, 12, 256, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def main() -> None:
    directory, weights = sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__)
    if directory == "--random":
        sys.exit(torch.save(Model().state_dict(), weights))
    stage = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": directory}}
    config = {"zero_optimization": stage, "tiers": {"host_memory": "8MB"}}
    with zero.Init(config_dict_or_path=config):
        model = Model()
    zero.load_weights(model, weights)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    engine.eval()
    tokens = torch.tensor([[10, 20, 30]])
    with torch.inference_mode():
        for _ in range(TOKENS):
            following = engine(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
    read = engine.ledger.snapshot().nvme_read_bytes
    print(f"tokens {tokens[0].tolist()}; {read / 1e6:.0f} MB were read")
    engine.destroy()


main()
