"""Encoders and encoder-decoders: BERT, RoBERTa, ViT, T5."""

from __future__ import annotations

import dataclasses

from estimators.models.draft import Draft, Fields, ModelError
from estimators.models.shapes import Activation, Attention, HeadKind, Mlp, ModelShape, NormKind


def bert(fields: Fields, family: str) -> ModelShape:
    """Return a BERT or RoBERTa model: bare, or with the head of masked language modelling."""
    draft = Draft(fields, family)
    hidden, vocabulary = fields.size("hidden_size"), fields.size("vocab_size")
    named = fields.architecture
    is_bare = named.endswith("Model")
    if not is_bare and named and not named.endswith("ForMaskedLM"):
        raise ModelError(
            f"{fields.name}: {named} is not known; with BERT these are: {_heads(family)}"
        )
    prefix = "" if is_bare else f"{family}."
    inside = f"{prefix}embeddings"
    positions = ("position_embeddings", fields.size("max_position_embeddings"))
    kinds = ("token_type_embeddings", fields.size("type_vocab_size", 2))
    draft.embedding(f"{inside}.word_embeddings", vocabulary, hidden)
    for name, count in (positions, kinds) if family == "bert" else (kinds,):
        draft.embedding(f"{inside}.{name}", count, hidden)
    draft.norm(f"{inside}.LayerNorm", hidden, bias=True)
    if family != "bert":
        draft.embedding(f"{inside}.{positions[0]}", positions[1], hidden)
    _add_encoder(draft, f"{prefix}encoder.layer")
    if is_bare:
        draft.linear("pooler.dense", hidden, hidden, bias=True)
        return draft.finish(hidden=hidden, vocabulary=0, head=HeadKind.NONE)
    head, dense, norm = (
        ("cls.predictions", "transform.dense", "transform.LayerNorm")
        if family == "bert"
        else ("lm_head", "dense", "layer_norm")
    )
    draft.add(f"{head}.bias", vocabulary)
    draft.linear(f"{head}.{dense}", hidden, hidden, bias=True)
    draft.norm(f"{head}.{norm}", hidden, bias=True)
    made = draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.MASKED)
    return dataclasses.replace(made, upcasts_logits=False)


def _heads(family: str) -> str:
    name = "Bert" if family == "bert" else "Roberta"
    return f"{name}Model, {name}ForMaskedLM"


def _add_encoder(draft: Draft, prefix: str) -> None:
    fields = draft.fields
    hidden, count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    width = fields.size("intermediate_size")
    attention = dataclasses.replace(fields.attention(rotary=False), causal=False, upcasts=False)
    for index in range(count):
        name = f"{prefix}.{index}"
        draft.begin_block(name, count)
        start = draft.position
        for part in ("query", "key", "value"):
            draft.linear(f"{name}.attention.self.{part}", hidden, hidden, bias=True)
        draft.linear(f"{name}.attention.output.dense", hidden, hidden, bias=True)
        draft.norm(f"{name}.attention.output.LayerNorm", hidden, bias=True)
        draft.linear(f"{name}.intermediate.dense", hidden, width, bias=True)
        draft.linear(f"{name}.output.dense", width, hidden, bias=True)
        draft.norm(f"{name}.output.LayerNorm", hidden, bias=True)
        draft.stack(
            draft.numel_since(start),
            (attention,),
            Mlp(width, activation=fields.activation("hidden_act", "gelu")),
            NormKind.LAYER,
            dropouts=fields.dropouts("hidden_dropout_prob", 2, 0.1),
        )
    draft.end_block()


def vit(fields: Fields, family: str) -> ModelShape:
    """Return a ViT with a head for classes."""
    draft = Draft(fields, family)
    hidden, count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    width, patch = fields.size("intermediate_size"), fields.size("patch_size", 16)
    patches = (fields.size("image_size", 224) // patch) ** 2
    bias = fields.flag("qkv_bias", default=True)
    attention = dataclasses.replace(fields.attention(rotary=False), causal=False)
    inside = "vit.embeddings"
    draft.add(f"{inside}.cls_token", 1, 1, hidden)
    draft.add(f"{inside}.position_embeddings", 1, patches + 1, hidden)
    channels = fields.size("num_channels", 3)
    draft.add(f"{inside}.patch_embeddings.projection.weight", hidden, channels, patch, patch)
    draft.add(f"{inside}.patch_embeddings.projection.bias", hidden)
    for index in range(count):
        name = f"vit.layers.{index}"
        draft.begin_block(name, count)
        start = draft.position
        for part in ("q_proj", "k_proj", "v_proj"):
            draft.linear(f"{name}.attention.{part}", hidden, hidden, bias=bias)
        draft.linear(f"{name}.attention.o_proj", hidden, hidden, bias=True)
        draft.norm(f"{name}.layernorm_before", hidden, bias=True)
        draft.norm(f"{name}.layernorm_after", hidden, bias=True)
        draft.linear(f"{name}.mlp.fc1", hidden, width, bias=True)
        draft.linear(f"{name}.mlp.fc2", width, hidden, bias=True)
        draft.stack(
            draft.numel_since(start),
            (attention,),
            Mlp(width, activation=fields.activation("hidden_act", "gelu")),
            NormKind.LAYER,
            dropouts=fields.dropouts("hidden_dropout_prob", 2),
        )
    draft.end_block()
    draft.norm("vit.layernorm", hidden, bias=True)
    classes = len(fields.mapping("id2label")) or fields.size("num_labels", 2)
    draft.linear("classifier", hidden, classes, bias=True)
    made = draft.finish(hidden=hidden, vocabulary=classes, head=HeadKind.CLASSES)
    pixels = channels * fields.size("image_size", 224) ** 2
    return dataclasses.replace(made, fixed_tokens=patches + 1, input_numel=pixels)


def t5(fields: Fields, family: str) -> ModelShape:
    """Return a T5 model for conditional generation.

    The head is always tied: so transformers 5 builds it, whatever `tie_word_embeddings` says.
    """
    draft = Draft(fields, family)
    hidden, vocabulary = fields.size("d_model"), fields.size("vocab_size")
    draft.embedding("shared", vocabulary, hidden)
    count = fields.size("num_layers")
    _add_t5_blocks(draft, "encoder", count, decodes=False)
    _add_t5_blocks(draft, "decoder", fields.size("num_decoder_layers", count), decodes=True)
    made = draft.finish(hidden=hidden, vocabulary=vocabulary, head=HeadKind.CAUSAL)
    return dataclasses.replace(made, upcasts_logits=False)


def _add_t5_blocks(draft: Draft, side: str, count: int, *, decodes: bool) -> None:
    fields = draft.fields
    hidden, width = fields.size("d_model"), fields.size("d_ff")
    heads = fields.size("num_heads")
    own = Attention(heads, heads, fields.size("d_kv"), causal=decodes, upcasts=False)
    attention = (own, dataclasses.replace(own, is_cross=True, causal=False)) if decodes else (own,)
    projection = fields.text("feed_forward_proj", "relu")
    is_gated = projection.startswith("gated")
    activation = Activation.COMPOSED if "gelu" in projection else Activation.IN_PLACE
    mlp = Mlp(width, gated=is_gated, activation=activation)
    count_norms = len(attention) + 1
    for index in range(count):
        name = f"{side}.block.{index}"
        draft.begin_block(name, count)
        start = draft.position
        for position, each in enumerate(attention):
            layer = f"{name}.layer.{position}"
            kind = "EncDecAttention" if each.is_cross else "SelfAttention"
            for part in ("q", "k", "v"):
                draft.linear(f"{layer}.{kind}.{part}", hidden, own.query_width)
            draft.linear(f"{layer}.{kind}.o", own.query_width, hidden)
            if index == 0 and not each.is_cross:
                buckets = fields.size("relative_attention_num_buckets", 32)
                draft.embedding(f"{layer}.{kind}.relative_attention_bias", buckets, heads)
            draft.norm(f"{layer}.layer_norm", hidden)
        layer = f"{name}.layer.{len(attention)}"
        for part in ("wi_0", "wi_1") if is_gated else ("wi",):
            draft.linear(f"{layer}.DenseReluDense.{part}", hidden, width)
        draft.linear(f"{layer}.DenseReluDense.wo", width, hidden)
        draft.norm(f"{layer}.layer_norm", hidden)
        draft.stack(
            draft.numel_since(start),
            attention,
            mlp,
            NormKind.RMS_KEPT,
            norms=(count_norms, count_norms),
            dropouts=fields.dropouts("dropout_rate", count_norms, 0.1),
        )
    draft.end_block()
    draft.norm(f"{side}.final_layer_norm", hidden)
