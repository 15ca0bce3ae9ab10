"""Read prompts and their length limits."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kv_transformers.cli.console import refuse

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel


def read_prompt(file: Path) -> str:
    """Read a UTF-8 text, or stdin for `-`; exit with an error if it cannot be read."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
    except OSError as error:
        refuse(f"the prompt file {file} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        refuse(f"the prompt file {file} is not UTF-8 text: {error.reason} at {error.start}")


def in_chat(loaded: "LoadedModel", text: str, otherwise: str) -> str:
    """Apply the model's chat template to a text; exit with an error if there is none."""
    tokenizer = loaded.tokenizer
    if not tokenizer.chat_template:
        refuse(f"the model {loaded.name} has no chat template; {otherwise}")
    chat = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def around_document(loaded: "LoadedModel") -> tuple[str, str]:
    """Return the model's chat template before and after a user's text, here a document's.

    The question follows the document in the same turn. Exits with an error without a template.
    """
    mark = "\N{REPLACEMENT CHARACTER}DOCUMENT\N{REPLACEMENT CHARACTER}"
    before, found, after = in_chat(loaded, mark, "compress the text as it is with --raw").partition(
        mark
    )
    if not found or mark in after:
        refuse(
            f"the chat template of the model {loaded.name} changes or repeats a text; compress the "
            "text as it is with --raw"
        )
    return before, after


def longest(loaded: "LoadedModel") -> int | None:
    """Return the model's maximum number of tokens, if its config defines one."""
    limit: int | None = getattr(loaded.model.config, "max_position_embeddings", None)
    return limit
