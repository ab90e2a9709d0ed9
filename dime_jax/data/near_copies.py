"""Find pictures that are copies of one another: mirrored, recoloured, re-encoded, resized, shifted or slightly cropped.

All comparing is done on a common grid, 32 x 32 in grey. What two pictures have in common by chance is in their low
frequencies, so a pair is judged by its *high-pass correlation*: of the pictures minus their Gaussian blur, the largest
over shifts of up to two pixels, as they are and with either of them enlarged by a tenth. That is too slow for every
pair. A *coarse likeness* proposes the pairs that are worth it: the cosine of low DCT coefficients, which blocked matrix
products compute for all pairs, shifts and mirror images.

A correlation means little between pictures that have little in them (digits, a plane in a blue sky). So a pair needs
more of it the fewer independent details the pictures have, or else must be equal in colours and coarse structure.
"""

import concurrent.futures
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import scipy.fft
import scipy.ndimage
import threadpoolctl
from PIL import Image

from dime_jax.data.batches import NUM_THREADS

# Chosen on generated copies and unrelated pictures among 20,000 images of CIFAR-10 and on drawn digits; docs/method.md
# has what they find and what they confuse.
GRID = 32
MIN_CORRELATION = 0.75
MAX_RMS = 14.0
_MIN_LIKENESS = 0.75
_MIN_LIKENESS_OF_PIXELS = 0.9
_SURPRISE = 4.5  # in standard errors of Fisher's z
_WORTH_ENLARGING = 0.35  # 98 % of pictures cropped to nine tenths correlate at least this much before enlarging

_BLUR = 2.0
_MAX_SHIFT = 2
_ENLARGED = 29  # pixels of 32 that are enlarged to the whole grid
_FREQUENCIES = 7
_SHIFTS = ((0.0, 0.0), (1.3, 1.3), (1.3, -1.3), (-1.3, 1.3), (-1.3, -1.3))
_NOISE = 60.0  # contrast below this counts as none, so that all blank pictures are alike

_ROWS, _COLUMNS, _PAIRS = 512, 1024, 1024  # blocks that stay in the cache
_PROPOSED_PER_PICTURE = 25
_PROPOSED_AT_LEAST = 2**20


class Pictures(NamedTuple):
    """The pictures to compare.

    Attributes:
      grey: uint8 [n, 32, 32], means of the channels on the common grid.
      thumbnails: uint8 [n, side, side, 3].
      sides: int [n], the shorter side of each picture in pixels, before it was brought to the grid.
    """

    grey: np.ndarray
    thumbnails: np.ndarray
    sides: np.ndarray


class _Proposed(NamedTuple):
    """Pairs that are worth a closer look: positions, whether the second is mirrored, and their likeness."""

    first: np.ndarray
    second: np.ndarray
    mirrored: np.ndarray
    likeness: np.ndarray


class _Coarse(NamedTuple):
    """Low frequencies: those that mirroring keeps, and those whose sign it changes; rows of both together have norm 1.

    The cosine of two pictures is e·e' + o·o', that of one and the other's mirror image e·e' − o·o'.
    """

    even: np.ndarray
    odd: np.ndarray


def find_near_copies(
    pictures: Pictures, *, min_correlation: float = MIN_CORRELATION, max_rms: float = MAX_RMS
) -> np.ndarray:
    """Return the pairs (i, j), i < j, in order, int64 [k, 2], of pictures that are copies of one another.

    A pair is proposed if its coarse likeness is at least 0.75; where more than 25 pairs per picture would be (and more
    than a million), as among pictures that all show the same thing, only the most alike are. A proposed pair is one of
    copies if its high-pass correlation r reaches min_correlation and is not chance, artanh r >= 4.5/sqrt(details - 3)
    with the details of the picture that has fewer, which must be more than 3. Or if the colours of the thumbnails
    differ by a root mean square of at most max_rms, on 0..255 (less for pictures smaller than the thumbnails), and the
    coarse likeness is at least 0.9.

    Args:
      pictures: to compare, each with each.
      min_correlation: see above.
      max_rms: see above.
    """
    n = len(pictures.grey)
    shifted = [_coarse(pictures.grey, shift) for shift in _SHIFTS]
    needed = np.maximum(np.tanh(_SURPRISE / np.sqrt(np.maximum(_details(pictures) - 3, 1e-9))), min_correlation)
    limit = _limit(shifted)

    def search(start: int) -> np.ndarray:
        proposed = _propose(shifted, start, min(start + _ROWS, n), limit)
        found = [
            np.stack([some.first, some.second], axis=1)[_confirm(pictures, some, needed, max_rms)]
            for some in _in_blocks(proposed)
        ]
        return np.unique(np.concatenate([np.empty((0, 2), np.int64), *found]), axis=0)

    # Single-threaded products in threads of our own: what comes between two products would leave the others waiting.
    with threadpoolctl.threadpool_limits(1, "blas"), concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as threads:
        return np.concatenate([np.empty((0, 2), np.int64), *threads.map(search, range(0, n, _ROWS))])


def high_pass(grey: np.ndarray) -> np.ndarray:
    """Subtract from pictures [n, 32, 32] their blur (sigma 2, edges repeated); scale to mean 0, norm 1; 0 if flat."""
    blur = _blur()
    high = grey - blur @ grey @ blur.T
    high -= high.mean((1, 2), keepdims=True)
    norm = np.sqrt(np.sum(high**2, (1, 2), keepdims=True))
    return np.where(norm > 1e-2, high / np.maximum(norm, 1e-2), 0).astype(np.float32)


def _details(pictures: Pictures) -> np.ndarray:
    """Return about how many independent numbers make up the high-pass of each picture.

    The number of frequencies that share its power times the share of the area that its energy covers, both as
    participation ratios (Σa)²/Σa²; a picture smaller than the grid has fewer by the ratio of the areas.
    """
    counts = []
    for start in range(0, len(pictures.grey), _PAIRS):
        high = high_pass(pictures.grey[start : start + _PAIRS].astype(np.float32))
        power = np.abs(scipy.fft.fft2(high)) ** 2
        counts.append(_participation(power) * _participation(high**2) / GRID**2)
    return np.concatenate(counts) * np.minimum(pictures.sides / GRID, 1) ** 2


def _participation(amounts: np.ndarray) -> np.ndarray:
    return np.sum(amounts, (1, 2)) ** 2 / np.maximum(np.sum(amounts**2, (1, 2)), 1e-9) + 1e-9


def _coarse(grey: np.ndarray, shift: tuple[float, float]) -> _Coarse:
    """Return the low frequencies of pictures that are shifted by some pixels."""
    basis = _basis(shift)
    even, odd = (np.empty((len(grey), part.shape[1]), np.float32) for part in basis)
    for start in range(0, len(grey), _PAIRS):
        some = grey[start : start + _PAIRS].reshape(-1, GRID**2).astype(np.float32)
        even[start : start + _PAIRS], odd[start : start + _PAIRS] = (some @ part for part in basis)
    even = np.concatenate([even, np.full((len(even), 1), _NOISE, np.float32)], axis=1)
    norm = np.sqrt(np.sum(even**2, axis=1, keepdims=True) + np.sum(odd**2, axis=1, keepdims=True))
    return _Coarse(even / norm, odd / norm)


@functools.cache
def _basis(shift: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices [1024, k] that take a picture to its symmetric and to its antisymmetric frequencies.

    Frequencies (u, v) with 0 < |(u, v)| <= 7, times |(u, v)|, since natural pictures have less of higher ones.
    """
    grid = np.arange(GRID)
    waves = scipy.fft.idct(np.eye(GRID), axis=0, norm="ortho")
    vertical, horizontal = (
        np.stack([np.interp(grid - pixels, grid, unit) for unit in np.eye(GRID)]) @ waves for pixels in shift
    )
    parts = []
    for parity in (0, 1):
        chosen = [
            np.hypot(u, v) * np.outer(vertical[:, u], horizontal[:, v]).ravel()
            for u in grid
            for v in grid[parity::2]
            if 0 < np.hypot(u, v) <= _FREQUENCIES
        ]
        parts.append(np.stack(chosen, axis=1).astype(np.float32))
    return parts[0], parts[1]


def _limit(shifted: list[_Coarse]) -> float:
    """Estimate from a sample the likeness from which pairs are proposed, so that their number is bounded."""
    n = len(shifted[0].even)
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, most)).astype(int)) for most in (256, 8192))
    best = np.full((len(rows), len(columns)), -1, np.float32)
    for one in shifted:
        even, odd = one.even[rows] @ shifted[0].even[columns].T, one.odd[rows] @ shifted[0].odd[columns].T
        np.maximum(best, even + np.abs(odd), out=best)
    best = best[rows[:, None] != columns]
    most = max(_PROPOSED_AT_LEAST, _PROPOSED_PER_PICTURE * n) / max(n * (n - 1) / 2, 1)
    return max(_MIN_LIKENESS, float(np.quantile(best, 1 - most))) if most < 1 else _MIN_LIKENESS


def _propose(shifted: list[_Coarse], start: int, end: int, limit: float) -> _Proposed:
    """Propose pairs of a picture from start to before end, shifted, with a later one as it is, or mirrored."""
    base, n = shifted[0], len(shifted[0].even)
    found = []
    for left in range(start, n, _COLUMNS):
        for one in shifted:
            even = one.even[start:end] @ base.even[left : left + _COLUMNS].T
            odd = one.odd[start:end] @ base.odd[left : left + _COLUMNS].T
            best = np.abs(odd)
            best += even
            rows, columns = np.nonzero(best >= limit)
            pair, even, odd = (rows + start) * n + columns + left, even[rows, columns], odd[rows, columns]
            later = rows + start < columns + left
            for mirrored, likeness in enumerate((even + odd, even - odd)):
                chosen = later & (likeness >= limit)
                found.append((pair[chosen] * 2 + mirrored, likeness[chosen]))
    numbers, likeness = np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])
    order = np.lexsort((-likeness, numbers))
    numbers, first = np.unique(numbers[order], return_index=True)  # of equal pairs the most alike
    return _Proposed(numbers // 2 // n, numbers // 2 % n, numbers % 2 == 1, likeness[order][first])


def _in_blocks(proposed: _Proposed) -> Iterator[_Proposed]:
    for start in range(0, len(proposed.first), _PAIRS):
        yield _Proposed(*(part[start : start + _PAIRS] for part in proposed))


def _confirm(pictures: Pictures, some: _Proposed, needed: np.ndarray, max_rms: float) -> np.ndarray:
    """Return which of the proposed pairs are copies, bool."""
    least = np.maximum(needed[some.first], needed[some.second])
    copies = np.zeros(len(least), bool)
    rich = np.flatnonzero(least < 1)
    first, second = (pictures.grey[rows[rich]].astype(np.float32) for rows in (some.first, some.second))
    second = np.where(some.mirrored[rich, None, None], second[:, :, ::-1], second)
    copies[rich] = _best_correlation(first, second) >= least[rich]

    alike = np.flatnonzero(some.likeness >= _MIN_LIKENESS_OF_PIXELS)
    one, two = (pictures.thumbnails[rows[alike]].astype(np.float32) for rows in (some.first, some.second))
    difference = one - np.where(some.mirrored[alike, None, None, None], two[:, :, ::-1], two)
    sides = np.minimum(pictures.sides[some.first[alike]], pictures.sides[some.second[alike]])
    allowed = max_rms * np.minimum(sides / pictures.thumbnails.shape[1], 1)
    copies[alike] |= np.sqrt(np.mean(difference**2, axis=(1, 2, 3))) <= allowed
    return copies


def _best_correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the largest correlation of each pair of [n, 32, 32], as it is or with either picture enlarged."""
    best = _correlation(high_pass(first), high_pass(second))
    again = np.flatnonzero(best >= _WORTH_ENLARGING)
    first, second, enlarge = first[again], second[again], _enlarging()
    for one, two in ((enlarge @ first @ enlarge.T, second), (first, enlarge @ second @ enlarge.T)):
        best[again] = np.maximum(best[again], _correlation(high_pass(one), high_pass(two)))
    return best


def _correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the largest correlation of each pair over shifts of up to two pixels, around the edges."""
    product = scipy.fft.rfft2(first) * scipy.fft.rfft2(second).conj()
    shifts = np.arange(-_MAX_SHIFT, _MAX_SHIFT + 1)
    return scipy.fft.irfft2(product, s=(GRID, GRID))[:, shifts[:, None], shifts].max((1, 2), initial=-1)


@functools.cache
def _blur() -> np.ndarray:
    """Return the matrix that blurs a picture when multiplied from both sides."""
    return scipy.ndimage.gaussian_filter1d(np.eye(GRID, dtype=np.float32), _BLUR, axis=0, mode="nearest")


@functools.cache
def _enlarging() -> np.ndarray:
    """Return the matrix that, multiplied from both sides, makes the middle of a picture fill the grid."""
    edge = (GRID - _ENLARGED) / 2
    unit = Image.fromarray(np.eye(GRID, dtype=np.float32))
    return np.asarray(unit.resize((GRID, GRID), Image.Resampling.BICUBIC, box=(0, edge, GRID, GRID - edge)))
