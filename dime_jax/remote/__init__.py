"""Asking a model that someone else hosts, over the Open Inference Protocol (KServe v2). (`dj.RemoteDenoiser`)

options.py     what a user says about it, in Python and on the command line
kserve.py      tensors as requests and answers carry them
transport.py   connections, the token, redirects, pauses and limits
metadata.py    what the server says about its model, checked against what the user says
client.py      the Denoiser
answering.py   the other end: what a model answers to a request
serve.py       `dime-jax serve`: that over HTTP
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
