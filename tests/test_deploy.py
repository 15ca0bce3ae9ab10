"""Files for containers name commands, policies, metrics and files that exist."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from kv_policy import parse

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
DASHBOARD = DEPLOY / "grafana/dashboards/kv-serve.json"
POLICY = re.compile(r"--policy[= ](?:\$\{POLICY:-)?([^\s\"}]+)")
VLLMS = {  # metrics of vLLM's own in the dashboard
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "time_to_first_token_seconds_bucket",
}


def metrics() -> set[str]:
    """Names of the policy's metrics, counters with the ending that they are exported with."""
    source = ROOT / "packages/kv-serve/src/kv_serve/vllm/metrics.py"
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            found[ast.unparse(node.target)] = ast.literal_eval(node.value)
    return {*found["RATIOS"], *found["SUMS"], *(f"{name}_total" for name in found["COUNTERS"])}


def test_the_dashboard_shows_every_metric_of_a_policy_and_no_other() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = "\n".join(each["expr"] for panel in board["panels"] for each in panel["targets"])
    named = {*re.findall(r"vllm:(\w+)", asked)}
    ours = {name.removeprefix("kv_serve_") for name in named if name.startswith("kv_serve_")}
    assert ours == metrics()
    assert {name for name in named if not name.startswith("kv_serve_")} == VLLMS


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    board = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["description"].endswith(".")
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_built_of_what_the_context_holds(path: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    copied = re.findall(r"^COPY (?!--from)(\S+)", path.read_text(), re.MULTILINE)
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    assert f"docker build -f deploy/{path.name}" in path.read_text()


def test_services_are_built_from_the_dockerfiles_and_mount_existing_files() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    built = {each["build"]["dockerfile"] for each in services.values() if "build" in each}
    assert built == {f"deploy/{path.name}" for path in DOCKERFILES}
    mounted = [
        given.split(":")[0]
        for each in services.values()
        for given in each.get("volumes", ())
        if given.startswith("./")
    ]
    assert mounted
    assert all((DEPLOY / name).exists() for name in mounted)
    (scraped,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    (target,) = scraped["static_configs"][0]["targets"]
    for name in ("cpu", "cuda"):
        assert target.split(":")[0] in services[name]["networks"]["default"]["aliases"]


def test_policies_can_be_parsed() -> None:
    found = [
        text
        for path in DEPLOY.rglob("*")
        if path.is_file()
        for text in POLICY.findall(path.read_text())
    ]
    assert len(found) >= 5
    for text in found:
        assert parse(text)
