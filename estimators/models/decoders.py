"""Decoders with rotary positions and RMS norms: Llama, Mistral, Qwen, Gemma, Phi-3, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from estimators.models.draft import Draft, Fields
from estimators.models.shapes import Attention, HeadKind, Mlp, ModelShape, NormKind

_BETWEEN = ("input_layernorm", "post_attention_layernorm")
_AROUND = (*_BETWEEN, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Variant:
    """In what a family differs from Llama."""

    query_bias: bool | None = False
    """Bias of queries, keys and values; None asks `attention_bias`."""
    output_bias: bool | None = False
    normed_heads: bool = False
    norms: tuple[str, ...] = _BETWEEN
    tied: bool = False
    """Whether the head is tied where the configuration does not say."""
    fused: bool = False
    """Whether one layer makes queries, keys and values, and one both halves of the gate."""
    norm: NormKind = NormKind.RMS
    capped: bool = False
    """Whether attention scores are capped where the configuration does not say."""


VARIANTS = {
    "llama": Variant(query_bias=None, output_bias=None),
    "mistral": Variant(),
    "qwen2": Variant(query_bias=True),
    "qwen3": Variant(query_bias=None, output_bias=None, normed_heads=True),
    "gemma": Variant(query_bias=None, output_bias=None, tied=True, norm=NormKind.RMS_SCALED),
    "gemma2": Variant(
        query_bias=None,
        output_bias=None,
        tied=True,
        norms=_AROUND,
        norm=NormKind.RMS_SCALED,
        capped=True,
    ),
    "gemma3_text": Variant(
        query_bias=None,
        output_bias=None,
        tied=True,
        norms=_AROUND,
        normed_heads=True,
        norm=NormKind.RMS_SCALED,
    ),
    "phi3": Variant(fused=True),
    "mixtral": Variant(),
    "qwen2_moe": Variant(query_bias=True),
    "qwen3_moe": Variant(query_bias=None, output_bias=None, normed_heads=True),
}

_DEFAULT_HEAD_DIM = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}


def rotary_decoder(fields: Fields, family: str) -> ModelShape:
    """Return a decoder of one of `VARIANTS`."""
    variant = VARIANTS[family]
    draft = Draft(fields, family)
    hidden, vocabulary = fields.size("hidden_size"), fields.size("vocab_size")
    count = fields.size("num_hidden_layers")
    attention = _attention(fields, family, variant)
    draft.embedding("model.embed_tokens", vocabulary, hidden)
    for index in range(count):
        name = f"model.layers.{index}"
        draft.begin_block(name, count)
        start = draft.position
        _add_attention(draft, f"{name}.self_attn", variant, attention)
        mlp = _MLPS.get(family, _dense)(draft, f"{name}.mlp", index, fused=variant.fused)
        for norm in variant.norms:
            draft.norm(f"{name}.{norm}", hidden)
        draft.stack(
            draft.numel_since(start),
            (attention,),
            mlp,
            variant.norm,
            norms=(len(variant.norms), len(variant.norms)),
        )
    draft.end_block()
    draft.norm("model.norm", hidden)
    if not fields.flag("tie_word_embeddings", default=variant.tied):
        draft.linear("lm_head", hidden, vocabulary)
    made = draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.CAUSAL)
    return replace(made, caps_logits=variant.capped)


def _attention(fields: Fields, family: str, variant: Variant) -> Attention:
    if not fields.has("head_dim") and family in _DEFAULT_HEAD_DIM:
        heads = fields.size("num_attention_heads")
        shared = fields.size("num_key_value_heads", heads)
        made = Attention(heads, shared, _DEFAULT_HEAD_DIM[family], rotary=True)
    else:
        made = fields.attention()
    return replace(
        made,
        normed_heads=variant.normed_heads,
        is_packed=variant.fused,
        is_capped=variant.capped,
    )


def _add_attention(draft: Draft, name: str, variant: Variant, attention: Attention) -> None:
    hidden = draft.fields.size("hidden_size")
    written = draft.fields.flag("attention_bias", default=False)
    query_bias = written if variant.query_bias is None else variant.query_bias
    output_bias = written if variant.output_bias is None else variant.output_bias
    query, both = attention.query_width, attention.key_value_width
    if variant.fused:
        draft.linear(f"{name}.o_proj", query, hidden)
        draft.linear(f"{name}.qkv_proj", hidden, query + 2 * both)
        return
    draft.linear(f"{name}.q_proj", hidden, query, bias=query_bias)
    draft.linear(f"{name}.k_proj", hidden, both, bias=query_bias)
    draft.linear(f"{name}.v_proj", hidden, both, bias=query_bias)
    draft.linear(f"{name}.o_proj", query, hidden, bias=output_bias)
    if variant.normed_heads:
        draft.norm(f"{name}.q_norm", attention.head_dim)
        draft.norm(f"{name}.k_norm", attention.head_dim)


def _dense(draft: Draft, name: str, _index: int, *, fused: bool = False) -> Mlp:
    width = draft.fields.size("intermediate_size")
    _add_gated(draft, name, width, fused=fused)
    return Mlp(width, gated=True)


def _add_gated(draft: Draft, name: str, width: int, *, fused: bool = False) -> None:
    hidden = draft.fields.size("hidden_size")
    bias = draft.fields.flag("mlp_bias", default=False)
    if fused:
        draft.linear(f"{name}.gate_up_proj", hidden, 2 * width)
    else:
        draft.linear(f"{name}.gate_proj", hidden, width, bias=bias)
        draft.linear(f"{name}.up_proj", hidden, width, bias=bias)
    draft.linear(f"{name}.down_proj", width, hidden, bias=bias)


def _add_experts(draft: Draft, name: str, count: int, width: int) -> None:
    hidden = draft.fields.size("hidden_size")
    draft.add(f"{name}.experts.gate_up_proj", count, 2 * width, hidden)
    draft.add(f"{name}.experts.down_proj", count, hidden, width)


def _routed(draft: Draft, width: int, count: int, active: int, shared: int = 0) -> Mlp:
    active = min(draft.fields.size("num_experts_per_tok", active), count)
    return Mlp(width, gated=True, experts=count, active_experts=active, shared_width=shared)


def _mixtral(draft: Draft, name: str, _index: int, *, fused: bool = False) -> Mlp:  # noqa: ARG001
    fields = draft.fields
    width, count = fields.size("intermediate_size"), fields.size("num_local_experts", 8)
    draft.add(f"{name}.gate.weight", count, fields.size("hidden_size"))
    _add_experts(draft, name, count, width)
    return _routed(draft, width, count, 2)


def _is_dense(fields: Fields, index: int) -> bool:
    if index in fields.numbers("mlp_only_layers"):
        return True
    return (index + 1) % fields.size("decoder_sparse_step", 1) != 0


def _qwen2_moe(draft: Draft, name: str, index: int, *, fused: bool = False) -> Mlp:
    fields = draft.fields
    if _is_dense(fields, index):
        return _dense(draft, name, index, fused=fused)
    count, width = fields.size("num_experts", 60), fields.size("moe_intermediate_size")
    shared = fields.size("shared_expert_intermediate_size")
    hidden = fields.size("hidden_size")
    draft.add(f"{name}.gate.weight", count, hidden)
    _add_experts(draft, name, count, width)
    _add_gated(draft, f"{name}.shared_expert", shared)
    draft.linear(f"{name}.shared_expert_gate", hidden, 1)
    return _routed(draft, width, count, 4, shared)


def _qwen3_moe(draft: Draft, name: str, index: int, *, fused: bool = False) -> Mlp:
    fields = draft.fields
    if _is_dense(fields, index):
        return _dense(draft, name, index, fused=fused)
    count, width = fields.size("num_experts", 128), fields.size("moe_intermediate_size")
    _add_experts(draft, name, count, width)
    draft.add(f"{name}.gate.weight", count, fields.size("hidden_size"))
    return _routed(draft, width, count, 8)


_MLPS: dict[str, Callable[..., Mlp]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
