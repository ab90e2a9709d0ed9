from .config import AuditConfig as AuditConfig
from .deletion import compare as compare
from .deletion import report_comparison as report_comparison
from .run_audit import AuditResult as AuditResult
from .run_audit import audit as audit
from .run_audit import report as report
