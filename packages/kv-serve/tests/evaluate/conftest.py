"""A tiny random model on disk, with a tokenizer of single characters, and a text for it."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kv_serve.models import LoadedModel, load_model
from kv_serve.tasks import Text

SPECIAL = ("<unk>", "<end>", "<user>", "<assistant>")
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """Make a tokenizer for which every character is a token."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    made.chat_template = TEMPLATE if chat else None
    return made


def save(folder: Path, *, chat: bool = True) -> Path:
    """Write a tiny Llama and its tokenizer."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # attention that depends on what is attended to
    model.save_pretrained(folder)
    tokenizer(chat=chat).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model."""
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that has no chat template."""
    return save(tmp_path_factory.mktemp("plain"), chat=False)


@pytest.fixture(scope="session")
def loaded(folder: Path) -> LoadedModel:
    """The tiny chat model."""
    return load_model(str(folder), device="cpu")


@pytest.fixture(scope="session")
def text() -> Text:
    """Sentences that differ."""
    words = ["river", "stone", "cloud", "light", "paper", "green", "quiet", "early"]
    sentences = (
        f"The {words[i % 8]} of {words[i * 3 % 7]} {i} is {words[i * 5 % 8]}." for i in range(200)
    )
    return Text("sentences", (" ".join(sentences),))


@pytest.fixture(scope="session")
def text_file(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sentences in a file."""
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text(text.body)
    return path
