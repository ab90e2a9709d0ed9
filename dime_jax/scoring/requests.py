"""A batch of queries as a model takes it: all at once, or in requests of a few images, several at a time.

Every attempt at a request is entered in a ledger before it is sent, and repeated alone where it fails.
"""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import jax
import numpy as np
from jax.typing import ArrayLike

from dime_jax._util.typing import Array, PyTree
from dime_jax.core.denoiser import Denoiser
from dime_jax.scoring.retry import Retry, with_retries


def ask_in_requests(
    denoiser: Denoiser,
    x: Array,
    t: ArrayLike,
    condition: PyTree,
    *,
    debit: Callable[[slice], object],
    retry: Retry,
    say: Callable[[str], object],
) -> Array:
    """eps(x, t), from a model that may fail now and then.

    If a request fails for good, those under way are waited for, and no other is sent.

    Args:
      denoiser: the model.
      x: the batch.
      t: a timestep, or one for each row.
      condition: of the rows.
      debit: called with the rows of a request before each attempt to send it, perhaps from several threads.
      retry: how to ask again.
      say: shows a line.
    """
    stop = threading.Event()

    def ask(part: slice) -> jax.Array:
        denoiser.wait_turn(len(x[part]), stop)
        debit(part)
        told = jax.tree.map(lambda rows: rows[part], condition)
        return denoiser.ask_once(x[part], np.asarray(t)[part] if np.ndim(t) else t, told)

    ask_with_retries = with_retries(ask, retry, say, stop)
    if denoiser.requests is None or len(x) <= denoiser.requests.images:
        return ask_with_retries(slice(None))
    size = denoiser.requests.images
    x = np.asarray(x)
    parts = [slice(start, start + size) for start in range(0, len(x), size)]
    with ThreadPoolExecutor(min(denoiser.requests.in_flight, len(parts))) as pool:
        answers = [pool.submit(ask_with_retries, part) for part in parts]
        try:
            for answer in wait(answers, return_when=FIRST_EXCEPTION).done:
                answer.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return np.concatenate([np.asarray(answer.result()) for answer in answers])
