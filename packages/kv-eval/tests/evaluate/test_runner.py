"""Running samples: what a score is, that nothing is run twice, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kv_eval.evaluate.decode import answer, ends_of, forced, read
from kv_eval.evaluate.divergence import scored
from kv_eval.evaluate.intervals import of_mean
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import SETTINGS, Plan, expand_tasks
from kv_eval.evaluate.report import rows
from kv_eval.evaluate.runner import run
from kv_eval.tasks import RULER, Sample, TaskError, TaskName, Text, default_text
from kv_transformers.from_text import FULL, held, make_cache
from kv_transformers.models import LoadedModel

SOME = ("needle", "multikey", "nll", "agreement")
PLAN = Plan((FULL, "raw"), SOME, SETTINGS, length=400, samples=3, batch=2, continuation=9)
SMALL = replace(PLAN, tasks=("needle", "nll"), settings=("agnostic",), length=300)
TEXT_ONLY = replace(PLAN, tasks=("nll", "agreement"), policies=(FULL,), length=60)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.start(tmp_path / "partial", {})


def forget_seconds(entries: list[Finished]) -> list[dict[str, object]]:
    return [{f: getattr(e, f) for f in e.__struct_fields__ if f != "seconds"} for e in entries]


class Watched:
    """Makes caches, and counts those that are then used."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Cache]] = []

    def __call__(self, model: PreTrainedModel, spec: str) -> Cache:
        self.made.append((spec, make_cache(model, spec)))
        return self.made[-1][1]

    @property
    def used(self) -> list[str]:
        return [spec for spec, cache in self.made if cache.get_seq_length() > 0]


def test_everything_is_run_once_and_keeping_everything_scores_as_full(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    make = Watched()
    entries = list(run(loaded, PLAN, text, journal, make))
    pairs = [
        ("needle", "aware"),
        ("needle", "agnostic"),
        ("multikey", "aware"),
        ("multikey", "agnostic"),
        ("nll", "agnostic"),
        ("agreement", "agnostic"),
    ]
    # 3 prompts of unequal lengths run alone, 3 windows of equal length as 2 and 1.
    batches = {"needle": [[0], [1], [2]], "nll": [[0, 1], [2]]}
    batches |= {"multikey": batches["needle"], "agreement": batches["nll"]}
    assert [e.key for e in entries] == [
        (spec, *pair, i)
        for pair in pairs
        for batch in batches[pair[0]]
        for spec in (FULL, "raw")
        for i in batch
    ]
    assert make.used == [FULL, "raw"] * (4 * 3 + 2 * 2)
    assert len(journal) == len(entries)
    found = rows(PLAN, journal)
    assert [(row.task, row.setting) for row in found[::2]] == pairs
    for row in found:
        assert row.score == pytest.approx(row.full_score, abs=1e-5)
        if row.task == "agreement":
            assert row.score == 1.0
        # 2 layers, 2 KV heads, 8 dimensions of key and of value, float32
        prompt = row.full_bytes / (2 * 2 * 16 * 4)
        assert 300 <= prompt <= 400
        assert (row.length, row.samples, row.seed) == (400, 3, 0)
        if row.policy == FULL:
            assert row.kv_bytes == row.full_bytes
        else:
            assert row.kv_bytes >= row.full_bytes


def test_samples_of_equal_lengths_run_together_and_score_as_alone(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    # Questions of `qa_1` are equally long; those of keys are in one seed, so no batch has both.
    tasks: tuple[TaskName, ...] = ("qa_1", "niah_single_1")
    plan = Plan((FULL, "k8v4"), tasks, ("agnostic",), 700, samples=3, seeds=2, batch=2, answer=9)
    found = []
    for batch, caches in ((2, 3 + 4), (1, 6 + 6)):
        make, started = Watched(), Journal.start(tmp_path / f"{batch}", {})
        entries = list(run(loaded, replace(plan, batch=batch), default_text(), started, make))
        assert [entry.sample for entry in entries if entry.policy == FULL] == [*range(6)] * 2
        assert make.used == [FULL, "k8v4"] * caches
        found.append({entry.key: (entry.score, entry.tokens[:2]) for entry in entries})
    assert found[0] == found[1]


def test_means_over_tasks_are_of_their_samples_in_turn(journal: Journal) -> None:
    scores = {task: [(i + j) % 2 for j in range(4)] for i, task in enumerate(RULER)}
    for task, each in scores.items():
        for i, score in enumerate(each):
            entry = Finished(
                policy=FULL, task=task, setting="aware", sample=i, score=float(score),
                kv_bytes=i, full_bytes=2 * i, seconds=1.0, kept_share=i / 4,
            )  # fmt: skip
            journal.append([entry])
    plan = Plan((FULL,), RULER, ("aware",), samples=4)
    *_, row = rows(plan, journal)
    assert (row.task, row.setting, row.samples) == ("ruler", "aware", 4)
    assert row.score == pytest.approx((7 / 13 + 6 / 13) / 2)
    assert row.score_interval == of_mean([6 / 13, 7 / 13, 6 / 13, 7 / 13])
    assert (row.kv_bytes, row.full_bytes, row.seconds) == (1.5, 3.0, 52.0)
    assert row.kept_share == 1.5 / 4
    assert [row.task for row in rows(replace(plan, tasks=RULER[1:]), journal)] == [*RULER[1:]]


def test_an_answer_ends_where_it_cannot_score_higher(loaded: LoadedModel, journal: Journal) -> None:
    plan = Plan((FULL,), ("qa_1",), ("agnostic",), 700, samples=1)
    (sample,) = plan.samples_of(loaded, default_text(), "qa_1", "agnostic")
    (town,) = sample.answers
    said = scripted(loaded, lambda _: f" {town}. And more.")
    (entry,) = run(said, plan, default_text(), journal)
    assert loaded.tokenizer.decode(entry.tokens) == f" {town}"
    assert entry.score == 1.0


def test_an_answer_of_ruler_has_at_most_so_many_tokens(loaded: LoadedModel, text: Text) -> None:
    plan = Plan((FULL,), ("vt", "fwe"), ("agnostic",), 700, samples=1, answer=40)
    work = plan.made(loaded, text)
    assert [samples[0].new_tokens for samples in work] == [30, 40]
    assert plan.identity(loaded, text)["answer"] == 40
    assert "answer" not in replace(plan, answer=None).identity(loaded, text)


def test_names_of_groups_stand_for_their_tasks() -> None:
    assert expand_tasks(["vt", "ruler", "nll"]) == ("vt", *(t for t in RULER if t != "vt"), "nll")
    with pytest.raises(ValueError, match="unknown task 'ruler-4k'; tasks and groups of them: nee"):
        expand_tasks(["nll", "ruler-4k"])


@pytest.fixture(scope="module")
def whole(
    loaded: LoadedModel, text: Text, tmp_path_factory: pytest.TempPathFactory
) -> list[Finished]:
    path = tmp_path_factory.mktemp("whole") / "partial"
    return list(run(loaded, SMALL, text, Journal.start(path, {})))


@pytest.mark.parametrize("finished", [0, 1, 5, 7, 12])
def test_a_run_goes_on_where_it_stopped_and_ends_the_same(
    loaded: LoadedModel, text: Text, tmp_path: Path, whole: list[Finished], finished: int
) -> None:
    journal = Journal.start(tmp_path / "partial", {})
    going = run(loaded, SMALL, text, journal)
    for _ in range(finished):
        next(going)
    going.close()
    kept = len(journal)
    assert finished <= kept <= finished + 1  # the other one of a batch is there too
    make, (resumed, _) = Watched(), Journal.resume(tmp_path / "partial", {})
    again = list(run(loaded, SMALL, text, resumed, make))
    assert forget_seconds(again) == forget_seconds(whole)
    firsts = [e for e in again[kept:] if e.task == "needle" or e.sample % 2 == 0]
    used = [e.policy for e in firsts]
    if kept < len(again) and again[kept].task == "nll" and again[kept].policy != FULL:
        used.insert(1, FULL)  # for its logits, which are in no file
    assert make.used == used


def test_nll_is_what_one_pass_in_float64_says(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    plan = replace(TEXT_ONLY, tasks=("nll",), samples=2)
    entries = list(run(loaded, plan, text, journal))
    oracle = PreTrainedModel.to(_copy(loaded.model), torch.float64)
    for entry, sample in zip(
        entries, plan.samples_of(loaded, text, "nll", "agnostic"), strict=True
    ):
        ids = torch.tensor([(*sample.prompt_ids, *sample.question_ids, *sample.target_ids)])
        with torch.no_grad():
            logits = oracle(ids).logits[0]
        first = sample.length - 1
        logp = logits[first:-1].log_softmax(-1).gather(-1, ids[0, first + 1 :, None])
        assert entry.score == pytest.approx(-logp.mean().item(), abs=1e-5)
        assert len(logp) == 9


def test_agreement_counts_tokens_equal_to_the_full_caches(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    def forgetful(model: PreTrainedModel, spec: str) -> Cache:
        return Forgetful(config=model.config) if spec == "raw" else make_cache(model, spec)

    plan = replace(TEXT_ONLY, tasks=("agreement",), policies=(FULL, "raw"))
    entries = list(run(loaded, plan, text, journal, forgetful))
    full, other = ([e for e in entries if e.policy == spec] for spec in (FULL, "raw"))
    assert [e.score for e in full] == [1.0] * 3
    for a, b in zip(full, other, strict=True):
        assert len(a.tokens) == len(b.tokens) == 64
        assert b.score == sum(x == y for x, y in zip(a.tokens, b.tokens, strict=True)) / 64
    assert min(e.score for e in other) < 1


class Forgetful(DynamicCache):
    """Zeroes what it was given before."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *a, **k
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = key_states.shape[-2]
        keys, values = super().update(key_states, value_states, layer_idx, *a, **k)
        values[:, :, :-new] = 0
        return keys, values


def scripted(loaded: LoadedModel, say: Callable[[int], str]) -> LoadedModel:
    """A model that answers its n-th long prompt with the n-th text, whatever the prompt is."""
    prompts = 0
    script: list[int] = []

    def forward(input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        nonlocal prompts, script
        if input_ids.shape[1] > 100:
            script = [*loaded.tokenizer.encode(say(prompts)), loaded.tokenizer.eos_token_id]
            prompts += 1
        logits = torch.zeros(1, 1, len(loaded.tokenizer))
        logits[..., script[0]] = 1
        if input_ids.shape[1] <= 100:  # what comes after the prompt reads on in the script
            script = script[1:] or script
        return SimpleNamespace(logits=logits)

    return replace(loaded, model=_Scripted(loaded.model.config, forward))


class _Scripted:
    def __init__(self, config: object, forward: Callable[..., SimpleNamespace]) -> None:
        self.config, self.device = config, torch.device("cpu")
        self.generation_config = SimpleNamespace(eos_token_id=[1])
        self.forward = forward

    def __call__(self, **inputs: object) -> SimpleNamespace:
        return self.forward(**inputs)


def test_a_needle_is_found_when_its_number_is_said(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    plan = replace(PLAN, tasks=("needle",), settings=("agnostic",), policies=(FULL,), samples=4)
    samples = plan.samples_of(loaded, text, "needle", "agnostic")
    (first,), (last,) = samples[0].answers, samples[3].answers
    said = [f" It is {first}.", "No.", last[:-1], last]
    entries = list(run(scripted(loaded, said.__getitem__), plan, text, journal))
    assert [loaded.tokenizer.decode(list(e.tokens)) for e in entries] == said
    assert [e.score for e in entries] == [1.0, 0.0, 0.0, 1.0]
    assert rows(plan, journal)[0].score == 0.5


def test_an_answer_ends_before_an_end_and_at_its_count(loaded: LoadedModel) -> None:
    model = loaded.model
    prompt = torch.tensor([[9, 30, 12, 40], [44, 21, 13, 50]])

    def answers(count: int, ends: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
        cache = make_cache(model, FULL)
        found = answer(model, cache, read(model, cache, prompt), count, ends)
        longest = max(map(len, found)) + (len(ends) > 0)
        assert cache.get_seq_length() <= 4 + longest
        return found

    free = answers(12)
    assert [len(row) for row in free] == [12, 12]
    end = free[0][5]
    expected = tuple(row[: row.index(end)] if end in row else row for row in free)
    assert answers(12, (end,)) == expected
    assert answers(12, (free[0][0], free[1][0])) == ((), ())
    generated = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert generated[:, 4:].tolist() == [list(row) for row in free]


def test_surprise_does_not_depend_on_the_batch(loaded: LoadedModel) -> None:
    prompt = torch.randint(4, 90, (3, 20))
    targets = torch.randint(4, 90, (3, 6))

    def measured(part: slice) -> list[float]:
        cache = make_cache(loaded.model, FULL)
        logits = read(loaded.model, cache, prompt[part])
        return scored(forced(loaded.model, cache, logits, targets[part]), targets[part], None)[0]

    together = measured(slice(None))
    alone = [value for i in range(3) for value in measured(slice(i, i + 1))]
    assert together == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_the_full_caches_bytes_are_those_of_its_tensors(loaded: LoadedModel) -> None:
    cache = make_cache(loaded.model, FULL)
    assert (held(cache).kv_bytes, held(cache).ratio) == (0, 0.0)
    read(loaded.model, cache, torch.randint(4, 90, (2, 10)))
    assert held(cache).kv_bytes == 2 * 10 * 2 * 2 * 16 * 4
    assert held(cache).ratio == 1.0


def test_the_ends_of_a_model(loaded: LoadedModel) -> None:
    assert ends_of(loaded.model) == {1}


def test_what_a_model_cannot_read_is_refused_at_once(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    plan = replace(TEXT_ONLY, length=1020)
    with pytest.raises(TaskError, match=r"nll at this length takes up to 1,029 .* reads 1,024"):
        next(run(loaded, plan, text, journal))


def test_a_refused_policy_is_refused_before_the_first_sample(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    def refusing(model: PreTrainedModel, spec: str) -> Cache:
        if spec == "raw":
            raise ValueError("raw is not for this model")
        return make_cache(model, spec)

    with pytest.raises(ValueError, match="raw is not for this model"):
        next(run(loaded, PLAN, text, journal, refusing))
    assert len(journal) == 0


def test_a_score_that_is_not_finite_is_an_error(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    broken = _copy(loaded.model)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    going = run(replace(loaded, model=broken), TEXT_ONLY, text, journal)
    with pytest.raises(FloatingPointError, match="the score of full is nan on nll"):
        next(going)


@pytest.mark.parametrize("name", ["length", "samples", "seeds", "batch", "continuation"])
def test_a_plan_needs_at_least_one_of_everything(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        replace(PLAN, **{name: 0})


@pytest.mark.parametrize("task", ["nll", "agreement"])
def test_a_task_without_a_question_has_no_aware_setting(task: str) -> None:
    with pytest.raises(ValueError, match=f"{task} has no question that could be inside the prompt"):
        replace(PLAN, tasks=(task,), settings=("aware",))
    assert replace(PLAN, tasks=(task,)).pairs == ((task, "agnostic"),)


def test_what_a_result_depends_on_is_in_its_identity(loaded: LoadedModel, text: Text) -> None:
    identity = PLAN.identity(loaded, text)
    assert identity["fingerprint"] == loaded.fingerprint
    assert identity["dtype"] == "torch.float32"
    for name in ("length", "samples", "seed", "seeds", "batch", "continuation"):
        changed = replace(PLAN, **{name: getattr(PLAN, name) + 1})
        assert changed.identity(loaded, text) != identity
    assert PLAN.identity(loaded, Text("sentences", ("Others.",))) != identity
    assert replace(PLAN, policies=(FULL,)).identity(loaded, text) == identity


def test_samples_follow_from_the_seed(loaded: LoadedModel, text: Text) -> None:
    def samples(plan: Plan) -> list[tuple[Sample, ...]]:
        return [plan.samples_of(loaded, text, *pair) for pair in plan.pairs]

    assert samples(PLAN) == samples(replace(PLAN))
    assert samples(PLAN) != samples(replace(PLAN, seed=1))
    both = zip(samples(PLAN), samples(replace(PLAN, seed=1)), strict=True)
    assert samples(replace(PLAN, seeds=2)) == [one + other for one, other in both]


def test_several_seeds_are_summed_up_in_one_row(
    loaded: LoadedModel, text: Text, journal: Journal
) -> None:
    plan = replace(PLAN, tasks=("nll",), seeds=2, length=60)
    entries = list(run(loaded, plan, text, journal))
    assert [e.sample for e in entries if e.policy == FULL] == [0, 1, 2, 3, 4, 5]
    full, raw = rows(plan, journal)
    assert (raw.samples, raw.seed, raw.seeds) == (6, 0, 2)
    scores = [e.score for e in entries if e.policy == FULL]
    assert full.score == pytest.approx(sum(scores) / 6)
    assert full.score_interval is not None
    assert min(scores) < full.score_interval[0] < full.score < full.score_interval[1] < max(scores)
    assert full.change_interval is None
    assert raw.change_interval == pytest.approx((0, 0), abs=1e-5)


def test_a_host_that_reads_the_whole_prompt_first_has_no_agnostic_question() -> None:
    plan = replace(PLAN, split=False)
    assert plan.pairs == (
        ("needle", "aware"),
        ("multikey", "aware"),
        ("nll", "agnostic"),
        ("agreement", "agnostic"),
    )
    with pytest.raises(ValueError, match="needle needs its question inside"):
        replace(plan, settings=("agnostic",))


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    return other.eval()
