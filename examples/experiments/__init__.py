"""The experiments behind docs/field_report.md; `python examples/field_report.py` runs them."""
