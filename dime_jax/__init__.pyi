from . import attacks, data, evidence
from .attacks import (
    Attack,
    DimeStats,
    DimeTerms,
    decide,
    dime_bands,
    dime_central_terms,
    dime_score,
    dime_terms,
    loss,
    pia,
    register_attack,
    secmi,
    sima,
    sima_mc,
    theory_phi,
)
from .auditing import AuditConfig, AuditResult, audit, compare
from .core.denoiser import Denoiser
from .core.ideal import ErrorDecomposition, IdealDenoiser
from .core.schedule import NoiseSchedule, cosine_schedule, linear_schedule, schedule_from_betas
from .evidence import metrics
from .guards.wiring import DenoiserCheck, check_denoiser
from .loading.conversion import ConversionOptions, UseOptions
from .loading.opening import OpenedModel, load_denoiser, open_model
from .protocol import calibration
from .remote import RemoteDenoiser, RemoteOptions

__version__: str

__all__ = [
    "Attack",
    "AuditConfig",
    "AuditResult",
    "ConversionOptions",
    "Denoiser",
    "DenoiserCheck",
    "DimeStats",
    "DimeTerms",
    "ErrorDecomposition",
    "IdealDenoiser",
    "NoiseSchedule",
    "OpenedModel",
    "RemoteDenoiser",
    "RemoteOptions",
    "UseOptions",
    "attacks",
    "audit",
    "calibration",
    "check_denoiser",
    "compare",
    "cosine_schedule",
    "data",
    "decide",
    "dime_bands",
    "dime_central_terms",
    "dime_score",
    "dime_terms",
    "evidence",
    "linear_schedule",
    "load_denoiser",
    "loss",
    "metrics",
    "open_model",
    "pia",
    "register_attack",
    "schedule_from_betas",
    "secmi",
    "sima",
    "sima_mc",
    "theory_phi",
]
