"""The gate: its scores against the regression written out, its plan, its file, its calibration."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import quick
from kv_evict import Gate
from kv_evict.gate_calibration import GateCalibration, Repeated, repeated_attention
from kv_evict.gate_features import features, width
from kv_evict.gate_file import Facts, GateWeights, load, save, shipped
from kv_evict.gate_network import GateNetwork
from kv_evict.gate_sample import Sample
from kv_policy import (
    FRESH,
    Budget,
    CacheShape,
    Calibrated,
    LayerView,
    NotCalibratedError,
    Observe,
    PlanView,
    Rope,
    Ropes,
    complete,
    compose,
    parse,
)
from kv_policy.testing import check_policy

ROPE = Rope((1.0, 0.3, 0.05))
OTHER = Rope((0.7, 0.2), ((0, 1), (4, 2)))
LAYERS, HEADS, DIM, VALUE, UNITS = 2, 3, 6, 4, 5
SHAPE = CacheShape(LAYERS, HEADS, 2, DIM, VALUE, rope=Ropes((ROPE, OTHER)))
FACTS = Facts(
    model="tiny",
    fingerprint="f00d",
    text="made up",
    digest="0",
    tokens=100,
    window=10,
    layers=LAYERS,
    heads=HEADS,
    key_dim=DIM,
    value_dim=VALUE,
    units=UNITS,
    overlap={"0.25": 0.5},
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(scale: float = 0.2, seed: int = 0) -> GateNetwork:
    lead, count = (LAYERS, HEADS), width(DIM, VALUE)
    linear = drawn(*lead, count, seed=seed) * scale
    inner = drawn(*lead, count, UNITS, seed=seed + 1)
    return GateNetwork(linear, inner, drawn(*lead, UNITS, seed=seed + 2) * scale).halves()


def made(given: GateNetwork) -> GateWeights:
    return GateWeights(FACTS, given, torch.linspace(0, 1, 11))


def same(one: GateNetwork, other: GateNetwork) -> bool:
    names = ("linear", "inner", "outer")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "gate.safetensors"
    save(path, made(network()))
    return str(path)


def view(layer: Tensor, shape: CacheShape = SHAPE, seed: int = 1) -> LayerView:
    lead = (len(layer), shape.kv_heads, 5)
    position = torch.tensor([0, 3, 4, 70, -1]).expand(lead)
    return LayerView(
        layer=layer,
        shape=shape,
        position=position,
        fresh=position >= 0,
        score=torch.zeros(lead),
        length=torch.full((len(layer),), 71),
        keys=drawn(*lead, DIM, seed=seed),
        values=drawn(*lead, VALUE, seed=seed + 1),
    )


def turn(rope: Rope, place: int) -> Tensor:
    """Return the explicit rotation matrix of a position."""
    found = torch.eye(DIM, dtype=torch.float64)
    pairs = rope.pairs if rope.pairs is not None else tuple((i, i + DIM // 2) for i in range(3))
    for (i, j), frequency in zip(pairs, rope.frequencies, strict=True):
        cos, sin = math.cos(place * frequency), math.sin(place * frequency)
        found[i, i], found[i, j], found[j, i], found[j, j] = cos, -sin, sin, cos
    return found


def by_hand(given: GateNetwork, rope: Rope, key: Tensor, value: Tensor, place: int) -> float:
    """Return the predicted probability of a token, with its key turned back by a matrix."""
    plain = (turn(rope, place).T @ key.double()).tolist()
    partner = list(range(DIM))
    for i, j in rope.pairs if rope.pairs is not None else tuple((i, i + 3) for i in range(3)):
        partner[i], partner[j] = j, i
    pairs = [math.hypot(x, plain[partner[i]]) for i, x in enumerate(plain)]
    norms = [math.hypot(*plain), math.hypot(*value.tolist())]
    logs = [math.log(norm + 1e-6) for norm in norms]
    x = [*plain, *value.tolist(), *pairs, *norms, *logs, 1.0]
    total = sum(w * each for w, each in zip(given.linear.tolist(), x, strict=True))
    for i, outer in enumerate(given.outer.tolist()):
        inner = given.inner[:, i].tolist()
        total += outer * max(0.0, sum(w * each for w, each in zip(inner, x, strict=True)))
    return min(1.0, math.exp(total))


@pytest.mark.parametrize("layers", [[0], [1], [0, 0, 1, 1]], ids=str)
def test_scores_are_the_network_of_the_key_before_rope(file: str, layers: list[int]) -> None:
    given = view(torch.tensor(layers))
    found = Gate(file=file).score(given)
    whole = load(file).network
    assert given.keys is not None
    assert given.values is not None
    for b, layer in enumerate(layers):
        rope = (ROPE, OTHER)[layer]
        for h in range(HEADS):
            for i, place in enumerate([0, 3, 4, 70]):
                vectors = given.keys[b, h, i], given.values[b, h, i]
                each = (x[layer, h] for x in (whole.linear, whole.inner, whole.outer))
                right = by_hand(GateNetwork(*each), rope, *vectors, place)
                assert float(found[b, h, i]) == pytest.approx(right, rel=1e-5)


@quick
@given(st.integers(0, 9), st.integers(0, 99), st.sampled_from([1, 2, 4096]))
def test_tokens_are_scored_alike_some_at_a_time(tokens: int, seed: int, together: int) -> None:
    lead = (2, HEADS, tokens)
    given = LayerView(
        layer=torch.tensor([1, 0]),
        shape=SHAPE,
        position=torch.arange(tokens).expand(lead) * 37,
        fresh=torch.ones(lead, dtype=torch.bool),
        score=torch.zeros(lead),
        length=torch.tensor([tokens] * 2),
        keys=drawn(*lead, DIM, seed=seed),
        values=drawn(*lead, VALUE, seed=seed + 1),
    )
    gate = made(network(seed=seed))
    whole = gate.logarithm(given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kv_evict.gate_file._TOGETHER", together)
        torch.testing.assert_close(gate.logarithm(given), whole)


def test_without_units_a_gate_is_linear() -> None:
    given = network()
    flat = GateNetwork(given.linear, given.inner[..., :0], given.outer[..., :0])
    x = drawn(LAYERS, HEADS, 7, width(DIM, VALUE))
    torch.testing.assert_close(flat(x), torch.einsum("nhlf,nhf->nhl", x, given.linear))


def test_a_shard_of_heads_scores_as_the_whole(file: str) -> None:
    whole = view(torch.tensor([1]))
    assert whole.keys is not None
    assert whole.values is not None
    shape = CacheShape(LAYERS, 1, 2, DIM, VALUE, first_head=2, rope=SHAPE.rope)
    lead = slice(2, 3)
    part = LayerView(
        layer=whole.layer,
        shape=shape,
        position=whole.position[:, lead],
        fresh=whole.fresh[:, lead],
        score=whole.score[:, lead],
        length=whole.length,
        keys=whole.keys[:, lead],
        values=whole.values[:, lead],
    )
    gate = Gate(file=file)
    torch.testing.assert_close(gate.score(part), gate.score(whole)[:, lead])


@pytest.mark.parametrize(
    "text",
    [
        "threshold=0.4,recent=4,sinks=2",
        "share=0.3",
        "threshold=0.9,recent=0",
        "budget=20",
        "keep=30%,recent=3,sinks=2,layers=even",
        "budget=20,pool=3,short=true,most=9",
        "budget=20,window=4",
        "keep=30%,window=8,recent=3,layers=even,every=4",
        "budget=20,chunks=true",
        "budget=20,recent=3,sinks=2,layers=even,chunks=true,every=4",
    ],
)
def test_the_contract_holds(file: str, text: str) -> None:
    policy = parse(f"gate:file={file},{text}")
    check_policy(policy, SHAPE)
    assert policy.fitted_to == "f00d"
    assert policy.selector is not None
    assert complete(policy.selector).scores_once
    assert complete(policy.selector).needs_rope


def test_it_sorts_into_tiers_and_stays_scored_once(file: str) -> None:
    pytest.importorskip("kv_quant")
    policy = compose(parse(f"gate:file={file},budget=40"), parse("leankv:window=0"))
    assert policy.selector is not None
    selector = complete(policy.selector)
    assert (selector.tiers, selector.scores_once, selector.needs_rope) == (2, True, True)
    assert not selector.observe.generated
    check_policy(policy, SHAPE)


def test_a_budget_is_planned_by_chunk_if_asked(file: str) -> None:
    for text in ("budget=20", "keep=30%"):
        assert not complete(parse(f"gate:file={file},{text}").selector).plans_chunks
    policy = parse(f"gate:file={file},budget=20,chunks=true")
    assert str(policy) == f"gate:budget=20,file={file},chunks=true"
    assert complete(policy.selector).plans_chunks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep=25%,chunks=true", r"gate plans after each chunk .* cannot keep 25% of it"),
        ("budget=5760B,chunks=true", r"cannot keep 5760B of it; give a number of tokens"),
        ("budget=20,chunks=true,pool=3", "pool=3 compares a token with its neighbours"),
        ("budget=20,chunks=true,window=8", "window=8 last queries may ask for tokens that an"),
        ("share=0.3,chunks=true", "decides token by token, so chunks=True has no effect"),
    ],
)
def test_chunks_are_refused_where_a_plan_needs_the_whole_prompt(
    file: str, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"gate:file={file},{text}")


def test_chunks_are_not_sorted_into_tiers(file: str) -> None:
    pytest.importorskip("kv_quant")
    with pytest.raises(ValueError, match="plans after each chunk of a prompt, but tokens are sort"):
        parse(f"gate:file={file},budget=40,chunks=true+leankv:window=0")


def plan_view(score: list[float], budget: int) -> PlanView:
    count = len(score)
    return PlanView(
        shape=CacheShape(1, 1, 1, DIM, VALUE),
        first_layer=0,
        score=torch.tensor(score).view(1, 1, 1, -1),
        position=torch.arange(count).view(1, 1, 1, -1),
        tier=torch.full((1, 1, 1, count), FRESH, dtype=torch.uint8),
        length=torch.tensor([count]),
        budget=torch.tensor([budget]),
    )


def test_the_plan_pools_and_protects(file: str) -> None:
    score = [0.1, 0.9, 0.2, 0.3, 0.8, 0.1, 0.4, 0.0]

    def kept(gate: Gate, budget: int) -> list[int]:
        plan = gate.plan(plan_view(score, budget))
        return (plan == 0).flatten().nonzero().flatten().tolist()

    assert kept(Gate(Budget(3), file=file, recent=0), 3) == [1, 4, 6]
    assert kept(Gate(Budget(3), file=file, recent=1), 3) == [1, 4, 7]
    assert kept(Gate(Budget(3), file=file, recent=1, sinks=1), 3) == [0, 1, 7]
    assert kept(Gate(Budget(3), file=file, recent=0, pool=3), 3) == [0, 1, 2]


def test_the_last_queries_raise_scores_of_older_tokens(file: str) -> None:
    count, window = 60, 5
    position = torch.arange(count).expand(1, 2, -1).clone()
    position[0, 1, 40:] = -1
    score, mass = drawn(1, 2, count).abs() / 3, drawn(1, 2, count, seed=1).square()
    given = LayerView(
        layer=torch.tensor([0]),
        shape=SHAPE,
        position=position,
        fresh=position >= 0,
        score=score,
        length=torch.tensor([count]),
        mass=mass.masked_fill(position < 0, 0),
        seen=torch.full_like(position, window),
    )
    found = Gate(file=file, window=window, weight=2.5).adjust(given)
    for head, tokens in ((0, count), (1, 40)):
        for i in range(tokens):
            near = [j for j in range(tokens) if abs(i - j) <= 10 and j < count - window]
            most = max((math.sqrt(mass[0, head, j]) for j in near), default=0)
            seen = 2.5 * most if i < count - window else 0
            assert found[0, head, i] == pytest.approx(max(float(score[0, head, i]), seen))
    with pytest.raises(ValueError, match=r"weight=2\.5 is a factor of what a window observes"):
        Gate(file=file, weight=2.5)
    assert Gate(file=file).observe == Observe()
    assert complete(Gate(file=file)).adjust is None


def test_a_threshold_decides_token_by_token(file: str) -> None:
    score = [0.1, 0.9, 0.2, 0.3, 0.8, 0.1, 0.4, 0.0]

    def kept(text: str) -> list[int]:
        selector = parse(f"gate:file={file},{text}").selector
        assert selector is not None
        plan = selector.plan(plan_view(score, 1))
        return (plan == 0).flatten().nonzero().flatten().tolist()

    assert kept("threshold=0.3,recent=0") == [1, 3, 4, 6]
    assert kept("threshold=0.35,recent=1") == [1, 4, 6, 7]
    assert kept("share=0.15,recent=0") == [1]  # quantiles are a tenth apart
    assert load(file).threshold(0.15) == pytest.approx(0.85)
    others = ("budget=20", "keep=25%", "layers=even", "pool=3", "every=4", "window=8", "share=0.5")
    for other in others:
        with pytest.raises(ValueError, match="decides token by token"):
            parse(f"gate:file={file},threshold=0.3,{other}")


def test_what_is_no_gate_is_refused(tmp_path: Path, file: str) -> None:
    missing = str(tmp_path / "none.safetensors")
    with pytest.raises(NotCalibratedError, match="kv-serve calibrate gate"):
        Gate(file=missing)
    (tmp_path / "text").write_text("no gate")
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        Gate(file=str(tmp_path / "text"))
    with pytest.raises(ValueError, match="pool=4 has no middle"):
        Gate(file=file, pool=4)
    with pytest.raises(ValueError, match="budget of 5 tokens is smaller than the 8"):
        Gate(Budget(5), file=file)
    right = network()
    with pytest.raises(ValueError, match=r"linear should be torch\.float32"):
        save(
            tmp_path / "x",
            made(GateNetwork(right.linear[..., :3], right.inner[..., :3, :], right.outer)),
        )
    with pytest.raises(ValueError, match=r"inner should be torch\.float16"):
        save(tmp_path / "x", made(right.to(torch.device("cpu"))))
    for name in ("linear", "inner", "outer"):
        damaged = network()
        getattr(damaged, name)[0, 0, 0] = torch.nan
        with pytest.raises(ValueError, match="infinite or NaN"):
            save(tmp_path / "x", made(damaged))
    other = CacheShape(LAYERS, HEADS, 2, DIM + 2, VALUE, rope=ROPE)
    with pytest.raises(ValueError, match="6 dimensions in a key, but this cache has 8"):
        Gate(file=file).score(view(torch.tensor([0]), other))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    for seed in (1, 2):
        save(path, made(network(seed=seed)))
        assert same(load(str(path)).network, network(seed=seed))


def test_shipped_gates_load() -> None:
    for name in shipped():
        assert load(name).facts.tokens > 0


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        drawn(1, HEADS, 2, tokens, DIM, seed=seed),
        drawn(1, HEADS, tokens, DIM, seed=seed + 1),
        drawn(1, HEADS, tokens, VALUE, seed=seed + 2),
    )


def test_targets_are_the_largest_attention_of_repeating_queries() -> None:
    text, instruction = 300, 7
    query, key, value = inputs(2 * text + instruction, 5)
    calibration = GateCalibration(SHAPE, instruction)
    given, score = calibration.examples(1, query, key, value)
    weight = (query.double() @ key.double()[:, :, None].mT / DIM**0.5).masked_fill(
        torch.ones(query.shape[3], key.shape[2]).triu(1).bool(), -torch.inf
    )
    right = weight.softmax(-1)[:, :, :, text + instruction :, :text].amax((2, 3))
    torch.testing.assert_close(score.double(), right, rtol=1e-4, atol=1e-7)
    plain = OTHER.turned(key[:, :, :text], -torch.arange(text))
    torch.testing.assert_close(given, features(plain, OTHER.pair_norms(plain), value[:, :, :text]))
    parts = repeated_attention(query, key, Repeated(text, instruction))
    assert sum(some.stop - some.start for some, _ in parts) == text


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_evict.gate_fit.STEPS", 40)


def fed(calibration: GateCalibration, seeds: range) -> GateCalibration:
    for seed in seeds:
        for layer in range(LAYERS):
            calibration.see(layer, *inputs(2 * 60 + 3, 10 * seed + layer))
    return calibration


def fitted(calibration: GateCalibration, seeds: range) -> GateCalibration:
    shares = [*fed(calibration, seeds).fit()]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    return calibration


@pytest.mark.parametrize("size", [65536, 100], ids=["all", "sampled"])
def test_moments_add_up_and_resume(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_evict.gate_calibration.SAMPLE", size)
    whole = fitted(GateCalibration(SHAPE, 3, UNITS), range(4))
    half = fed(GateCalibration(SHAPE, 3, UNITS), range(2))
    again = GateCalibration(SHAPE, 3, UNITS)
    again.restore(half.state())
    fitted(again, range(2, 4))
    assert again.tokens == whole.tokens == 240
    assert torch.equal(again.regression(), whole.regression())
    assert same(again.network(), whole.network())
    assert whole.state()["keys"].shape == (LAYERS, HEADS, min(size, 240), DIM)
    path = tmp_path / "made.safetensors"
    evaluation = whole.evaluation()
    for layer in range(LAYERS):
        evaluation.see(layer, *inputs(123, layer))
    whole.write(path, Calibrated("tiny", "f00d", "made up", "0"), 60, [evaluation])
    found = load(Gate(file=str(path)).file)
    assert same(found.network, whole.network())
    assert (found.facts.tokens, found.facts.units) == (240, UNITS)
    assert found.facts.overlap["0.25"] == pytest.approx(evaluation.overlap(0.25), abs=1e-4)
    above = (evaluation.scores() > found.threshold(0.3)).float().mean()
    assert float(above) == pytest.approx(0.3, abs=0.01)


@quick
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 60))
def test_a_sample_is_of_the_same_tokens_in_all_layers(counts: list[int], size: int) -> None:
    sample = Sample(SHAPE, size)
    begin = 0
    for count in counts:
        place = torch.arange(begin, begin + count).float().expand(1, HEADS, count)
        begin += count
        for layer in range(LAYERS):
            key, value = (place[..., None].expand(-1, -1, -1, n) for n in (DIM, VALUE))
            sample.add(layer, key, value, place)
    target = sample.examples().target
    assert target.shape == (LAYERS, HEADS, min(size, begin))
    assert (target == target[0, 0]).all()
    assert len(target[0, 0].unique()) == min(size, begin)


def test_the_network_fits_better_than_the_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_evict.gate_fit.STEPS", 300)
    errors = {}
    for units in (0, 16):
        calibration = fitted(GateCalibration(SHAPE, 3, units), range(8))
        error = 0.0
        for seed in range(8):
            for layer in range(LAYERS):
                x, score = calibration.examples(layer, *inputs(123, 10 * seed + layer))
                rows = calibration.network().rows(torch.tensor([layer]), slice(None))
                found = rows.to(torch.device("cpu"))(x)
                error += float((found - score.clamp(min=1e-5).log()).square().sum())
        errors[units] = error
    assert errors[16] < 0.9 * errors[0]


def test_without_units_the_network_is_the_regression() -> None:
    calibration = fitted(GateCalibration(SHAPE, 3, 0), range(4))
    x, _ = calibration.examples(1, *inputs(123, 7))
    right = torch.einsum("bhlf,hf->bhl", x, calibration.regression()[1])
    rows = calibration.network().rows(torch.tensor([1]), slice(None))
    torch.testing.assert_close(rows.to(torch.device("cpu"))(x), right, rtol=1e-3, atol=1e-3)


def test_the_regression_is_the_least_squares_solution() -> None:
    calibration = fed(GateCalibration(SHAPE, 3), range(4))
    both = [calibration.examples(1, *inputs(123, 10 * seed + 1)) for seed in range(4)]
    given = torch.cat([g[0] for g, _ in both], 1).double()
    wanted = torch.cat([s[0] for _, s in both], 1).clamp(min=1e-5).log().double()
    for head in range(HEADS):
        right = torch.linalg.lstsq(given[head], wanted[head][:, None]).solution
        error = given[head] @ calibration.regression()[1, head].double() - wanted[head]
        least = given[head] @ right[:, 0] - wanted[head]
        assert float(error.square().sum()) < 1.001 * float(least.square().sum())


def test_an_evaluation_compares_choices() -> None:
    calibration = fitted(GateCalibration(SHAPE, 3), range(4))
    evaluation = calibration.evaluation()
    for layer in range(LAYERS):
        evaluation.see(layer, *inputs(123, layer))
    assert 0.25 < evaluation.overlap(0.25) <= 1
    assert evaluation.overlap(1.0) == 1
    first, second = (
        [evaluation.overlap(share / 10, slice(i, i + 1)) for share in range(1, 10)] for i in (0, 1)
    )
    assert first != second
    # The weights of a file are evaluated without a calibration of their own.
    given = GateCalibration(SHAPE, 3).evaluation(calibration.network())
    mine = calibration.network()
    reverse = GateNetwork(-mine.linear, mine.inner, -mine.outer)
    turned_round = GateCalibration(SHAPE, 3).evaluation(reverse)
    for layer in range(LAYERS):
        given.see(layer, *inputs(123, layer))
        turned_round.see(layer, *inputs(123, layer))
    assert given.overlap(0.25) == evaluation.overlap(0.25) > turned_round.overlap(0.25)


def test_a_calibration_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="rotary embedding is unknown"):
        GateCalibration(CacheShape(1, 1, 1, DIM, VALUE), 3)
    calibration = GateCalibration(SHAPE, 3)
    with pytest.raises(ValueError, match="layers have seen from 0 to 0 tokens"):
        calibration.regression()
    with pytest.raises(ValueError, match=r"run fit\(\) to its end first"):
        calibration.evaluation()
    query, key, value = inputs(123, 0)
    there = torch.ones(1, 123, dtype=torch.bool)
    there[0, 0] = False
    with pytest.raises(ValueError, match="no padding"):
        calibration.see(0, query, key, value, there)
    with pytest.raises(ValueError, match="infinity or NaN"):
        calibration.see(0, query, key, value * torch.inf)
    with pytest.raises(ValueError, match="other sizes"):
        calibration.restore({"squares": torch.zeros(1)})
    facts = Calibrated("tiny", "f00d", "made up", "0")
    with pytest.raises(ValueError, match="0 of 0 given are"):
        fitted(calibration, range(1)).write(Path("x"), facts, 60, [])
    stopped = fed(calibration, range(1)).fit()
    next(stopped)
    with pytest.raises(ValueError, match="nothing is fitted to the tokens so far"):
        calibration.network()
