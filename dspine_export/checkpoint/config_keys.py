"""Which configuration keys are understood, which are harmless, and why every other one is refused.

A key nobody here knows may change the maths without changing a single tensor shape. So an unknown key passes only when it is bookkeeping,
belongs to training, or is switched off (null, false, 0, empty).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from dspine_export.errors import CheckpointError

# Written by transformers, trainers and serving engines; none of them reaches the drafter's forward pass.
BOOKKEEPING = frozenset(
    """
    _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset attn_implementation transformers_version auto_map use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id initializer_range attention_dropout max_window_layers
    output_attentions output_hidden_states return_dict torchscript chunk_size_feed_forward is_encoder_decoder is_decoder
    add_cross_attention cross_attention_hidden_size id2label label2id problem_type pruned_heads tokenizer_class prefix
    task_specific_params tf_legacy_loss use_bfloat16 finetuning_task use_return_dict pretraining_tp keys_to_ignore_at_inference
    generation_config max_length min_length temperature top_p do_sample num_beams tie_encoder_decoder
    speculators_model_type speculators_version speculators_config has_no_defaults_at_init algorithm
    dspark_bonus_anchor num_speculative_tokens base_model base_model_name target_model target_model_path name description comment
    license version format producer
    """.split()  # noqa: SIM905
)

# One of these words makes a key a training key; weight, scale or steps alone would not: they may act at inference.
_TRAINING_WORDS = frozenset(
    """
    loss ce l1 kl cosine gamma lambda warmup epoch epochs lr learning replacement alignment align schedule anneal decay seed train training
    trained trainer optimizer batch anchors dataset data teacher distill distillation dropout candidate_mass_threshold
    """.split()  # noqa: SIM905
)
_STRUCTURAL_WORDS = frozenset("type kind mode activation act head heads norm gate projector layout order scale".split())  # noqa: SIM905


def is_training_key(key: str) -> bool:
    """Whether the words of `key` say that it steered training only (`alignment_warmup_steps`), not the model's structure."""
    words = {key, *key.lower().split("_")}
    return bool(words & _TRAINING_WORDS) and not words & _STRUCTURAL_WORDS


def is_neutral(value: object) -> bool:
    """Whether `value` switches a feature off: null, false, zero or empty."""
    return value is None or value is False or value in (0, "", [], {})


def is_harmless(key: str, value: object) -> bool:
    """Whether an unknown `key` may be ignored."""
    return key in BOOKKEEPING or key.startswith("_") or is_training_key(key) or is_neutral(value)


def keep_known(raw: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """The entries of `raw` whose keys are in `known`; harmless others are dropped, the rest is refused with a suggestion."""
    for key, value in raw.items():
        if key in known or is_harmless(key, value):
            continue
        close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.75)
        raise CheckpointError(
            f"Unknown configuration key {ascii(key)[:100]}",
            where=where,
            got=ascii(value)[:200],
            expected="keys whose effect on the model is known",
            fix=f"did you mean {close[0]!r}?"
            if close
            else "if it has no effect on inference, remove it from the drafter's config.json",
        )
    return {key: value for key, value in raw.items() if key in known}
