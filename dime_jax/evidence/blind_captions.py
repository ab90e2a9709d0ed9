"""A baseline that sees neither model nor pictures: can members be told from held-out images by their captions alone?

On LAION-mi the words of the captions reveal more than the best attack does. A model that is asked with captions can
only be judged against what the captions say by themselves.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from dime_jax._util import validate
from dime_jax.evidence import blind

_CHARACTERS = 2000  # characters of a caption that are read: text encoders read fewer
_HASHES = 2**17
_STRENGTH = 10.0  # of the fit, the inverse of its penalty


def caption_baseline(
    member_captions: Sequence[str],
    heldout_captions: Sequence[str],
    groups: npt.ArrayLike | None = None,
    folds: int = 5,
    seed: int = 0,
    *,
    confidence: float = 0.95,
) -> blind.BlindBaseline:
    """Cross-validated logistic regression on words, word pairs, letters and form of captions.

    The record, folds, ranks and groups are those of `blind.blind_baseline`, so that `blind.gap_over_blind` compares
    an attack with either. With groups the interval allows for captions that fall
    together. Captions that are all the same give an AUC of exactly 1/2. Deterministic in `seed`.

    Args:
      member_captions: texts, which may be empty.
      heldout_captions: texts.
      groups: of all images, members first; -1 for an image on its own.
      folds: the most folds.
      seed: of the folds.
      confidence: of the AUC's interval.

    Raises:
      GroupsTooLarge: if no classifier can be fitted outside some fold.
    """
    for captions, name in ((member_captions, "member_captions"), (heldout_captions, "heldout_captions")):
        if isinstance(captions, str) or not all(isinstance(caption, str) for caption in captions):
            raise ValueError(f"{name} must be a list of strings, got {type(captions).__name__}")
        validate.check_at_least(len(captions), 2, f"number of {name}")
    validate.check_at_least(folds, 2, "folds")
    captions = [caption[:_CHARACTERS] for caption in (*member_captions, *heldout_captions)]
    counts, form = _gram_counts(captions), caption_form(captions)
    is_heldout = np.repeat([0, 1], [len(member_captions), len(heldout_captions)])

    def decide(train: np.ndarray, test: np.ndarray) -> np.ndarray:
        features = _features(counts, form, train)
        classifier = LogisticRegression(C=_STRENGTH, solver="liblinear")
        return classifier.fit(features[train], is_heldout[train]).decision_function(features[test])

    member, heldout, folds = blind.cross_fitted(decide, is_heldout, groups, folds, seed)
    auc, n_features = blind.blind_auc(member, heldout, confidence, groups), sum(p.shape[1] for p in (*counts, form))
    return blind.BlindBaseline(auc, member, heldout, folds, n_features)


def caption_form(captions: Sequence[str]) -> np.ndarray:
    """Describe how captions are written, whatever they say [n, 6].

    Logarithms of the numbers of characters and words, and the shares of characters that are upper case, digits,
    punctuation, and beyond ASCII.
    """

    def one(caption: str) -> list[float]:
        kinds = (str.isupper, str.isdigit, lambda c: not c.isalnum() and not c.isspace(), lambda c: not c.isascii())
        shares = [sum(map(kind, caption)) / max(1, len(caption)) for kind in kinds]
        return [np.log1p(len(caption)), np.log1p(len(caption.split())), *shares]

    return np.array([one(caption) for caption in captions])


def _gram_counts(captions: Sequence[str]) -> list[sparse.csr_array]:
    """Count each word or pair of words, and each run of 2 to 4 letters, in each caption.

    They are told apart by hash, so that captions without a single word need no special case.
    """
    shared = {"n_features": _HASHES, "norm": None, "alternate_sign": False}
    words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b", **shared)
    letters = HashingVectorizer(ngram_range=(2, 4), analyzer="char_wb", lowercase=False, **shared)
    counts = [vectorizer.transform(captions) for vectorizer in (words, letters)]
    return [part[:, np.unique(np.append(part.indices, 0))] for part in counts]


def _features(counts: Sequence[sparse.csr_array], form: np.ndarray, train: np.ndarray) -> sparse.csr_array:
    """Weigh each count by how rare it is among the training captions."""
    weighed = [TfidfTransformer(sublinear_tf=True).fit(part[train]).transform(part) for part in counts]
    standard = StandardScaler().fit(form[train]).transform(form)
    return sparse.hstack([*weighed, sparse.csr_array(standard / np.sqrt(form.shape[1]))], format="csr")
