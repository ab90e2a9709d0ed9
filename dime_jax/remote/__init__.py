"""A Denoiser over the Open Inference Protocol (KServe v2), both ends: `dj.RemoteDenoiser` and `dime-jax serve`.

options.py     what a user says about a hosted model, in Python and on the command line
kserve.py      tensors as requests and answers carry them
transport.py   connections, the token, redirects, pauses and limits
metadata.py    what the server says about its model, checked against what the user says
client.py      RemoteDenoiser
answering.py   what a hosted model answers to a request
serve.py       the HTTP server around it
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
