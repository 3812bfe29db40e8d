"""Prompt files and the target's chat template.

A prompt file holds one JSON object a line: {"turns": [first user message, ...], "source": optional name} for a chat target, or
{"text": beginning of a text} for a target without a chat template.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONGEST_PROMPT = 448  # tokens, template included; longer prompts are skipped


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The objects of a prompt file, plain or gzip."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def load_tokenizer(target: Path) -> Any:
    """The target's tokenizer, with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def encode_chats(tokenizer: Any, conversations: Sequence[Sequence[str]]) -> list[list[int]]:
    """Token ids of conversations (user, assistant, user, ...) up to where the assistant answers next."""
    roles = ("user", "assistant")
    texts = [
        tokenizer.apply_chat_template(
            [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], tokenize=False, add_generation_prompt=True
        )
        for turns in conversations
    ]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def encode_prompts(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Token ids of every row's first turn, or of its plain text."""
    if rows and "text" in rows[0]:
        return [list(ids) for ids in tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"]]
    return encode_chats(tokenizer, [[row["turns"][0]] for row in rows])
