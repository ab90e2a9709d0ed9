"""DIME in JAX: which images was a diffusion model trained on?

Lower scores mean member, for every statistic, everywhere. The public names are listed in `__init__.pyi` and imported
when they are first used, so that `import dime_jax` and `dime-jax --help` are quick.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
