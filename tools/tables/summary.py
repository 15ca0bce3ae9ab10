"""The summary of the benchmarks: ten figures, with what they are over, and a list of all pages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tools.tables.markdown import table
from tools.tables.page import ROOT, page_of, path_of, result

PAGE: Final = ROOT / "docs" / "benchmarks.md"
FIRST: Final = (ROOT / "README.md", ROOT / "docs" / "index.md")  # pages with `beside`
BLOCK: Final = re.compile(
    r"^<!-- (figures|pages|beside) -->\n.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL
)
HEAD: Final = ("what", "policy", "figure", "over", "stock fp8")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the summary: figures of one result, and what they are over.

    Attributes:
        what: the quantity; the line links to its page.
        name: the result.
        policy: of the figure.
        figure: its name in the result.
        over: the baseline, or the number of samples of a share.
        fp8: the same figure of vLLM's own fp8, where it was measured.
        form: the format of both.
    """

    what: str
    name: str
    policy: str
    figure: str
    over: str
    fp8: str | None = None
    form: str = ".2f"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the line."""
        figures: Mapping[str, float] = result(self.name)["summary"]
        named = f"[{self.what}]({path_of(self.name).relative_to(PAGE.parent)})"
        beside = "" if self.fp8 is None else f"{figures[self.fp8]:{self.form}}"
        value = f"{figures[self.figure]:{self.form}}"
        return named, f"`{self.policy}`", value, self.over, beside


BF16: Final = "stock bf16"
SOME: Final = "kv-compress:rate=4+k8v4"
KEPT: Final = "kv-compress:keep=25%+k8v4"  # the same policy
EIGHTH: Final = "gate:budget=672,file=smollm2-135m,recent=64+k4v4:keys=channel"
LINES: Final = (
    Line("tokens in 1 GiB", "vllm_capacity", "k8v4", "tokens_k8v4", BF16, "tokens_fp8"),
    Line(
        *("tokens in 1 GiB", "vllm_capacity", SOME),
        *("tokens_kv_compress_rate_4_k8v4", BF16, "tokens_fp8"),
    ),
    Line(
        *("nats per token, added", "vllm_nll", "k8v4"),
        *("k8v4_over_bf16", BF16, "fp8_over_bf16", "+.3f"),
    ),
    Line(
        *("nats per token, added", "vllm_nll", SOME),
        *("kv_compress_rate_4_k8v4_over_bf16", BF16, "fp8_over_bf16", "+.3f"),
    ),
    Line("share found, question after the prompt", "gate", EIGHTH, "needle_12", "64 prompts"),
    Line(
        *("share found, question after the prompt", "gate"),
        *("kv-compress:budget=672+k4v4:keys=channel", "needle_12_kv_compress", "64 prompts"),
    ),
    Line(
        *("output tokens per second, memory full", "vllm_throughput"),
        *("kv-compress:rate=2,short=true+k8v4", "lossless_vs_bf16", BF16, "fp8_vs_bf16"),
    ),
    Line(
        *("speed of decode attention, with AMX", "cpu_decode_amx", "k8v4"),
        *("k8v4_vs_vllm_bf16", "vLLM's kernel, bf16"),
    ),
    Line(
        *("time to the first token after a document read before", "vllm_documents"),
        *(KEPT, "warm_over_cold_kv_compress"),
        *("the document not read before", None, ".3f"),
    ),
    Line(
        *("speed of decode, one sequence of 4,096 tokens", "cpu_peers", "k8v4"),
        *("decode_vs_best_peer_4k_b1", "the fastest other engine on CPUs"),
    ),
)
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Inside vLLM": (
        *("vllm_capacity", "vllm_throughput", "vllm_throughput_amx", "vllm_gate"),
        *("vllm_documents", "vllm_quality", "vllm_loaded", "vllm_nll", "vllm_trace"),
        *("vllm_prefill", "vllm_steps", "vllm_steps_amx", "vllm_parts", "vllm_quest"),
        *("vllm_models", "vllm_soak", "engine"),
    ),
    "Quality": (
        *("peers", "foundation", "gate", "kv_compress_quality", "leankv_quality"),
        *("methods", "levels", "levels_fitted", "quest_quality"),
        *("zack_quality", "rotation", "rotation_errors", "hybrid_quality", "method_figures", "kld"),
        *("documents_joined", "ruler", "recommend"),
    ),
    "Time and memory": (
        *("cpu_peers", "peers_times", "cpu_end_to_end", "documents", "decode_before", "gate_score"),
        *("kv_compress_cost", "leankv_overhead", "zack_speed", "zack_folded", "layout"),
    ),
    "Native code on CPUs": (
        *("cpu_decode", "cpu_decode_amx", "cpu_prefill", "cpu_prefill_amx"),
        *("cpu_scores", "cpu_store", "cpu_isa"),
        *("cpu_isa_amx", "quest_speed"),
    ),
    "Models and GPUs": ("models", "gpu_static", "triton_compile"),
}


# Lines of the table of the first page: the cache, its way in `vllm_gate` and in `vllm_nll`, and
# what vLLM's prefix caching does.
AUTOMATIC: Final = "automatic"
NAMED: Final = "named prefixes"
BESIDE: Final = (
    ("stock, bf16", None, None, AUTOMATIC),
    ("stock, fp8 with a scale of 1", "fp8", "fp8", AUTOMATIC),
    ("`k8v4`", "k8v4", "k8v4", AUTOMATIC),
    (f"`{KEPT}`", "kv_compress_keep_25_k8v4", "kv_compress_rate_4_k8v4", NAMED),
    ("`gate:file=smollm2-135m,keep=25%+k8v4`", "gate_keep_25_k8v4", None, NAMED),
)


def beside() -> str:
    """Return the table that compares policies with stock vLLM, with the figures of vLLM."""
    served: Mapping[str, float] = result("vllm_gate")["summary"]
    nats: Mapping[str, float] = result("vllm_nll")["summary"]
    lines = (
        (
            named,
            "1" if way is None else f"{served[f'tokens_{way}']:.1f}",
            "1" if way is None else f"{served[f'{way}_vs_bf16']:.2f}",
            ("0" if way is None else "not measured")
            if scored is None
            else f"{nats[f'{scored}_over_bf16']:+.3f}",
            prefixes,
        )
        for named, way, scored, prefixes in BESIDE
    )
    head = ("cache", "tokens that fit", "tokens per second", "nats per token", "prefix caching")
    return table(head, lines)


def title(name: str) -> str:
    """Return the title of a result's page."""
    return page_of(name).partition("\n")[0].removeprefix("# ")


def figures() -> str:
    """Return the table of figures."""
    return table(HEAD, (line.cells() for line in LINES))


def listed() -> str:
    """Return the list of all pages; each has the name of its result as an anchor."""
    parts = []
    for group, names in GROUPS.items():
        lines = (
            f'* <a id="{name}"></a>[{title(name)}]({path_of(name).relative_to(PAGE.parent)})'
            for name in names
        )
        parts.append("\n".join((f"**{group}**", "", *lines)))
    return "\n\n".join(parts)


def written(page: str) -> str:
    """Return the page with its figures and its list."""
    blocks = {"figures": figures, "pages": listed, "beside": beside}

    def fresh(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name} -->\n\n{blocks[name]()}\n\n<!-- end of {name} -->"

    return BLOCK.sub(fresh, page)
