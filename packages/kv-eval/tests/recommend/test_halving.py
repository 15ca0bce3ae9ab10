"""The search spends little, ends where it should, and does the same again."""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.recommend.halving import SETTING, TASK, Arm, Halving, frontier, standing
from kv_transformers.from_text import FULL

Truth = dict[str, tuple[int, float]]  # bytes and loss by policy


class Texts:
    """Windows whose nats are made up: a loss per policy, and noise that grows with it."""

    def __init__(self, truth: Truth, folder: Path, noise: float = 0.0) -> None:
        self.truth, self.noise = truth, noise
        self.journal = Journal.start(folder / "partial", {})
        self.run_again = 0

    @property
    def arms(self) -> tuple[Arm, ...]:
        return tuple(Arm(policy, held) for policy, (held, _) in self.truth.items())

    def __call__(self, policies: Sequence[str], numbers: range) -> Iterator[Finished]:
        for policy in policies:
            _, loss = self.truth.get(policy, (0, 0.0))
            for i in numbers:
                if self.journal.get(policy, TASK, SETTING, i) is None:
                    self.journal.append([self.entry(policy, i, loss)])
                else:
                    self.run_again += 1
                entry = self.journal.get(policy, TASK, SETTING, i)
                assert entry is not None
                yield entry

    def entry(self, policy: str, i: int, loss: float) -> Finished:
        random_ = random.Random(f"{policy} {i}")
        noise = 0.0 if policy == FULL else self.noise * (loss + 0.01) * random_.gauss(0, 1)
        return Finished(
            policy=policy,
            task=TASK,
            setting=SETTING,
            sample=i,
            score=3.0 + math.sin(i) + loss + noise,
            kv_bytes=10,
            full_bytes=20,
            seconds=0.0,
            divergences=() if policy == FULL else (2 * loss, 2 * loss + abs(noise)),
        )


def search(texts: Texts, windows: int, loss: float | None, precision: float = 0.0) -> Halving:
    made = Halving(texts.arms, windows, loss, precision)
    for _ in made.run(texts, texts.journal):
        pass
    return made


arms = st.lists(
    st.tuples(st.integers(1, 10**6), st.integers(0, 10**4)), min_size=1, max_size=60, unique=True
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arms=arms, windows=st.integers(2, 40), limit=st.integers(0, 10**4))
def test_without_noise_the_best_is_found(
    tmp_path_factory: pytest.TempPathFactory, arms, windows, limit
) -> None:
    truth = {f"p{i}": (held, loss / 1000) for i, (held, loss) in enumerate(arms)}
    folder = tmp_path_factory.mktemp("journal")
    allowed = limit / 1000 + 0.0005
    good = [policy for policy, (_, loss) in truth.items() if loss <= allowed]
    texts = Texts(truth, folder)
    found = search(texts, windows, allowed).finalists(texts.journal)[0].arm
    if good:
        fewest = min(truth[policy][0] for policy in good)
        assert (found.request_bytes, found.policy in good) == (fewest, True)
    least = search(texts, windows, None).finalists(texts.journal)[0]
    assert truth[least.arm.policy][1] == min(loss for _, loss in truth.values())


def test_with_noise_little_is_lost_for_a_tenth_of_the_samples(tmp_path: Path) -> None:
    random_ = random.Random(1)
    truth = {f"p{i}": (random_.randrange(10, 99), random_.expovariate(10)) for i in range(150)}
    texts = Texts(truth, tmp_path, noise=1.0)
    made = search(texts, 32, None)
    best = made.finalists(texts.journal)[0]
    assert truth[best.arm.policy][1] <= min(loss for _, loss in truth.values()) + 0.005
    assert made.spent <= 150 * 32 / 10
    assert made.total == made.spent + 32


@pytest.mark.parametrize("policies", [1, 2, 3, 10, 37, 115, 366])
def test_no_more_is_read_than_is_said_before(tmp_path: Path, policies: int) -> None:
    truth = {f"p{i}": (i + 1, i / policies) for i in range(policies)}
    texts = Texts(truth, tmp_path)
    made = search(texts, 32, 0.3)
    assert made.spent + made.read == len(texts.journal) <= made.total
    assert made.read <= 32
    if policies > 100:
        assert made.spent <= policies * 32 / 10


def test_one_that_is_left_is_read_until_its_interval_is_narrow(tmp_path: Path) -> None:
    truth = {"a": (1, 0.01), "b": (2, 0.5), "c": (3, 0.9)}
    (tmp_path / "wide").mkdir()
    narrow = search(Texts(truth, tmp_path, noise=0.1), 81, 0.1, precision=0.05)
    assert (narrow.read, [arm.policy for arm in narrow.alive]) == (9, ["a"])
    wide = search(Texts(truth, tmp_path / "wide", noise=0.1), 81, 0.1, precision=0.0)
    assert wide.read == 81


def test_an_interrupted_search_runs_nothing_again_and_ends_the_same(tmp_path: Path) -> None:
    truth = {f"p{i}": (7 * i % 31 + 1, (5 * i % 29) / 100) for i in range(29)}
    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    whole, part = (Texts(truth, tmp_path / name, noise=0.5) for name in ("whole", "part"))
    once = search(whole, 20, 0.05)
    going = Halving(part.arms, 20, 0.05).run(part, part.journal)
    for _ in range(70):
        next(going)
    going.close()
    before = len(part.journal)
    again = search(part, 20, 0.05)
    assert part.run_again == before >= 70
    assert again.alive == once.alive
    assert again.finalists(part.journal) == once.finalists(whole.journal)


def test_the_next_best_is_completed_where_the_best_is_not_good_enough(tmp_path: Path) -> None:
    truth = {"a": (1, 0.3), "b": (2, 0.2), "c": (3, 0.1), "d": (4, 0.05)}
    texts = Texts(truth, tmp_path)
    made = search(texts, 9, 0.01)
    assert [arm.policy for arm in made.alive] == ["d"]
    spent = made.spent
    for expected, more in (("d", 0), ("c", 8), ("b", 8), ("a", 8)):
        list(made.complete_next(texts, texts.journal))
        assert made.complete[-1].policy == expected
        spent += more
        assert made.spent == spent
    assert texts.run_again == 2 * 3 * 4  # the full cache's, in each of three times two ranges
    assert [each.windows for each in made.finalists(texts.journal)] == [9] * 4
    list(made.complete_next(texts, texts.journal))
    assert len(made.complete) == 4


def test_a_policy_within_the_loss_comes_before_those_that_lose_less(tmp_path: Path) -> None:
    truth = {"big": (90, 0.0), "small": (20, 0.04), "bad": (10, 0.3)}
    texts = Texts(truth, tmp_path)
    list(texts([FULL, *truth], range(6)))
    made = Halving(texts.arms, 6, 0.05)
    made.read = 6
    assert [each.arm.policy for each in made.finalists(texts.journal)] == ["small", "big", "bad"]
    every = [standing(texts.journal, arm) for arm in texts.arms]
    assert [each.arm.policy for each in frontier(every)] == ["bad", "small", "big"]
    assert [each.loss for each in every] == pytest.approx([0.0, 0.04, 0.3])
    assert [each.divergence for each in every] == pytest.approx([0.0, 0.08, 0.6])


def test_a_search_needs_a_policy_and_two_windows() -> None:
    with pytest.raises(ValueError, match="at least one policy"):
        Halving(())
    with pytest.raises(ValueError, match="windows is 1; an interval needs at least 2"):
        Halving((Arm("a", 1),), windows=1)
