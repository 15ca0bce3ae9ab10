"""The registration of kv-cpu: an attention backend, its page kernels and token scores."""

from typing import Final

from kv_cpu.backend import attend
from kv_cpu.library import FORCE, chosen, compiled, forced, missing, runnable
from kv_cpu.prompt import attend_partly
from kv_cpu.reading import select_pages
from kv_cpu.rows import decode_rows
from kv_policy import Backend, Instructions


def _instructions() -> Instructions:
    return Instructions(compiled(), runnable(), chosen(), forced())


BACKEND: Final = Backend(
    name="cpu",
    about="native code for decode steps, prompts and scores on a CPU, torch for the rest",
    load=lambda: attend,
    missing=missing,
    devices=("cpu",),
    instructions=_instructions,
    page_kernels="kv_cpu.pages",
    token_scores="kv_cpu.token_scores",
    partial=lambda: attend_partly,
    decode_rows=lambda: decode_rows,
    select_pages=lambda: select_pages,
    preferred=True,
    environment=(FORCE,),
)
