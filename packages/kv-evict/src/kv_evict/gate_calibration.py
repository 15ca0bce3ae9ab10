"""Calibration of a gate: the target's scores, a ridge regression and a network per KV head."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kv_evict.calibrating import expect_no_padding
from kv_evict.gate_features import features, split, width
from kv_evict.gate_file import Facts, GateWeights, save
from kv_evict.gate_fit import Moments, NetworkFit
from kv_evict.gate_network import GateNetwork
from kv_evict.gate_sample import Sample
from kv_policy import CacheShape, Calibrated, ScoreEvaluation

RIDGE: Final = 1e-6  # added to the correlations of the features
LEAST: Final = 1e-5  # scores below count as this: no query attends to such tokens
UNITS: Final = 16  # of the hidden layer: two bytes a feature, head and unit in the file
SAMPLE: Final = 65536  # tokens that the networks are fitted to, at most
SHARES: Final = (0.5, 0.25, 0.125)  # kept shares at which the overlap is written to the file
QUANTILES: Final = 1001  # of scores, in the file
_QUERIES: Final = 256  # queries whose attention is computed at once


@dataclass(frozen=True, slots=True)
class Repeated:
    """A text and its repetition in one pass: the text, an instruction, and the text again.

    Attributes:
        text: tokens of the text, at the start of the pass.
        instruction: tokens between the text and its repetition.
    """

    text: int
    instruction: int

    @property
    def first(self) -> int:
        """The first repeating token; its queries and those of all later tokens count."""
        return self.text + self.instruction


def repeated_attention(
    query: Float[Tensor, "B H G L D"], key: Float[Tensor, "B H L D"], where: Repeated
) -> Iterator[tuple[slice, Float[Tensor, "B H G Q T"]]]:
    """Yield the attention of the repeating queries to the T tokens of the text, some at a time.

    Args:
        query: of the whole pass, scaled so that q·k / sqrt(D) is the logit.
        key: of the whole pass.
        where: the places of the text and of its repetition.
    """
    length, scale = key.shape[2], key.shape[-1] ** -0.5
    place = torch.arange(length, device=key.device)
    for first in range(where.first, length, _QUERIES):
        some = slice(first, min(length, first + _QUERIES))
        logit = query[:, :, :, some] @ key[:, :, None, : some.stop].mT * scale
        later = place[None, : some.stop] > place[some, None]
        weight = logit.float().masked_fill(later, -torch.inf).softmax(-1)
        yield some, weight[..., : where.text]


class GateCalibration:
    """Fits a gate to KVzip's scores: the largest attention of any repeating query to a token.

    It accumulates moments of features and targets, and keeps a random sample of tokens, so memory
    does not grow with the tokens. A pass holds a text and its repetition (`Repeated`), without
    padding.
    """

    def __init__(self, shape: CacheShape, instruction: int, units: int = UNITS) -> None:
        """Start with no tokens.

        Args:
            shape: the model's cache, with its rotary embedding.
            instruction: tokens between a text and its repetition.
            units: of the hidden layer of every head; 0: only the regression.

        Raises:
            ValueError: the rotary embedding is unknown.
        """
        if shape.rope is None:
            raise ValueError("a gate reads keys before RoPE, and the rotary embedding is unknown")
        self.shape, self.instruction, self.units = shape, instruction, units
        count = width(shape.key_dim, shape.value_dim)
        lead = (shape.layers, shape.kv_heads)
        self._squares = torch.zeros(*lead, count, count, dtype=torch.float64)
        self._products = torch.zeros(*lead, count, dtype=torch.float64)
        self._tokens = torch.zeros(shape.layers, dtype=torch.int64)
        self._sample = Sample(shape, SAMPLE if units else 0)
        self._device = torch.device("cpu")
        self._fitted: GateNetwork | None = None

    @property
    def tokens(self) -> int:
        """Tokens accumulated in every layer, without their repetition."""
        return int(self._tokens.min())

    def see(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Accumulate a layer's vectors of a pass, after RoPE.

        Raises:
            ValueError: there is padding, or vectors contain an infinity or NaN.
        """
        expect_no_padding(layer, there)
        found, score = self.examples(layer, query, key, value)
        target = score.clamp(min=LEAST).log()
        given, wanted = found.double(), target.double()
        if not (given.isfinite().all() and wanted.isfinite().all()):
            raise ValueError(f"layer {layer}: keys or values contain an infinity or NaN")
        flat = given.transpose(0, 1).flatten(1, 2)  # H, tokens, F
        self._squares[layer] += (flat.mT @ flat).cpu()
        self._products[layer] += (flat.mT @ wanted.transpose(0, 1).flatten(1)[..., None])[
            ..., 0
        ].cpu()
        self._tokens[layer] += flat.shape[1]
        keys, values = split(found, self.shape.key_dim, self.shape.value_dim)
        self._sample.add(layer, keys, values, target)
        self._device, self._fitted = query.device, None

    def examples(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
    ) -> tuple[Float[Tensor, "B H T F"], Float[Tensor, "B H T"]]:
        """Return the features of the text's T tokens, and their target scores."""
        length = key.shape[2]
        where = Repeated((length - self.instruction) // 2, self.instruction)
        key, value, query = key.float(), value.float(), query.float()
        score = key.new_zeros(*key.shape[:2], where.text)
        for _, weight in repeated_attention(query, key, where):
            score = torch.maximum(score, weight.amax((2, 3)))
        place = -torch.arange(where.text, device=key.device)
        rows = torch.full((len(key),), layer, device=key.device)
        plain = self.shape.turned(key[:, :, : where.text], place.expand(len(key), 1, -1), rows)
        pairs = self.shape.pair_norms(plain, rows)
        return features(plain, pairs, value[:, :, : where.text]), score

    def state(self) -> dict[str, Tensor]:
        """Return the accumulated moments and token counts."""
        return {
            "squares": self._squares.clone(),
            "products": self._products.clone(),
            "tokens": self._tokens.clone(),
            **self._sample.state(),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state; the results are bitwise those of an uninterrupted run.

        Raises:
            ValueError: the state belongs to another model.
        """
        moments = ("squares", "products", "tokens")
        mine = {name: (x.shape, x.dtype) for name, x in self.state().items() if name in moments}
        found = {name: (x.shape, x.dtype) for name, x in state.items() if name in moments}
        if found != mine or not self._sample.fits(state):
            raise ValueError("the state is of a model with other sizes; start over")
        self._sample.restore(state)
        self._fitted = None
        self._squares = state["squares"].clone()
        self._products = state["products"].clone()
        self._tokens = state["tokens"].clone()

    def regression(self) -> Float[Tensor, "N H F"]:
        """Return the weights of the regression of every head.

        The ridge is added to the correlations of the features, so it does not depend on their
        scales.

        Raises:
            ValueError: no tokens were accumulated, or some layers have more than others.
        """
        counts = self._tokens
        if int(counts.min()) == 0 or int(counts.min()) != int(counts.max()):
            raise ValueError(
                f"layers have seen from {int(counts.min())} to {int(counts.max())} tokens; feed "
                "all layers the same tokens first"
            )
        size = self._squares.diagonal(dim1=-2, dim2=-1).clamp(min=1e-12).sqrt()
        related = self._squares / size[..., :, None] / size[..., None, :]
        related = related + RIDGE * torch.eye(related.shape[-1], dtype=related.dtype)
        solved = torch.linalg.solve(related, (self._products / size)[..., None])[..., 0]
        found: Tensor = (solved / size).float()
        return found

    def fit(self) -> Iterator[float]:
        """Fit the networks to the tokens so far; yield the share that is done.

        Raises:
            ValueError: as `regression`.
        """
        linear = self.regression()
        moments = Moments.of(self._squares.clone(), self.tokens)
        fit = NetworkFit(self.shape, linear, moments, self.units, self._device)
        if self.units:
            yield from fit.run(self._sample.examples())
        self._fitted = fit.network()
        yield 1.0

    def network(self) -> GateNetwork:
        """Return the fitted networks, as the file will hold them.

        Raises:
            ValueError: `fit` was not run to its end since the last tokens.
        """
        if self._fitted is None:
            raise ValueError("nothing is fitted to the tokens so far; run fit() to its end first")
        return self._fitted

    def evaluation(self, network: GateNetwork | None = None) -> "GateEvaluation":
        """Return an empty evaluation of networks, such as those of a file; None: the fitted ones.

        Raises:
            ValueError: as `network`.
        """
        return GateEvaluation(self, self.network() if network is None else network)

    def write(
        self, path: Path, facts: Calibrated, window: int, evaluations: Collection[ScoreEvaluation]
    ) -> None:
        """Write the gate atomically.

        Args:
            path: the file.
            facts: the model and the text.
            window: tokens that were repeated at once.
            evaluations: of texts it was not fitted on, which also give the quantiles of scores.

        Raises:
            ValueError: there is no evaluation, one of another calibrator, or nothing is fitted.
            OSError: writing failed; an existing file is unchanged.
        """
        shape = self.shape
        mine = [each for each in evaluations if isinstance(each, GateEvaluation)]
        if not mine or len(mine) < len(evaluations):
            raise ValueError(
                "the quantiles of a gate's scores come from its evaluations, and "
                f"{len(mine)} of {len(evaluations)} given are; pass what evaluation() returned"
            )
        header = Facts(
            model=facts.model,
            fingerprint=facts.fingerprint,
            text=facts.text,
            digest=facts.digest,
            tokens=self.tokens,
            window=window,
            layers=shape.layers,
            heads=shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            units=self.units,
            overlap={
                f"{share:g}": round(sum(j.overlap(share) for j in mine) / len(mine), 4)
                for share in SHARES
            },
        )
        scores = torch.cat([evaluation.scores() for evaluation in mine]).double().sort().values
        places = torch.linspace(0, len(scores) - 1, QUANTILES, dtype=torch.float64).round().long()
        save(path, GateWeights(header, self.network(), scores[places].float()))


class GateEvaluation:
    """Compares a gate's choice of tokens with its target's, on texts it was not fitted on."""

    def __init__(self, calibration: GateCalibration, network: GateNetwork) -> None:
        """Evaluate networks on passes that a calibration could accumulate."""
        self._calibration, self._network = calibration, network
        # By layer: predictions and targets of each pass.
        self._found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in network.linear]

    def see(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Predict and compute the scores of a pass, as in `GateCalibration.see`."""
        given, score = self._calibration.examples(layer, query, key, value)
        rows = torch.full((len(given),), layer)
        network = self._network.rows(rows, slice(None)).to(given.device)
        self._found[layer].append((network(given).cpu(), score.cpu()))

    def scores(self) -> Float[Tensor, " S"]:
        """Return the predicted probabilities of all tokens, heads and layers."""
        each = [mine.flatten() for layer in self._found for mine, _ in layer]
        return torch.cat(each).clamp(max=0).exp()

    def overlap(self, share: float, layers: slice = slice(None)) -> float:
        """Return the mean share of the target's best tokens that are among the gate's best.

        All heads of the layers compete for the kept `share` of a pass.
        """
        each = []
        for one in zip(*self._found[layers], strict=True):
            mine, wanted = (torch.stack(x).flatten() for x in zip(*one, strict=True))
            count = max(1, int(len(mine) * share))
            kept = torch.zeros(len(mine), dtype=torch.bool)
            kept[wanted.topk(count).indices] = True
            each.append(kept[mine.topk(count).indices].float().mean().item())
        return sum(each) / len(each)
