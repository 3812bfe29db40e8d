"""Names, types and shapes of the two models served by the backend ``dspine``, and the parameters of their configuration.

Data only: the repository generator writes ``config.pbtxt`` from it, the backend completes and checks configurations with it, clients
are tested against it. Tensor names are those of TensorRT-LLM's Triton models where these have one. Shapes leave the batch dimension
out; a request carries one prompt (or one sequence), and concurrency comes from many requests, which the engine batches itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BACKEND = "dspine"
TEXT_MODEL, DRAFTER_MODEL = "dspine", "dspine_drafter"
Kind = Literal["text", "drafter"]  # the `kind` parameter: which of the two a model of this backend is


@dataclass(frozen=True)
class Tensor:
    """One input or output. `dtype` in Triton's words (TYPE_*), `dims` without the batch dimension, -1 for any size.

    `streamed` marks outputs that every response of a stream carries; the others come with the last one.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False
    doc: str = ""
    streamed: bool = False


@dataclass(frozen=True)
class Parameter:
    """One configuration parameter, a string in ``config.pbtxt``; `default` is that string, None where it must be given."""

    name: str
    default: str | None
    doc: str


TEXT_INPUTS: tuple[Tensor, ...] = (
    Tensor(
        "text_input", "TYPE_STRING", (1,), True, "the prompt, UTF-8; exactly one of text_input, messages and input_ids"
    ),
    Tensor(
        "messages",
        "TYPE_STRING",
        (1,),
        True,
        "a chat as JSON, [{role, content}, ..], through the target's chat template",
    ),
    Tensor("input_ids", "TYPE_INT32", (-1,), True, "the prompt as token ids"),
    Tensor("chat", "TYPE_BOOL", (1,), True, "treat text_input as a user's message in the chat template; default false"),
    Tensor(
        "max_tokens", "TYPE_INT32", (1,), True, "most new tokens, at least 1; default: the parameter default_max_tokens"
    ),
    Tensor("stop_words", "TYPE_STRING", (-1,), True, "texts that end the output, which ends before them"),
    Tensor("temperature", "TYPE_FP32", (1,), True, "0 (the default) is greedy"),
    Tensor("top_p", "TYPE_FP32", (1,), True, "nucleus at temperature > 0; default 1"),
    Tensor("random_seed", "TYPE_UINT64", (1,), True, "of all random draws of this request; default 0"),
    Tensor(
        "num_draft_tokens", "TYPE_INT32", (1,), True, "tokens drafted per round, 0 (no speculation) .. B-1; default B-1"
    ),
    Tensor("ignore_eos", "TYPE_BOOL", (1,), True, "go on after an end token; default false"),
    Tensor("stream", "TYPE_BOOL", (1,), True, "one response per piece of text; needs a decoupled model; default false"),
)

TEXT_OUTPUTS: tuple[Tensor, ...] = (
    Tensor(
        "text_output", "TYPE_STRING", (1,), doc="new text: a piece of it when streaming, else all of it", streamed=True
    ),
    Tensor("output_ids", "TYPE_INT32", (-1,), doc="the new tokens of this response", streamed=True),
    Tensor("finish_reason", "TYPE_STRING", (1,), doc="stop (end token or stop word) or length"),
    Tensor("prompt_tokens", "TYPE_INT32", (1,), doc="tokens of the prompt"),
    Tensor("completion_tokens", "TYPE_INT32", (1,), doc="new tokens, the end token included"),
    Tensor("acceptance_rate", "TYPE_FP32", (1,), doc="accepted / drafted tokens"),
    Tensor("acceptance_length", "TYPE_FP32", (1,), doc="tau: committed tokens per target call, bonus token included"),
    Tensor("total_accepted_draft_tokens", "TYPE_INT32", (1,), doc="drafted tokens that the target kept"),
    Tensor("total_draft_tokens", "TYPE_INT32", (1,), doc="drafted tokens that the target checked"),
    Tensor("accepted_per_position", "TYPE_INT32", (-1,), doc="drafts whose token at slot 1, 2, .. was kept"),
    Tensor("queue_seconds", "TYPE_FP32", (1,), doc="from arrival to a slot"),
    Tensor("time_to_first_token", "TYPE_FP32", (1,), doc="seconds from arrival to the first token"),
)

# Parameters of a single request (JSON fields beside the tensors at /generate, `parameters` elsewhere).
DEADLINE_PARAMETER = "deadline_ms"  # milliseconds after arrival at which the request fails
REQUEST_PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        DEADLINE_PARAMETER,
        "",
        "milliseconds from arrival after which the request is given up; Triton's own `timeout`, in microseconds, works too",
    ),
)
# What the server itself and its clients may put among a request's parameters.
SERVER_PARAMETERS = (
    "timeout",
    "priority",
    "id",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "binary_data_output",
    "binary_data_size",
)
SERVER_PREFIX = "triton_"
# What other servers call an input of this one.
ALIASES = {
    "prompt": "text_input",
    "text": "text_input",
    "seed": "random_seed",
    "stop": "stop_words",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "deadline": DEADLINE_PARAMETER,
}

COMMON_PARAMETERS: tuple[Parameter, ...] = (
    Parameter("kind", "text", "text or drafter: which model of this backend it is"),
    Parameter("bundle", None, "the bundle (or drafter checkpoint); relative paths start at the model repository"),
    Parameter(
        "target_model", None, "the target's Hugging Face directory; relative paths start at the model repository"
    ),
    Parameter(
        "executor", "auto", "torch, onnxruntime or tensorrt; auto: onnxruntime for a bundle on the CPU, else torch"
    ),
    Parameter("device", "cpu", "cpu, cuda, or cuda:N"),
    Parameter("dtype", "auto", "float32 or bfloat16; auto: float32 on the CPU, else bfloat16"),
    Parameter("max_slots", "16", "sequences held at once, each with key/value caches of its own"),
    Parameter("max_seq_len", "2048", "most tokens of prompt and output together"),
    Parameter("check_hashes", "true", "compare every file of the bundle with its manifest before loading"),
    Parameter("warmup", "true", "run every code path once before the model is ready"),
    Parameter("threads", "0", "CPU threads torch computes with; 0 leaves torch's default"),
)

TEXT_PARAMETERS: tuple[Parameter, ...] = (
    *COMMON_PARAMETERS,
    Parameter("max_queue", "256", "requests that may wait for a slot; more are refused as overloaded"),
    Parameter("prefill_chunk_tokens", "512", "most prompt tokens processed between two rounds of the running streams"),
    Parameter("default_max_tokens", "256", "max_tokens of requests that do not say"),
    Parameter("max_prompt_bytes", "262144", "longest text_input or messages"),
    Parameter("max_stop_words", "16", "most stop words of a request"),
    Parameter("default_deadline_ms", "0", "deadline of requests that do not say; 0: none"),
    Parameter("drain_seconds", "20", "how long unloading waits for running streams"),
    Parameter(
        "strict_fields",
        "true",
        "refuse requests with fields or parameters that nothing reads; false where the server forwards HTTP headers as parameters",
    ),
)

DRAFTER_PARAMETERS: tuple[Parameter, ...] = (
    *COMMON_PARAMETERS,
    Parameter("idle_seconds", "600", "a sequence untouched for this long loses its slot"),
)

# Overrides of the two paths, for containers in which the directories are mounted elsewhere.
ENVIRONMENT = {"bundle": "DSPINE_BUNDLE", "target_model": "DSPINE_TARGET_MODEL"}


def drafter_inputs(hidden_width: int, hidden_dtype: str = "TYPE_FP32") -> tuple[Tensor, ...]:
    """Inputs of the token-level model; `hidden_width` is A*d, `hidden_dtype` TYPE_FP32, TYPE_FP16 or TYPE_BF16."""
    return (
        Tensor(
            "target_hidden", hidden_dtype, (-1, hidden_width), True, "[T, A*d] tapped states of newly committed tokens"
        ),
        Tensor("count", "TYPE_INT32", (1,), True, "leading rows of target_hidden to commit; default all"),
        Tensor("truncate_to", "TYPE_INT64", (1,), True, "roll back to this many committed tokens first"),
        Tensor(
            "anchor_id",
            "TYPE_INT64",
            (1,),
            True,
            "the known token behind the committed ones; without it nothing is drafted",
        ),
        Tensor("temperature", "TYPE_FP32", (1,), True, "0 (the default) drafts greedily"),
        Tensor("random_seed", "TYPE_UINT64", (1,), True, "with the sequence's first request; default 0"),
    )


def drafter_outputs(block_size: int, candidates: int) -> tuple[Tensor, ...]:
    """Outputs of the token-level model; `candidates` is K, 1 for a DFlash drafter. Empty ([0] or [0, K]) where nothing was drafted."""
    return (
        Tensor("draft_tokens", "TYPE_INT64", (-1,), doc=f"[{block_size - 1}] the drafted block"),
        Tensor(
            "candidate_ids",
            "TYPE_INT64",
            (-1, candidates),
            doc=f"[{block_size - 1}, {candidates}] what every slot chose from",
        ),
        Tensor(
            "q", "TYPE_FP32", (-1, candidates), doc="the distribution every token was drawn from, over its candidates"
        ),
        Tensor("context_length", "TYPE_INT64", (1,), doc="committed tokens of this sequence"),
    )


# Control inputs of the sequence batcher (strategy `oldest`): name, kind, type.
SEQUENCE_CONTROLS: tuple[tuple[str, str, str], ...] = (
    ("START", "CONTROL_SEQUENCE_START", "TYPE_BOOL"),
    ("END", "CONTROL_SEQUENCE_END", "TYPE_BOOL"),
    ("CORRID", "CONTROL_SEQUENCE_CORRID", "TYPE_UINT64"),
)
