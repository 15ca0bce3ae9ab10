"""Policies fitted to statistics: their ranks, maps and errors."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_policy import CacheShape, FoldsValues, HeadBasis, Spectral, parse
from kv_policy.testing import check_policy
from kv_svd import KqSvd, Moments, Palu, SvdKV, ThinK, Zack, best_pair, load, rotation
from kv_svd.ranked import Ranked

POLICIES = {
    "zack": (Zack, "rate=0.4"),
    "svd-kv": (SvdKV, "rate=0.4"),
    "palu": (Palu, "rate=0.4,together=2"),
    "kq-svd": (KqSvd, "rate=0.4"),
    "think": (ThinK, "value_rate=0.2"),
}
each = pytest.mark.parametrize("name", POLICIES)
pairs = pytest.mark.parametrize("kind", [Zack, SvdKV, KqSvd])


def spec(name: str, file: Path) -> str:
    return f"{name}:file={file},{POLICIES[name][1]}"


@each
def test_it_follows_the_contract(name: str, made, file: Path) -> None:
    policy = parse(spec(name, file))
    assert type(policy) is POLICIES[name][0]
    check_policy(policy, made.shape)
    assert policy.fitted_to == "0123456789abcdef"
    assert policy.selector is None
    assert policy.formats is None


@each
def test_every_parameter_is_documented(name: str) -> None:
    kind = POLICIES[name][0]
    assert kind.source
    assert all(parameter.doc for parameter in kind.parameters())
    assert kind.parameters()[0].default == "required"


@each
def test_equality_goes_by_parameters_and_composes(name: str, file: Path) -> None:
    policy = parse(spec(name, file))
    assert policy == parse(str(policy))
    assert hash(policy) == hash(parse(str(policy)))
    joined = parse(f"{spec(name, file)}+raw")
    assert joined.fitted_to == policy.fitted_to
    assert joined.basis == policy


@pytest.mark.parametrize("kind", [Zack, SvdKV, Palu, KqSvd])
@pytest.mark.parametrize("ranks", ["adaptive", "uniform"])
def test_the_rate_is_the_share_of_the_cache_that_goes(
    kind: type[Ranked], ranks: str, made, file: Path
) -> None:
    more = {"together": 2} if kind is Palu else {}
    for rate, multiple in ((0.0, 16), (0.3, 16), (0.5, 1)):
        policy = kind(str(file), rate=rate, ranks=ranks, multiple=multiple, **more)
        bound = [policy.bind(i, made.shape) for i in range(2)]
        kept = sum(sum(b.key.rank) + sum(b.value.rank) for b in bound)
        assert 1 - kept / (2 * 4 * (64 + 32)) == pytest.approx(policy.allotment.rate)
        assert policy.allotment.rate >= rate - 1e-9
        assert all(r % multiple == 0 for b in bound for r in (*b.key.rank, *b.value.rank))
        assert policy.allotment.cost_of_rounding > -1


@pytest.mark.parametrize("name", ["zack", "svd-kv", "palu", "kq-svd"])
def test_singular_values_fall_and_do_not_depend_on_the_rate(name: str, file: Path) -> None:
    policy = parse(spec(name, file))
    assert isinstance(policy, Spectral)
    found = policy.singular_values()
    assert list(found) == [
        f"{name}:file={file}{',together=2' if name == 'palu' else ''}, {what}"
        for what in ("keys", "values")
    ]
    for singular in found.values():
        assert singular.shape[:2] == ((2, 2) if name == "palu" else (2, 4))
        assert (singular >= 0).all()
        assert (singular.diff(dim=-1) <= 0).all()
    other = replace(policy, rate=0.1).singular_values()
    assert found.keys() == other.keys()
    assert all(torch.equal(found[each], other[each]) for each in found)


def test_channels_that_are_chosen_have_no_singular_values(file: Path) -> None:
    assert not isinstance(parse(spec("think", file)), Spectral)


def test_adaptive_ranks_differ_and_uniform_ones_do_not(made, file: Path) -> None:
    adaptive, uniform = (Zack(str(file), rate=0.4, ranks=r) for r in ("adaptive", "uniform"))
    assert len({r for i in range(2) for r in adaptive.bind(i, made.shape).key.rank}) > 1
    assert {r for i in range(2) for r in uniform.bind(i, made.shape).key.rank} == {32}


def test_a_removal_rate_is_that_of_equation_6(made, file: Path) -> None:
    policy = Zack(str(file), removal=0.2, multiple=1)
    singular = load(file)[1].key
    for i in range(2):
        for head, rank in enumerate(policy.bind(i, made.shape).key.rank):
            values = singular[i, head]
            assert values[rank:].sum() <= 0.2 * values.sum() < values[rank - 1 :].sum()
    rounded = Zack(str(file), removal=0.2)
    assert rounded.allotment.cost_of_rounding > 0
    assert policy.allotment.cost_of_rounding == 0


def test_zack_takes_the_rate_that_calibration_found(made, tmp_path: Path) -> None:
    path = made.write(tmp_path / "found", rate=0.35, max_loss=0.01, tasks=("nll",))
    policy = parse(f"zack:file={path}")
    assert policy.allotment.rate >= 0.35
    assert (
        policy.bind(0, made.shape).key.rank
        == Zack(str(path), rate=0.35).bind(0, made.shape).key.rank
    )
    with pytest.raises(ValueError, match=r"the rate 0.35 in .* was found with adaptive ranks"):
        Zack(str(path), ranks="uniform")
    for multiple in (1, 8, 32):
        sentence = f"multiples of 16; with multiple={multiple} use keep="
        with pytest.raises(ValueError, match=sentence):
            Zack(str(path), multiple=multiple)
        assert Zack(str(path), rate=0.3, multiple=multiple).allotment.rate >= 0.3
    assert Zack(str(path), multiple=16) == Zack(str(path))
    with pytest.raises(ValueError, match=r"svd-kv needs keep=\.\.\. "):
        SvdKV(str(path))


@pairs
def test_at_full_rank_nothing_is_lost(kind: type[Ranked], made, file: Path) -> None:
    policy = kind(str(file), rate=0.0)
    for i in range(2):
        bound = policy.bind(i, made.shape)
        q, k, v = (x[i].float() for x in (made.query, made.key, made.value))
        logits = bound.key.project_queries(q) @ bound.key.project(k)[:, :, None].mT
        true = q @ k[:, :, None].mT
        assert (logits - true).abs().max() < 1e-4 * true.abs().max()
        back = bound.value.undo(bound.value.project(v)[:, :, None])[:, :, 0]
        assert (back - v).abs().max() < 1e-4 * v.abs().max()


@pytest.mark.parametrize("kind", [Zack, SvdKV])
def test_the_basis_is_the_right_singular_vectors_of_the_rows(
    kind: type[Ranked], made, file: Path
) -> None:
    policy = kind(str(file), rate=0.5, ranks="uniform")
    for i in range(2):
        bound = policy.bind(i, made.shape)
        rows = made.stacked(i)
        if kind is SvdKV:
            rows = tuple(x[i].transpose(0, 1).flatten(1, 2) for x in (made.key, made.value))
        for basis, each_head in zip((bound.key, bound.value), rows, strict=True):
            right = torch.linalg.svd(each_head, full_matrices=False).Vh.mT[..., : basis.rank[0]]
            overlap = (basis.matrix.double().mT @ right).abs()
            eye = torch.eye(basis.rank[0], dtype=torch.float64).expand_as(overlap)
            torch.testing.assert_close(overlap, eye, rtol=0, atol=1e-5)


def lost(found: HeadBasis, asking: Tensor, stored: Tensor) -> Tensor:
    """Return E|q·k - (q B)·(k A)|² of independent vectors with these second moments, by head."""
    a, b = found.matrix.double(), (found.matrix if found.dual is None else found.dual).double()
    gap = torch.eye(a.shape[1], dtype=torch.float64) - b @ a.mT
    return (gap.mT @ asking @ gap @ stored).diagonal(dim1=1, dim2=2).sum(-1)


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_no_rotation_loses_less_than_the_best_pair(rate: float, made, file: Path) -> None:
    """Uniform ranks, so that all heads keep equally many dimensions."""
    statistics = load(file)[1]
    bases = {k: k(str(file), rate=rate, ranks="uniform") for k in (KqSvd, Zack, SvdKV)}
    for i, layer in enumerate(statistics):
        bound = {k: policy.bind(i, made.shape) for k, policy in bases.items()}
        for facet, asking, stored in (
            ("key", layer.query, layer.keys),
            ("value", layer.output, layer.values),
        ):
            moments = asking.total / asking.rows, stored.total / stored.rows
            errors = {k: lost(getattr(b, facet), *moments) for k, b in bound.items()}
            rank = getattr(bound[KqSvd], facet).rank[0]
            roots = [_root(m) for m in moments]
            singular = torch.linalg.svdvals(roots[0] @ roots[1])
            torch.testing.assert_close(
                errors[KqSvd], singular[:, rank:].square().sum(-1), rtol=1e-4, atol=1e-12
            )
            for other in (Zack, SvdKV):
                assert (errors[other] >= errors[KqSvd] * (1 - 1e-4)).all()
                assert (errors[other] > 1.5 * errors[KqSvd]).any()


def _root(moment: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(moment)
    return vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT


def test_coordinates_of_the_best_pair_are_balanced(file: Path) -> None:
    layer = load(file)[1].layers[0]
    found = best_pair(layer.query, layer.keys)
    assert found.dual is not None
    for matrix, moments in ((found.matrix, layer.keys), (found.dual, layer.query)):
        spread = matrix.mT @ (moments.total / moments.rows) @ matrix
        torch.testing.assert_close(spread, torch.diag_embed(found.singular), rtol=1e-6, atol=1e-9)


def test_directions_that_no_sample_reached_stay_in_the_best_pair(make_model, tmp_path) -> None:
    few = make_model(layers=1, tokens=10)  # 20 keys in 64 dimensions
    path = few.write(tmp_path / "few")
    policy = KqSvd(str(path), rate=0.0)
    key = policy.bind(0, few.shape).key
    eye = torch.eye(64).expand(4, 64, 64)
    torch.testing.assert_close(key.matrix @ key.dual.mT, eye, rtol=0, atol=1e-3)
    layer = load(path)[1].layers[0]
    nothing = layer.query.blocks(1)
    found = best_pair(nothing, Moments(torch.zeros_like(nothing.total), 5))
    assert found.matrix.isfinite().all()
    assert found.dual is not None
    assert found.dual.isfinite().all()
    with pytest.raises(ValueError, match="without samples"):
        best_pair(nothing, Moments(nothing.total, 0))


def test_palu_is_the_svd_of_the_whitened_projection(made, file: Path) -> None:
    """The latent's space is that of the left singular vectors of W S, with k = W x."""
    statistics = load(file)[1]
    policy = Palu(str(file), rate=0.5, together=2, ranks="uniform")
    key = policy.bind(0, made.shape).key
    assert key.together == 2
    assert len(key.rank) == 2
    draw = torch.Generator().manual_seed(1)
    hidden = 200
    x = torch.randn(300, hidden, dtype=torch.float64, generator=draw)
    w = (
        torch.randn(128, hidden, dtype=torch.float64, generator=draw)
        * torch.logspace(0, -2, 128, dtype=torch.float64)[:, None]
    )
    s = torch.linalg.cholesky(x.mT @ x)
    left = torch.linalg.svd(w @ s).U[:, :20]
    ours = rotation(Moments.of((x @ w.mT)[None]), 2).matrix.reshape(128, -1)[:, :20]
    overlap = torch.linalg.svdvals(left.mT @ ours)
    torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=0, atol=1e-9)
    # and a policy's error for a group's concatenated keys is that of Eckart-Young
    k = made.key[0].unflatten(1, (2, 2)).transpose(2, 3).flatten(3).transpose(0, 1).flatten(1, 2)
    matrix = key.matrix.double().unflatten(0, (2, 2)).flatten(1, 2)
    error = (k - k @ matrix @ matrix.mT).square().sum((1, 2))
    singular = torch.linalg.eigvalsh(statistics.layers[0].key.total).flip(-1)
    torch.testing.assert_close(error, singular[:, key.rank[0] :].sum(-1), rtol=1e-4, atol=1e-8)


def test_palu_with_one_head_is_the_svd_of_each_alone(made, file: Path) -> None:
    one, alone = Palu(str(file), rate=0.5, together=1), SvdKV(str(file), rate=0.5)
    for i in range(2):
        ours, theirs = one.bind(i, made.shape), alone.bind(i, made.shape)
        assert ours.key.rank == theirs.key.rank
        assert torch.equal(ours.value.matrix, theirs.value.matrix)


def test_palu_needs_its_statistics(made, file: Path) -> None:
    with pytest.raises(ValueError, match=r"together=4 needs statistics .* with --together 4"):
        Palu(str(file), rate=0.5)
    policy = Palu(str(file), rate=0.5, together=2)
    assert not policy.capabilities.splits_heads
    shard = CacheShape(2, 1, 3, 64, 32, first_head=1)
    with pytest.raises(ValueError, match="heads 1 to 1 split such a group"):
        policy.bind(0, shard)


@each
def test_a_shard_has_the_maps_of_its_heads(name: str, made, file: Path) -> None:
    policy = parse(spec(name, file))
    shard = CacheShape(2, 2, 3, 64, 32, first_head=2)
    for i in range(2):
        whole, part = policy.basis.bind(i, made.shape), policy.basis.bind(i, shard)
        assert torch.equal(part.key.matrix, whole.key.matrix[2:])
        half = len(whole.key.rank) // 2
        assert part.key.rank == whole.key.rank[half:]
        assert torch.equal(part.value.matrix, whole.value.matrix[2:])


def test_think_keeps_the_channels_that_queries_ask_for(made, file: Path) -> None:
    policy = ThinK(str(file), rate=0.5, value_rate=0.25)
    for i in range(2):
        bound = policy.bind(i, made.shape)
        assert bound.key.rank == (32,) * 4
        assert bound.value.rank == (24,) * 4
        q, k = made.query[i], made.key[i]
        score = q.square().mean((0, 2, 3)) * k.square().mean((0, 2))
        o = made.output[i].unflatten(1, (4, 3, 32)).square().mean((0, 2))
        by_value = o * made.value[i].square().mean((0, 2))
        for head in range(4):
            for basis, scores in ((bound.key, score), (bound.value, by_value)):
                kept = basis.matrix[head].nonzero()[:, 0]
                best = scores[head].topk(basis.rank[head]).indices
                assert set(kept.tolist()) == set(best.tolist())
                assert (basis.matrix[head].sum(0) == 1).all()


def test_think_leaves_values_alone_unless_asked(made, file: Path) -> None:
    bound = ThinK(str(file)).bind(0, made.shape)
    assert bound.value is None
    assert bound.key.rank == (38,) * 4  # 0.6 of 64, rounded down
    assert ThinK(str(file), multiple=16).bind(0, made.shape).key.rank == (32,) * 4
    assert ThinK(str(file), rate=0.0).bind(0, made.shape).key is None


@pytest.mark.parametrize("share", [1, 12.5, 30, 70, 75, 99.9, 100])
def test_keep_says_what_a_rate_leaves(share: float, file: Path) -> None:
    rate = float(Fraction(100 - Fraction(str(share)), 100))
    for name in ("zack", "svd-kv", "kq-svd"):
        found = parse(f"{name}:file={file},keep={share}%,multiple=1") if share >= 30 else None
        assert found is None or found.rate == rate
    thin = parse(f"think:file={file},keep={share}%")
    assert thin == ThinK(str(file), rate=rate)
    assert parse(str(thin)) == thin


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("zack:file={},rate=0.3,removal=0.1", "both set the ranks, so use one"),
        ("zack:file={}", "has no rate, since none was searched for; use keep=70%"),
        ("zack:file={},removal=0.1,ranks=uniform", "with ranks=uniform use keep=..., or a rate"),
        ("zack:file={},rate=1", "rate=1 is refused"),
        ("zack:file={},rate=-0.1", "is refused"),
        (
            "zack:file={},rate=0.9",
            "a rate of 0.9 cannot be reached: with ranks of a multiple",
        ),
        ("zack:file={},removal=1.5", "is refused"),
        ("zack:file={},rate=0.3,multiple=0", "multiple=0 is refused"),
        ("zack:file={},rate=0.3,ranks=even", "ranks=even is refused"),
        ("kq-svd:file={}", "kq-svd needs keep=... (the share of the dimensions to keep), or rate"),
        ("zack:file={},keep=70%,rate=0.3", "keep=70% and rate=0.3 both set how much is kept"),
        ("zack:file={},keep=70%,removal=0.1", "keep=70% and removal=0.1 both set how much is"),
        ("zack:file={},keep=0.7", "to keep 0.7 of the dimensions write keep=70%"),
        ("zack:file={},rate=4", "to keep 0.25 of the dimensions write keep=25%"),
        ("zack:file={},keep=10%", "a rate of 0.9 cannot be reached"),
        ("think:file={},rate=1.0", "is refused"),
        ("zack:rate=0.3", "zack needs file=..., which has no default"),
        (
            "zack:file=nowhere,rate=0.3",
            "zack: nowhere does not exist; write it with `kv-serve calibrate zack --model MODEL "
            "--out nowhere`",
        ),
        ("zack:file=/,rate=0.3", "zack: / is a directory; name a file in it"),
    ],
)
def test_what_is_refused_at_construction(text: str, sentence: str, file: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse(text.format(file))
    assert sentence in str(caught.value).replace(f"{Path.cwd()}/", "")


def test_a_cache_of_another_model_is_refused(made, file: Path) -> None:
    policy = Zack(str(file), rate=0.3)
    for shape, sentence in (
        (CacheShape(3, 4, 3, 64, 32), "a model with 2 layers, but this cache has 3"),
        (CacheShape(2, 4, 2, 64, 32), "3 query heads for each KV head, but this cache has 2"),
        (CacheShape(2, 4, 3, 32, 32), "64 dimensions in a key, but this cache has 32"),
        (CacheShape(2, 4, 3, 64, 64), "32 dimensions in a value, but this cache has 64"),
        (CacheShape(2, 4, 3, 64, 32, first_head=2), "this cache has heads 2 to 5"),
    ):
        with pytest.raises(ValueError, match=sentence):
            policy.bind(0, shape)
    with pytest.raises(ValueError, match="layer 2 not found"):
        policy.bind(2, made.shape)


def test_statistics_of_two_models_do_not_mix(made, file: Path, tmp_path: Path) -> None:
    other = replace(made, key=made.key * 2).write(tmp_path / "other", fingerprint="another")
    assert Zack(str(other), rate=0.3).fitted_to == "another"
    assert Zack(str(file), rate=0.3).fitted_to == "0123456789abcdef"


def test_values_are_truncated_where_the_weights_rotate_them(made, file: Path) -> None:
    policy = Zack(str(file), rate=0.4, multiple=1)
    assert isinstance(policy, FoldsValues)
    here = replace(made.shape, folded=policy.value_fingerprint)
    for layer in range(made.shape.layers):
        mapped, cut = policy.bind(layer, made.shape), policy.bind(layer, here)
        assert mapped.value is not None
        assert cut.value is not None
        assert torch.equal(cut.key.matrix, mapped.key.matrix)
        assert cut.value.truncates
        assert cut.value.rank == mapped.value.rank
        whole = policy.value_rotation(layer).matrix
        eye = torch.eye(whole.shape[2], dtype=whole.dtype).expand(len(whole), -1, -1)
        torch.testing.assert_close(whole.mT @ whole, eye, rtol=0, atol=1e-12)
        # What is stored of values that the weights rotate is what the basis stores.
        rotated = whole @ cut.value.matrix.double()
        torch.testing.assert_close(rotated.float(), mapped.value.matrix, rtol=0, atol=1e-6)


def test_a_fingerprint_is_of_the_values_and_not_of_the_ranks(made, file: Path, tmp_path) -> None:
    own = Zack(str(file), rate=0.4).value_fingerprint
    assert Zack(str(file), rate=0.1, ranks="uniform").value_fingerprint == own
    keys = replace(made, key=made.key * 2).write(tmp_path / "keys", together=2)
    assert Zack(str(keys), rate=0.4).value_fingerprint == own
    values = replace(made, value=made.value.flip(-1)).write(tmp_path / "values")
    other = Zack(str(values), rate=0.4)
    assert other.value_fingerprint != own
    with pytest.raises(ValueError, match=f"hold the value basis {own}, but that of"):
        other.bind(0, replace(made.shape, folded=own))


def test_a_shard_of_a_folded_model_is_truncated_as_in_the_whole(made, file: Path) -> None:
    policy = Zack(str(file), rate=0.4, multiple=1)
    here = replace(made.shape, folded=policy.value_fingerprint)
    whole = policy.bind(1, here).value
    shard = policy.bind(1, replace(here, first_head=2, kv_heads=2)).value
    assert shard is not None
    assert whole is not None
    assert shard.rank == whole.rank[2:]
    assert shard.truncates
