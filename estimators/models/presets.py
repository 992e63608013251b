"""Well-known models by name: the keys of their published `config.json` that sizes follow from."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _rotary(kind: str, hidden: int, width: int, layers: int, heads: int, **more: Any) -> Config:
    classes = {
        "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
        "gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "phi3": "Phi3",
        "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "phi": "Phi",
        "gpt_neox": "GPTNeoX",
    }  # fmt: skip
    return {
        "model_type": kind,
        "architectures": [f"{classes[kind]}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def _llama(hidden: int, width: int, layers: int, heads: int, **more: Any) -> Config:
    return _rotary("llama", hidden, width, layers, heads, **{"vocab_size": 32000, **more})


def _llama3(hidden: int, width: int, layers: int, heads: int, **more: Any) -> Config:
    size = {"vocab_size": 128256, "num_key_value_heads": 8}
    return _rotary("llama", hidden, width, layers, heads, **size, **more)


def _qwen2(hidden: int, width: int, layers: int, heads: int, **more: Any) -> Config:
    return _rotary("qwen2", hidden, width, layers, heads, **{"vocab_size": 152064, **more})


def _qwen3(hidden: int, width: int, layers: int, heads: int, **more: Any) -> Config:
    size = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
    return _rotary("qwen3", hidden, width, layers, heads, **{**size, **more})


def _pythia(hidden: int, layers: int, heads: int, **more: Any) -> Config:
    size = {"vocab_size": 50304, "max_position_embeddings": 2048}
    return _rotary("gpt_neox", hidden, 4 * hidden, layers, heads, **{**size, **more})


def _gpt2(hidden: int, layers: int, heads: int) -> Config:
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257,
        "n_positions": 1024, "n_embd": hidden, "n_layer": layers, "n_head": heads,
    }  # fmt: skip


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> Config:
    return {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 50272,
        "hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": 2048, **more,
    }  # fmt: skip


def _encoder(kind: str, vocabulary: int, size: tuple[int, int, int], **more: Any) -> Config:
    hidden, layers, heads = size
    return {
        "model_type": kind,
        "architectures": [f"{'Bert' if kind == 'bert' else 'Roberta'}ForMaskedLM"],
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, **more,
    }  # fmt: skip


def _t5(size: tuple[int, int, int], layers: int, heads: int, **more: Any) -> Config:
    hidden, key_width, width = size
    return {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128,
        "d_model": hidden, "d_kv": key_width, "d_ff": width, "num_layers": layers,
        "num_decoder_layers": layers, "num_heads": heads, **more,
    }  # fmt: skip


def _vit(hidden: int, layers: int, heads: int, patch: int = 16) -> Config:
    return {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 224,
        "patch_size": patch, "num_channels": 3, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_labels": 1000,
    }  # fmt: skip


_TIED = {"tie_word_embeddings": True}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}

PRESETS: dict[str, Config] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32),
    "llama-2-13b": _llama(5120, 13824, 40, 40),
    "llama-2-70b": _llama(8192, 28672, 80, 64, num_key_value_heads=8),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, num_key_value_heads=4),
    "llama-3-8b": _llama3(4096, 14336, 32, 32),
    "llama-3-70b": _llama3(8192, 28672, 80, 64),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama3(16384, 53248, 126, 128),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, head_dim=64, **_TIED),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, head_dim=128, **_TIED),
    "mistral-7b": _rotary(
        "mistral", 4096, 14336, 32, 32, vocab_size=32000, num_key_value_heads=8
    ),
    "mistral-nemo-12b": _rotary(
        "mistral", 5120, 14336, 40, 32, vocab_size=131072, num_key_value_heads=8, head_dim=128
    ),
    "mixtral-8x7b": _rotary(
        "mixtral", 4096, 14336, 32, 32, vocab_size=32000, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "mixtral-8x22b": _rotary(
        "mixtral", 6144, 16384, 56, 48, vocab_size=32768, num_key_value_heads=8,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "qwen2-0.5b": _qwen2(896, 4864, 24, 14, vocab_size=151936, num_key_value_heads=2, **_TIED),
    "qwen2-1.5b": _qwen2(1536, 8960, 28, 12, vocab_size=151936, num_key_value_heads=2, **_TIED),
    "qwen2-7b": _qwen2(3584, 18944, 28, 28, num_key_value_heads=4),
    "qwen2-72b": _qwen2(8192, 29568, 80, 64, num_key_value_heads=8),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, vocab_size=151936, num_key_value_heads=2, **_TIED),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, vocab_size=151936, num_key_value_heads=2, **_TIED),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, vocab_size=151936, num_key_value_heads=2, **_TIED),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, num_key_value_heads=4),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, num_key_value_heads=8),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, num_key_value_heads=8),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, num_key_value_heads=8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, **_TIED),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, **_TIED),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, **_TIED),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _rotary(
        "qwen3_moe", 2048, 6144, 48, 32, vocab_size=151936, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "qwen1.5-moe-a2.7b": _rotary(
        "qwen2_moe", 2048, 5632, 24, 16, vocab_size=151936, num_key_value_heads=16,
        num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "gemma-2b": _rotary(
        "gemma", 2048, 16384, 18, 8, vocab_size=256000, num_key_value_heads=1, head_dim=256
    ),
    "gemma-7b": _rotary(
        "gemma", 3072, 24576, 28, 16, vocab_size=256000, num_key_value_heads=16, head_dim=256
    ),
    "gemma-2-2b": _rotary(
        "gemma2", 2304, 9216, 26, 8, vocab_size=256000, num_key_value_heads=4, head_dim=256
    ),
    "gemma-2-9b": _rotary(
        "gemma2", 3584, 14336, 42, 16, vocab_size=256000, num_key_value_heads=8, head_dim=256
    ),
    "gemma-2-27b": _rotary(
        "gemma2", 4608, 36864, 46, 32, vocab_size=256000, num_key_value_heads=16, head_dim=128
    ),
    "gemma-3-1b": _rotary(
        "gemma3_text", 1152, 6912, 26, 4, vocab_size=262144, num_key_value_heads=1, head_dim=256
    ),
    "phi-2": _rotary("phi", 2560, 10240, 32, 32, vocab_size=51200),
    "phi-3-mini": _rotary("phi3", 3072, 8192, 32, 32, vocab_size=32064, num_key_value_heads=32),
    "phi-4": _rotary("phi3", 5120, 17920, 40, 40, vocab_size=100352, num_key_value_heads=10),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-6.9b": _pythia(4096, 32, 32, vocab_size=50432),
    "pythia-12b": _pythia(5120, 36, 40, vocab_size=50688),
    "gpt-neox-20b": _pythia(6144, 44, 64, vocab_size=50432),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "falcon-7b": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "vocab_size": 65024,
        "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    },
    "falcon-40b": {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "vocab_size": 65024,
        "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
        "num_kv_heads": 8, "new_decoder_architecture": True,
    },
    "bert-base": _encoder("bert", 30522, (768, 12, 12), max_position_embeddings=512),
    "bert-large": _encoder("bert", 30522, (1024, 24, 16), max_position_embeddings=512),
    "roberta-base": _encoder(
        "roberta", 50265, (768, 12, 12), max_position_embeddings=514, type_vocab_size=1
    ),
    "roberta-large": _encoder(
        "roberta", 50265, (1024, 24, 16), max_position_embeddings=514, type_vocab_size=1
    ),
    "t5-small": _t5((512, 64, 2048), 6, 8),
    "t5-base": _t5((768, 64, 3072), 12, 12),
    "t5-large": _t5((1024, 64, 4096), 24, 16),
    "t5-3b": _t5((1024, 128, 16384), 24, 32),
    "t5-11b": _t5((1024, 128, 65536), 24, 128),
    "flan-t5-base": _t5((768, 64, 2048), 12, 12, **_GATED),
    "flan-t5-xl": _t5((2048, 64, 5120), 24, 32, **_GATED),
    "flan-t5-xxl": _t5((4096, 64, 10240), 24, 64, **_GATED),
    "vit-base": _vit(768, 12, 12),
    "vit-large": _vit(1024, 24, 16),
    "vit-huge": _vit(1280, 32, 16, patch=14),
}  # fmt: skip
