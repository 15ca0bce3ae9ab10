"""Orthogonal matrices of any order whose elements have about equal magnitude.

A quantizer with one scale per vector has the error of the vector's largest element in all of them.
A matrix whose elements are all about 1/sqrt(n) spreads an outlier over every coordinate, as in
QuaRot (Ashkboos et al., 2024, arXiv 2404.00456).
"""

from functools import lru_cache
from math import isqrt, pi

import torch
from jaxtyping import Float64, Int
from torch import Tensor


@lru_cache(maxsize=16)
def spreading(order: int) -> Float64[Tensor, "n n"]:
    """Return an orthogonal matrix with elements of magnitude at most sqrt(2 / n).

    It is a Hadamard matrix over sqrt(n) where `hadamard` finds one, which mixes all dimensions
    evenly. Otherwise it is the Kronecker product of one of the largest order that divides n, and
    the orthonormal DCT-II of the quotient, which exists in every order and is as dense.

    Raises:
        ValueError: the order is not positive.
    """
    if order < 1:
        raise ValueError(f"a matrix of order {order} was asked for; the order is 1 or more")
    with torch.inference_mode(False), torch.device("cpu"):  # cached tensors outlive the caller
        for size in range(order, 0, -1):
            found = hadamard(size) if order % size == 0 else None
            if found is not None:
                return torch.kron(found.double() / size**0.5, _cosines(order // size))
    raise AssertionError("there is a Hadamard matrix of order 1")


def hadamard(order: int) -> Int[Tensor, "n n"] | None:
    """Return a matrix of 1 and -1 with orthogonal rows, or None if no construction here gives one.

    Sylvester's doubling, and both of Paley's constructions from primes (1933). They give every
    order of heads in use that is a multiple of four, such as 64, 80, 96, 112, 128, 192 and 256.
    """
    if order < 3 or order % 4:
        return _doubled(torch.ones(1, 1, dtype=torch.long), order)
    for base in (order // 2, order):
        found = hadamard(base) if base < order else _paley(order)
        if found is not None:
            return _doubled(found, order)
    return None


def _doubled(found: Tensor, order: int) -> Tensor | None:
    """Double a matrix at most once to the order; None if that is not the order."""
    if len(found) == order:
        return found
    twice = torch.tensor([[1, 1], [1, -1]])
    return torch.kron(twice, found) if 2 * len(found) == order else None


def _paley(order: int) -> Tensor | None:
    """Return Paley's matrix from the quadratic residues of a prime, of order q + 1 or 2 (q + 1)."""
    prime = order - 1
    if _is_prime(prime) and prime % 4 == 3:
        return torch.eye(order, dtype=torch.long) + _bordered(prime, -1)
    prime = order // 2 - 1
    if _is_prime(prime) and prime % 4 == 1:
        signs, ones = torch.tensor([[1, 1], [1, -1]]), torch.tensor([[1, -1], [-1, -1]])
        diagonal = torch.eye(order // 2, dtype=torch.long)
        return torch.kron(_bordered(prime, 1), signs) + torch.kron(diagonal, ones)
    return None


def _bordered(prime: int, sign: int) -> Tensor:
    """Return the matrix of differences that are squares, bordered by 1, and `sign` at the left."""
    squares = torch.arange(1, prime).square() % prime
    residue = torch.full((prime,), -1).index_fill(0, squares, 1)
    residue[0] = 0
    index = torch.arange(prime)
    found = torch.zeros(prime + 1, prime + 1, dtype=torch.long)
    found[0, 1:], found[1:, 0] = 1, sign
    found[1:, 1:] = residue[(index[:, None] - index) % prime]
    return found


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))


def _cosines(order: int) -> Float64[Tensor, "n n"]:
    """Return the orthonormal DCT-II."""
    index = torch.arange(order, dtype=torch.float64)
    found: Tensor = (pi / order * (index[:, None] + 0.5) * index).cos() * (2 / order) ** 0.5
    found[:, 0] = order**-0.5
    return found
