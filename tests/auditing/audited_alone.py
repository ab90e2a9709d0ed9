"""An audit in a process of its own: python audited_alone.py OUTPUT MODEL REFERENCE LORA...; prints its peak memory.

The networks are random, which a short check of them lets pass here.
"""

import resource
import sys

import numpy as np

import dime_jax as dj
from dime_jax.guards import model_check, wiring

wiring.NO_BETTER_THAN_ZERO, model_check.IMAGES = 1e6, 2


def main(output, model, reference, *loras):
    images = np.random.default_rng(0).integers(0, 256, (34, 8, 8, 1), np.uint8)
    result = dj.audit(
        dj.AuditConfig(
            output=output,
            model=model,
            reference=None if reference == "own" else reference,
            heldout=dj.data.from_images(images[:30]),
            candidates=dj.data.from_images(images[30:]),
            use=dj.UseOptions(lora=loras),
            options=dj.scoring.ScoringOptions(silent=True, micro_batch=8),
        )
    )
    assert result.results["queries_made"]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    main(*sys.argv[1:])
