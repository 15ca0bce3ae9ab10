"""A tokenizer of bytes, a plain text, and how a prompt made from them reads."""

import random
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kv_eval.tasks import Sample, Text

TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = ("some", "plain", "words", "of", "no", "account,", "which", "needles", "hide", "among;")


def byte_tokenizer(
    template: str | None = TEMPLATE, *, bos: bool = False
) -> PreTrainedTokenizerFast:
    """A token a byte, so that lengths can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "<bos>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>" if bos else None)
    fast.chat_template = template
    return fast


def plain_text(words: int = 4000) -> Text:
    random_ = random.Random(0)
    sentences, left = [], words
    while left > 0:
        size = random_.randrange(5, 25)
        sentences.append(" ".join(random_.choices(WORDS, k=size)).capitalize() + ".")
        left -= size
    return Text("plain", tuple(" ".join(sentences[i : i + 7]) for i in range(0, len(sentences), 7)))


TOKENIZER: Final = byte_tokenizer()
TEXT: Final = plain_text()


def shown(sample: Sample, tokenizer: PreTrainedTokenizerBase = TOKENIZER) -> tuple[str, str]:
    return tokenizer.decode(sample.prompt_ids), tokenizer.decode(sample.question_ids)
