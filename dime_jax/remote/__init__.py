"""Asking a model that someone else hosts, over the Open Inference Protocol (KServe v2). (`dj.RemoteDenoiser`)

options.py     what a user says about it, in Python and on the command line
protocol.py    tensors as requests and answers carry them; `dime_jax.serve` speaks it too
transport.py   connections, the token, redirects, pauses and limits
metadata.py    what the server says about its model, checked against what the user says
hosted.py      the Denoiser
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
