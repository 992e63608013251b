"""Models built on meta by transformers, and the golden file that records them.

`python -m tests.support.transformers_models > tests/goldens/model_shapes.json` writes it anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import nn

from estimators.models import PRESETS, ModelShape
from zero.tracing import kept_bytes
from zero.units import find_blocks

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
}
SHARED = {**SMALL, "num_key_value_heads": 2}


def rotary(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [f"{name}ForCausalLM"], **SHARED, **more}


VARIATIONS: dict[str, dict[str, Any]] = {
    "llama, biased": rotary("llama", "Llama", attention_bias=True, mlp_bias=True),
    "llama, tied, wide heads": rotary("llama", "Llama", head_dim=24, tie_word_embeddings=True),
    "llama, one layer": rotary("llama", "Llama", num_hidden_layers=1),
    "mistral": rotary("mistral", "Mistral"),
    "mixtral": rotary("mixtral", "Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "qwen2": rotary("qwen2", "Qwen2", tie_word_embeddings=True),
    "qwen3": rotary("qwen3", "Qwen3", head_dim=16, attention_bias=True),
    "qwen3, head_dim left out": rotary("qwen3", "Qwen3"),
    "qwen2_moe, mixed layers": rotary(
        "qwen2_moe",
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
    ),
    "qwen3_moe, a dense layer": rotary(
        "qwen3_moe",
        "Qwen3Moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        head_dim=16,
        mlp_only_layers=[1],
    ),
    "gemma": rotary("gemma", "Gemma", head_dim=16),
    "gemma2": rotary("gemma2", "Gemma2", head_dim=16),
    "gemma3": rotary("gemma3_text", "Gemma3", head_dim=16),
    "phi, normed": rotary("phi", "Phi", qk_layernorm=True),
    "phi3": rotary("phi3", "Phi3"),
    "gpt2, wide": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_layer": 3,
        "n_head": 4, "vocab_size": 97, "n_positions": 33, "n_inner": 50,
    },
    "gpt_neox, unbiased": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **SMALL,
        "attention_bias": False,
    },
    "opt, projected": {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 48, "ffn_dim": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97,
        "word_embed_proj_dim": 24, "max_position_embeddings": 33, "do_layer_norm_before": False,
    },
    "falcon, serial": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], **SMALL,
        "parallel_attn": False, "multi_query": False, "bias": True,
    },
    "falcon, new, one norm": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], **SMALL,
        "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
    },
    "bert, bare": {
        "model_type": "bert", "architectures": ["BertModel"], **SMALL,
        "max_position_embeddings": 33,
    },
    "roberta": {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **SMALL,
        "max_position_embeddings": 33,
    },
    "t5, gated, uneven": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 48,
        "d_kv": 8, "d_ff": 80, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
        "vocab_size": 97, "feed_forward_proj": "gated-gelu",
    },
    "vit": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], **SMALL,
        "image_size": 32, "patch_size": 8, "num_labels": 7, "qkv_bias": False,
    },
}  # fmt: skip


def every_config() -> dict[str, dict[str, Any]]:
    return {**PRESETS, **VARIATIONS}


def build(config: dict[str, Any], **more: Any) -> nn.Module:
    """Return the model on meta, as transformers builds it."""
    import transformers

    transformers.logging.set_verbosity_error()
    values = {"pad_token_id": None, **config, **more}
    kind, (named,) = values.pop("model_type"), values.pop("architectures")
    made = transformers.AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        model = getattr(transformers, named)(made)
    assert isinstance(model, nn.Module)
    return model


NO_DROPOUT = dict.fromkeys(
    (
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
        "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "resid_dropout",
    ),
    0.0,
)  # fmt: skip
SAMPLES, SEQUENCE = 2, 30


def kept_by_autograd(config: dict[str, Any], dtype: torch.dtype, *, fused: bool) -> int:
    """Return the bytes that a real forward on the CPU keeps, dropout left out."""
    import transformers

    transformers.logging.set_verbosity_error()
    values = {"pad_token_id": None, **config, **NO_DROPOUT, "use_cache": False}
    kind, (named,) = values.pop("model_type"), values.pop("architectures")
    if kind in {"roberta", "t5"}:
        values |= {"pad_token_id": 1 if kind == "roberta" else 0, "decoder_start_token_id": 0}
    made = transformers.AutoConfig.for_model(kind, **values)
    made._attn_implementation = "sdpa" if fused else "eager"
    model = getattr(transformers, named)(made).to(dtype).train()
    tokens = torch.randint(3, 97, (SAMPLES, SEQUENCE))

    def forward() -> torch.Tensor:
        if kind == "vit":
            pixels = torch.zeros(SAMPLES, 3, made.image_size, made.image_size, dtype=dtype)
            labels = torch.zeros(SAMPLES, dtype=torch.long)
            return model(pixel_values=pixels, labels=labels).loss
        if named == "BertModel":
            return model(input_ids=tokens).last_hidden_state.sum()
        return model(input_ids=tokens, labels=tokens).loss

    return kept_bytes(model, forward, fused=fused)


def kept_cases(config: dict[str, Any]) -> dict[str, int]:
    """Return what is kept in each type and kind of attention."""
    return {
        f"{name} {'fused' if fused else 'eager'}": kept_by_autograd(config, dtype, fused=fused)
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        for fused in (True, False)
        if not (fused and config["model_type"] == "gemma2")  # it runs in no fused kernel
    }


def facts_of_module(model: nn.Module) -> dict[str, Any]:
    """Return what is compared of a built model."""
    found = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(module.weight) for module in found}
    return _facts(
        [(name, tuple(each.shape)) for name, each in model.named_parameters()],
        [name for name, _ in find_blocks(model)],
        [name for name, each in model.named_parameters() if id(each) in tables],
    )


def facts_of_shape(shape: ModelShape) -> dict[str, Any]:
    """Return the same of a shape that was told from a configuration."""
    return _facts(
        [(each.name, each.shape) for each in shape.parameters],
        list(shape.blocks),
        [each.name for each in shape.parameters if each.is_embedding],
    )


def _facts(
    parameters: list[tuple[str, tuple[int, ...]]], blocks: list[str], embeddings: list[str]
) -> dict[str, Any]:
    numels = [torch.Size(shape).numel() for _, shape in parameters]
    text = json.dumps([parameters, blocks, embeddings])
    return {
        "numel": sum(numels),
        "parameters": len(parameters),
        "blocks": len(blocks),
        "sha256": hashlib.sha256(
            text.encode()
        ).hexdigest(),  # of all names, shapes, blocks and embeddings
    }


def main() -> None:
    """Write the golden file to stdout."""
    import transformers

    cases = [
        {"name": name, "config": config, "out": facts_of_module(build(config))}
        for name, config in every_config().items()
    ]
    for case in cases:
        if case["name"] in VARIATIONS:
            case["kept"] = kept_cases(case["config"])
    meta = {
        "source": f"transformers {transformers.__version__}, built on meta, named_parameters()",
        "kept": f"bytes that autograd keeps of {SAMPLES} x {SEQUENCE} tokens, on the CPU, attention"
        " replaced by what fused kernels keep",
        "n": len(cases),
    }
    lines = ",\n".join(json.dumps(case) for case in cases)
    sys.stdout.write(f'{{"meta": {json.dumps(meta)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
