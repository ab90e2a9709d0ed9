"""Cache compiled programs on disk: JAX's persistent cache, in a directory of the user's own.

DIME_JAX_CACHE=off turns it off; DIME_JAX_CACHE=DIR puts it elsewhere. If JAX_COMPILATION_CACHE_DIR is set, it is used
instead. Programs of another jaxlib, or of a CPU with other features, are cached apart, since they may not run here.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable, MutableMapping

from dime_jax._util.files import CACHE, OFF, user_cache

_JAX_DIRECTORY, _JAX_LEAST_SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def use(say: Callable[[str], object], environment: MutableMapping[str, str] = os.environ) -> pathlib.Path | None:
    """Tell JAX, before it is imported, where to cache what it compiles.

    Several processes may share the directory; at worst, a program that one of them is still writing is compiled again.

    Args:
      say: shows a warning if the directory cannot be written to; programs are then compiled in every process.
      environment: where the switch is read and JAX's variables are set.

    Returns:
      The directory; None if there is none, or JAX's own variable is set.
    """
    if environment.get(CACHE) == OFF or _JAX_DIRECTORY in environment:
        return None
    directory = user_cache(environment) / f"jaxlib-{importlib.metadata.version('jaxlib')}-{cpu_features()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"room for at least this")
    except OSError as error:
        say(f"warning: compiled programs are not cached: cannot write to {directory}: {error.strerror}")
        return None
    environment[_JAX_DIRECTORY] = str(directory)
    environment.setdefault(_JAX_LEAST_SECONDS, "0")
    return directory


def cpu_features() -> str:
    """Return eight hexadecimal digits that differ between CPUs that cannot run each other's programs."""
    known = platform.machine() + platform.processor()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # another system
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.blake2b((known + flags).encode(), digest_size=4).hexdigest()
