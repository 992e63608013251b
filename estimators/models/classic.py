"""Decoders with layer norms: GPT-2, GPT-NeoX, OPT, Falcon, Phi."""

from __future__ import annotations

from dataclasses import replace

from estimators.models.draft import Draft, Fields
from estimators.models.shapes import Attention, HeadKind, Mlp, ModelShape, NormKind


def gpt2(fields: Fields, family: str) -> ModelShape:
    """Return a GPT-2 language model."""
    draft = Draft(fields, family)
    hidden, count = fields.size("n_embd"), fields.size("n_layer")
    vocabulary, heads = fields.size("vocab_size"), fields.size("n_head")
    width = fields.size("n_inner", 4 * hidden)
    draft.embedding("transformer.wte", vocabulary, hidden)
    draft.embedding("transformer.wpe", fields.size("n_positions", 1024), hidden)
    for index in range(count):
        name = f"transformer.h.{index}"
        draft.begin_block(name, count)
        start = draft.position
        draft.norm(f"{name}.ln_1", hidden, bias=True)
        _conv1d(draft, f"{name}.attn.c_attn", hidden, 3 * hidden)
        _conv1d(draft, f"{name}.attn.c_proj", hidden, hidden)
        draft.norm(f"{name}.ln_2", hidden, bias=True)
        _conv1d(draft, f"{name}.mlp.c_fc", hidden, width)
        _conv1d(draft, f"{name}.mlp.c_proj", width, hidden)
        draft.stack(
            draft.numel_since(start),
            (Attention(heads, heads, hidden // heads, upcasts=False),),
            Mlp(width, activation=fields.activation("activation_function", "gelu_new")),
            NormKind.LAYER,
            dropouts=fields.dropouts("resid_pdrop", 2, 0.1),
        )
    draft.end_block()
    draft.norm("transformer.ln_f", hidden, bias=True)
    if not fields.flag("tie_word_embeddings", default=True):
        draft.linear("lm_head", hidden, vocabulary)
    return draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.CAUSAL)


def _conv1d(draft: Draft, name: str, inputs: int, outputs: int) -> None:
    """Add a layer whose weight is stored transposed."""
    draft.add(f"{name}.weight", inputs, outputs)
    draft.add(f"{name}.bias", outputs)


def gpt_neox(fields: Fields, family: str) -> ModelShape:
    """Return a GPT-NeoX or Pythia language model."""
    draft = Draft(fields, family)
    hidden, count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    vocabulary, width = fields.size("vocab_size"), fields.size("intermediate_size")
    bias = fields.flag("attention_bias", default=True)
    attention = replace(fields.attention(), is_packed=True)
    is_parallel = fields.flag("use_parallel_residual", default=True)
    draft.embedding("gpt_neox.embed_in", vocabulary, hidden)
    for index in range(count):
        name = f"gpt_neox.layers.{index}"
        draft.begin_block(name, count)
        start = draft.position
        draft.norm(f"{name}.input_layernorm", hidden, bias=True)
        draft.norm(f"{name}.post_attention_layernorm", hidden, bias=True)
        draft.linear(f"{name}.attention.query_key_value", hidden, 3 * hidden, bias=bias)
        draft.linear(f"{name}.attention.dense", hidden, hidden, bias=bias)
        draft.linear(f"{name}.mlp.dense_h_to_4h", hidden, width, bias=True)
        draft.linear(f"{name}.mlp.dense_4h_to_h", width, hidden, bias=True)
        draft.stack(
            draft.numel_since(start),
            (attention,),
            Mlp(width, activation=fields.activation("hidden_act", "gelu")),
            NormKind.LAYER,
            norms=(2, 1 if is_parallel else 2),
            dropouts=fields.dropouts("hidden_dropout", 2),
        )
    draft.end_block()
    draft.norm("gpt_neox.final_layer_norm", hidden, bias=True)
    if not fields.flag("tie_word_embeddings", default=False):
        draft.linear("lm_head", hidden, vocabulary)
    return draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.CAUSAL)


def opt(fields: Fields, family: str) -> ModelShape:
    """Return an OPT language model."""
    draft = Draft(fields, family)
    hidden, count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    vocabulary, width = fields.size("vocab_size"), fields.size("ffn_dim")
    inner = fields.size("word_embed_proj_dim", hidden)
    affine = fields.flag("layer_norm_elementwise_affine", default=True)
    bias = fields.flag("enable_bias", default=True)
    attention = fields.attention(rotary=False)
    prefix = "model.decoder"
    draft.embedding(f"{prefix}.embed_tokens", vocabulary, inner)
    draft.embedding(f"{prefix}.embed_positions", fields.size("max_position_embeddings") + 2, hidden)
    if inner != hidden:
        draft.linear(f"{prefix}.project_out", hidden, inner)
        draft.linear(f"{prefix}.project_in", inner, hidden)
    ends_in_norm = fields.flag("do_layer_norm_before", default=True)
    if ends_in_norm and not fields.flag("_remove_final_layer_norm", default=False) and affine:
        draft.norm(f"{prefix}.final_layer_norm", hidden, bias=True)
    for index in range(count):
        name = f"{prefix}.layers.{index}"
        draft.begin_block(name, count)
        start = draft.position
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            draft.linear(f"{name}.self_attn.{part}", hidden, hidden, bias=bias)
        if affine:
            draft.norm(f"{name}.self_attn_layer_norm", hidden, bias=True)
        draft.linear(f"{name}.fc1", hidden, width, bias=bias)
        draft.linear(f"{name}.fc2", width, hidden, bias=bias)
        if affine:
            draft.norm(f"{name}.final_layer_norm", hidden, bias=True)
        draft.stack(
            draft.numel_since(start),
            (attention,),
            Mlp(width, activation=fields.activation("activation_function", "relu")),
            NormKind.LAYER,
            dropouts=fields.dropouts("dropout", 2, 0.1),
        )
    draft.end_block()
    if not fields.flag("tie_word_embeddings", default=True):
        draft.linear("lm_head", inner, vocabulary)
    return draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.CAUSAL)


def falcon(fields: Fields, family: str) -> ModelShape:
    """Return a Falcon language model."""
    draft = Draft(fields, family)
    hidden, count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    vocabulary, heads = fields.size("vocab_size"), fields.size("num_attention_heads")
    width = fields.size("ffn_hidden_size", 4 * hidden)
    bias = fields.flag("bias", default=False)
    is_new = fields.flag("new_decoder_architecture", default=False)
    is_parallel = fields.flag("parallel_attn", default=True)
    shared = heads
    if is_new:
        shared = fields.size("num_kv_heads", heads)
    elif fields.flag("multi_query", default=True):
        shared = 1
    norms = ["input_layernorm"]
    if is_new and fields.integer("num_ln_in_parallel_attn", 2) == 2:
        norms = ["ln_attn", "ln_mlp"]
    elif not is_new and not is_parallel:
        norms = ["post_attention_layernorm", "input_layernorm"]
    made = hidden + 2 * shared * (hidden // heads)
    attention = Attention(  # the new architecture repeats keys and values for every head
        heads,
        heads if is_new else shared,
        hidden // heads,
        rotary=True,
        is_packed=not is_new,
        upcasts=False,
    )
    draft.embedding("transformer.word_embeddings", vocabulary, hidden)
    for index in range(count):
        name = f"transformer.h.{index}"
        draft.begin_block(name, count)
        start = draft.position
        draft.linear(f"{name}.self_attention.query_key_value", hidden, made, bias=bias)
        draft.linear(f"{name}.self_attention.dense", hidden, hidden, bias=bias)
        draft.linear(f"{name}.mlp.dense_h_to_4h", hidden, width, bias=bias)
        draft.linear(f"{name}.mlp.dense_4h_to_h", width, hidden, bias=bias)
        for norm in norms:
            draft.norm(f"{name}.{norm}", hidden, bias=True)
        draft.stack(
            draft.numel_since(start),
            (attention,),
            Mlp(width, activation=fields.activation("activation", "gelu")),
            NormKind.LAYER,
            norms=(len(norms), 1 if is_new or is_parallel else 2),
            dropouts=fields.dropouts("hidden_dropout", 2),
        )
    draft.end_block()
    draft.norm("transformer.ln_f", hidden, bias=True)
    if not fields.flag("tie_word_embeddings", default=True):
        draft.linear("lm_head", hidden, vocabulary)
    return draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.CAUSAL)


def phi(fields: Fields, family: str) -> ModelShape:
    """Return a Phi 1, 1.5 or 2 language model."""
    draft = Draft(fields, family)
    hidden, count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    vocabulary, width = fields.size("vocab_size"), fields.size("intermediate_size")
    normed = fields.flag("qk_layernorm", default=False)
    attention = fields.attention(normed_heads=normed)
    draft.embedding("model.embed_tokens", vocabulary, hidden)
    for index in range(count):
        name = f"model.layers.{index}"
        draft.begin_block(name, count)
        start = draft.position
        inside = f"{name}.self_attn"
        draft.linear(f"{inside}.q_proj", hidden, attention.query_width, bias=True)
        draft.linear(f"{inside}.k_proj", hidden, attention.key_value_width, bias=True)
        draft.linear(f"{inside}.v_proj", hidden, attention.key_value_width, bias=True)
        draft.linear(f"{inside}.dense", attention.query_width, hidden, bias=True)
        if normed:
            draft.norm(f"{inside}.q_layernorm", attention.head_dim, bias=True)
            draft.norm(f"{inside}.k_layernorm", attention.head_dim, bias=True)
        draft.linear(f"{name}.mlp.fc1", hidden, width, bias=True)
        draft.linear(f"{name}.mlp.fc2", width, hidden, bias=True)
        draft.norm(f"{name}.input_layernorm", hidden, bias=True)
        draft.stack(
            draft.numel_since(start),
            (attention,),
            Mlp(width, activation=fields.activation("hidden_act", "gelu_new")),
            NormKind.LAYER,
            norms=(1, 1),
            dropouts=fields.dropouts("resid_pdrop", 2),
        )
    draft.end_block()
    draft.norm("model.final_layernorm", hidden, bias=True)
    draft.linear("lm_head", hidden, vocabulary, bias=True)
    return draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.CAUSAL)
