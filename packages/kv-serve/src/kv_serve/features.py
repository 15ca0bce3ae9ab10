"""What of vLLM works beside a policy, by how the policy stores tokens; vLLM is not imported."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of vLLM.

    Attributes:
        name: what documents call it.
        asked: how it is asked for, as an option or in a request.
        slots: whether it works under one format for all tokens, which is stored in vLLM's slots.
        pages: whether it works under every other policy, which is stored in pages.
        note: what else there is to say.
    """

    name: str
    asked: str
    slots: bool
    pages: bool
    note: str = ""


# In the order of the table. What is not served is refused by a message, when an engine starts or a
# request comes.
FEATURES: Final = (
    Feature(
        "prefix caching",
        "`--enable-prefix-caching`",
        slots=True,
        pages=True,
        note="in pages of prefixes: what a request names, turns, and documents, the last not "
        "beside chunks and states",
    ),
    Feature("chunked prefill", "`--max-num-batched-tokens`", slots=True, pages=True),
    Feature("several answers", "`n`", slots=True, pages=True),
    Feature("log probabilities", "`logprobs`, `prompt_logprobs`", slots=True, pages=True),
    Feature("structured output", "`structured_outputs`", slots=True, pages=True),
    Feature("beam search", "`use_beam_search`", slots=True, pages=True),
    Feature("priorities", "`--scheduling-policy priority`", slots=True, pages=True),
    Feature("abort", "a closed connection", slots=True, pages=True, note="waiting or running"),
    Feature("LoRA adapters", "`--enable-lora`", slots=True, pages=True, note="several at once"),
    Feature("mixtures of experts", "a model that has them", slots=True, pages=True),
    Feature(
        "pictures",
        "`image_url` in a message",
        slots=True,
        pages=True,
        note="prefixes that a request names need tokens alone",
    ),
    Feature("embeddings", "`--runner pooling`", slots=False, pages=False),
    Feature("streamed input", "resumable requests", slots=False, pages=False),
    Feature("tensor parallelism", "`--tensor-parallel-size`", slots=True, pages=True),
    Feature(
        "data parallelism",
        "`--data-parallel-size`",
        slots=True,
        pages=True,
        note="each engine has a memory of its own",
    ),
    Feature("pipeline parallelism", "`--pipeline-parallel-size`", slots=False, pages=False),
    Feature("context parallelism", "`--decode-context-parallel-size`", slots=False, pages=False),
    Feature(
        "speculative decoding, n-gram",
        "`--speculative-config.method ngram`",
        slots=True,
        pages=True,
        note="in pages under policies that plan after prompts alone",
    ),
    Feature(
        "speculative decoding, draft model",
        "`--speculative-config.method draft_model`",
        slots=True,
        pages=True,
        note="in slots under the policy too; in pages on a CPU, uncompressed, under policies that "
        "plan after prompts alone",
    ),
    Feature(
        "speculative decoding, heads of the model",
        "`--speculative-config.method eagle`, `eagle3`, `mtp`",
        slots=True,
        pages=True,
        note="as a draft model",
    ),
    Feature(
        "speculative decoding, others",
        "Medusa, suffix, parallel drafts",
        slots=False,
        pages=False,
    ),
    Feature(
        "offloading to the host",
        "`OffloadingConnector`",
        slots=True,
        pages=False,
    ),
    Feature(
        "prompts in files",
        "`ExampleConnector`",
        slots=True,
        pages=False,
        note="with `--no-enable-chunked-prefill` and a folder of its own",
    ),
    Feature("other KV connectors", "NIXL, LMCache, Mooncake", slots=False, pages=False),
    Feature("several KV connectors", "`MultiConnector`", slots=False, pages=False),
    Feature("vLLM's own cache formats", "`--kv-cache-dtype`", slots=False, pages=False),
    Feature(
        "sleep mode",
        "`--enable-sleep-mode`",
        slots=True,
        pages=True,
        note="at both levels, on a GPU; a CPU has none",
    ),
)
