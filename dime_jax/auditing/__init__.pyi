from .config import AuditConfig as AuditConfig
from .deletion import compare as compare
from .deletion import report_comparison as report_comparison
from .stages import AuditResult as AuditResult
from .stages import audit as audit
from .stages import report as report
