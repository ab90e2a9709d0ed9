from .config import AuditConfig
from .deletion import compare, report_comparison
from .stages import AuditResult, audit, report

__all__ = ["AuditConfig", "AuditResult", "audit", "compare", "report", "report_comparison"]
