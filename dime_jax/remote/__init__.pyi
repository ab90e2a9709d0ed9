from .client import RemoteDenoiser
from .options import NO_REMOTE_OPTIONS, RemoteOptions, is_address

__all__ = ["NO_REMOTE_OPTIONS", "RemoteDenoiser", "RemoteOptions", "is_address"]
